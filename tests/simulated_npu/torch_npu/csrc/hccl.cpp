// Collectives run on a stream of their own, after what was on the caller's stream; `Work.wait()` lets the caller's
// stream wait, and not the host. gloo carries copies of the data, which the tensors get only if all went well: nothing
// writes to a tensor after an abort. A peer that is gone is not noticed: the collective goes on waiting, as on the real
// links, until it is aborted, the device is stopped, or its time is over. Begin with ProcessGroupHCCL::issue.
#include "hccl.h"
#include <thread>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <algorithm>
#include <set>
#include "operators.h"

namespace npu {
namespace {

using at::Tensor;
using std::chrono::milliseconds;
using Tensors = std::vector<Tensor>;
using Carry = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend& gloo)>;
constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr int GARBAGE = 0x7a;
std::atomic<int> g_next_error{RUN};

// What the thread of a stream and the group share, and what outlives both: a gloo operation that nobody waits for any
// more may never end, and so must never be destroyed.
struct Link {
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::atomic<bool> is_aborted{false};
  // Operations that gloo has begun and not ended. gloo's threads hold the number, and never the link: the last to hold
  // that would wait for itself to end.
  const std::shared_ptr<std::atomic<int>> running = std::make_shared<std::atomic<int>>(0);
};

struct HcclWork final : c10d::Work {
  HcclWork(int rank, c10d::OpType op, Tensors outputs, c10::Device on, bool is_barrier)
      : Work(rank, op), outputs(std::move(outputs)), on(on), is_barrier(is_barrier) {}

  bool isCompleted() override { return end->is_set() || failure(); }
  bool isSuccess() const override { return end->is_set() && !failure(); }
  std::exception_ptr exception() const override { return failure(); }
  std::vector<Tensor> result() override { return outputs; }
  void synchronize() override { npu::block(end, current_stream(on.index())); }
  bool wait(milliseconds) override {
    if (auto error = failure()) std::rethrow_exception(error);
    synchronize();
    if (is_barrier) {
      npu::synchronize(end, on.index());
      if (auto error = failure()) std::rethrow_exception(error);
    }
    return true;
  }
  void abort() override { TORCH_CHECK(false, "abort the group"); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  std::exception_ptr failure() const {
    std::lock_guard<std::mutex> lock(guard);
    return error;
  }
  void fail(std::exception_ptr with) {
    std::lock_guard<std::mutex> lock(guard);
    if (!error) error = std::move(with);
  }

  const Tensors outputs;
  const c10::Device on;
  const bool is_barrier;
  MarkPtr end;
  c10::intrusive_ptr<c10::ivalue::Future> future;

 private:
  mutable std::mutex guard;
  std::exception_ptr error;
};

// Several operations that were started together.
struct BatchWork final : c10d::Work {
  explicit BatchWork(std::vector<c10::intrusive_ptr<c10d::Work>> all) : all(std::move(all)) {}
  bool isCompleted() override {
    return std::all_of(all.begin(), all.end(), [](auto& one) { return one->isCompleted(); });
  }
  bool isSuccess() const override { return !exception(); }
  std::exception_ptr exception() const override {
    for (auto& one : all) if (auto error = one->exception()) return error;
    return nullptr;
  }
  bool wait(milliseconds limit) override {
    for (auto& one : all) one->wait(limit);
    return true;
  }
  const std::vector<c10::intrusive_ptr<c10d::Work>> all;
};

class ProcessGroupHCCL;
std::mutex g_groups_mutex;
std::set<ProcessGroupHCCL*> g_groups;

class ProcessGroupHCCL final : public c10d::Backend {
 public:
  ProcessGroupHCCL(int rank, int size, milliseconds timeout, Connect connect)
      : Backend(rank, size), timeout_(timeout), connect_(std::move(connect)) {
    std::lock_guard<std::mutex> lock(g_groups_mutex);
    g_groups.insert(this);
  }
  ~ProcessGroupHCCL() override {
    drop_link();
    std::lock_guard<std::mutex> lock(g_groups_mutex);
    g_groups.erase(this);
  }
  const std::string getBackendName() const override { return "hccl"; }
  void setTimeout(milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  // All waiters are woken with an error; the group can do nothing more.
  void abort() override {
    drop_link();
    is_over_ = true;
  }
  void shutdown() override { abort(); }

  void reinit() {
    drop_link();
    ++generation_;
    is_stopped_ = is_over_ = false;
  }
  void stop(int device) { if (device_ == device) is_stopped_ = true; }
  void resume(int device) {
    if (device_ != device) return;
    // Each rank's queue was emptied at a point of its own: the old connections are of no use.
    if (is_stopped_) reinit();
  }
  const std::map<std::string, int>& calls() const { return calls_; }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    is_batching_ = true;
    batch_.clear();
  }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    is_batching_ = false;
    ++calls_["batch"];
    return c10::make_intrusive<BatchWork>(std::move(batch_));
  }

  using Work = c10::intrusive_ptr<c10d::Work>;

  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return reduce_like("allreduce", c10d::OpType::ALLREDUCE, tensors, opts.reduceOp, [opts](c10d::Backend& gloo, Tensors& hosts, const c10d::ReduceOp& op) {
      auto with = opts;
      with.reduceOp = op;
      return gloo.allreduce(hosts, with);
    });
  }
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    Work last;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      c10d::AllreduceOptions with;
      with.reduceOp = opts.reduceOp;
      last = allreduce(one, with);
    }
    return last;
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return reduce_like("reduce", c10d::OpType::REDUCE, tensors, opts.reduceOp, [opts](c10d::Backend& gloo, Tensors& hosts, const c10d::ReduceOp& op) {
      auto with = opts;
      with.reduceOp = op;
      return gloo.reduce(hosts, with);
    });
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto hosts = copies(tensors);
    return issue("broadcast", c10d::OpType::BROADCAST, tensors, *hosts, tensors, *hosts, [hosts, opts](c10d::Backend& gloo) { return gloo.broadcast(*hosts, opts); });
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto from = copies(inputs);
    auto into = lists(outputs);
    return issue("allgather", c10d::OpType::ALLGATHER, inputs, *from, flat(outputs), flat(*into), [from, into, opts](c10d::Backend& gloo) { return gloo.allgather(*into, *from, opts); });
  }
  Work _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
    auto from = copies({input}), into = copies({output});
    return issue("_allgather_base", c10d::OpType::_ALLGATHER_BASE, {input}, *from, {output}, *into, [from, into, opts](c10d::Backend& gloo) { return gloo._allgather_base((*into)[0], (*from)[0], opts); });
  }
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    Work last;
    for (size_t i = 0; i < inputs.size(); ++i) last = _allgather_base(outputs[i], inputs[i], opts);
    return last;
  }
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    auto from = copies(inputs);
    auto into = lists(outputs);
    return issue("gather", c10d::OpType::GATHER, inputs, *from, flat(outputs), flat(*into), [from, into, opts](c10d::Backend& gloo) { return gloo.gather(*into, *from, opts); });
  }
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    auto from = lists(inputs);
    auto into = copies(outputs);
    return issue("scatter", c10d::OpType::SCATTER, flat(inputs), flat(*from), outputs, *into, [from, into, opts](c10d::Backend& gloo) { return gloo.scatter(*into, *from, opts); });
  }
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    // gloo's own is not the same on all releases: reduce all, and take what is ours.
    return scattered("reduce_scatter", c10d::OpType::REDUCE_SCATTER, outputs.at(0), inputs.at(0), opts.reduceOp);
  }
  Work _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return scattered("_reduce_scatter_base", c10d::OpType::_REDUCE_SCATTER_BASE, output, {input}, opts.reduceOp);
  }
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    Work last;
    for (size_t i = 0; i < inputs.size(); ++i) last = _reduce_scatter_base(outputs[i], inputs[i], opts);
    return last;
  }
  Work alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& of, const c10d::AllToAllOptions& opts) override {
    auto from = copies({input}), into = copies({output});
    return issue("alltoall_base", c10d::OpType::ALLTOALL_BASE, {input}, *from, {output}, *into, [from, into, to, of, opts](c10d::Backend& gloo) mutable {
      return gloo.alltoall_base((*into)[0], (*from)[0], to, of, opts);
    });
  }
  Work send(Tensors& tensors, int to, int tag) override {
    auto hosts = copies(tensors);
    return issue("send", c10d::OpType::SEND, tensors, *hosts, {}, {}, [hosts, to, tag](c10d::Backend& gloo) { return gloo.send(*hosts, to, tag); }, 2 * to + 1);
  }
  Work recv(Tensors& tensors, int from, int tag) override {
    auto hosts = copies(tensors);
    return issue("recv", c10d::OpType::RECV, {}, {}, tensors, *hosts, [hosts, from, tag](c10d::Backend& gloo) { return gloo.recv(*hosts, from, tag); }, 2 * from + 2);
  }
  Work barrier(const c10d::BarrierOptions&) override {
    return issue("barrier", c10d::OpType::BARRIER, {}, {}, {}, {}, [](c10d::Backend& gloo) { return gloo.barrier(); });
  }

 private:
  template <typename Run>
  Work reduce_like(const char* name, c10d::OpType op, Tensors& tensors, const c10d::ReduceOp& reduce, Run run) {
    auto hosts = copies(tensors);
    const bool is_mean = reduce == c10d::ReduceOp::AVG;
    const c10d::ReduceOp by = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : reduce;
    const int parts = is_mean ? size_ : 1;
    return issue(name, op, tensors, *hosts, tensors, *hosts, [hosts, by, run](c10d::Backend& gloo) { return run(gloo, *hosts, by); }, 0, parts);
  }

  Work scattered(const char* name, c10d::OpType op, const Tensor& output, const Tensors& inputs, const c10d::ReduceOp& reduce) {
    auto from = copies(inputs);
    auto whole = std::make_shared<Tensors>(Tensors{at::empty({size_, output.numel()}, output.options().device(at::kCPU))});
    const bool is_mean = reduce == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions opts;
    opts.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : reduce;
    const auto mine = whole->at(0)[rank_].view(output.sizes());
    return issue(name, op, inputs, *from, {output}, {mine}, [from, whole, opts](c10d::Backend& gloo) {
      Tensors parts;
      for (auto& one : *from) parts.push_back(one.reshape({-1}));
      whole->at(0).view({-1}).copy_(at::cat(parts));
      return gloo.allreduce(*whole, opts);
    }, 0, is_mean ? size_ : 1);
  }

  // Host memory of the tensors' shapes.
  static std::shared_ptr<Tensors> copies(const Tensors& tensors) {
    auto made = std::make_shared<Tensors>();
    for (auto& one : tensors) made->push_back(at::empty(one.sizes(), one.options().device(at::kCPU)));
    return made;
  }
  static std::shared_ptr<std::vector<Tensors>> lists(const std::vector<Tensors>& all) {
    auto made = std::make_shared<std::vector<Tensors>>();
    for (auto& one : all) made->push_back(*copies(one));
    return made;
  }
  static Tensors flat(const std::vector<Tensors>& all) {
    Tensors made;
    for (auto& one : all) made.insert(made.end(), one.begin(), one.end());
    return made;
  }

  void drop_link() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!link_) return;
    link_->is_aborted = true;
    if (*link_->running > 0) new std::shared_ptr<Link>(link_);  // never destroyed, see Link
    link_.reset();
  }

  // Carry inputs to outputs by way of the hosts' copies of them.
  // lane    0 for collectives; operations of different lanes do not wait for each other
  // parts   results are divided by so many
  Work issue(const char* name, c10d::OpType op, const Tensors& inputs, const Tensors& from, const Tensors& outputs,
             const Tensors& into, Carry carry, int lane = 0, int parts = 1) {
    for (auto& all : {inputs, outputs})
      for (auto& one : all) TORCH_CHECK(one.is_privateuseone(), "hccl carries npu tensors, and no ", one.device());
    const int index = !inputs.empty() ? inputs[0].device().index() : !outputs.empty() ? outputs[0].device().index() : current_device();
    const c10::Device on(NPU, static_cast<c10::DeviceIndex>(index));
    auto& of = device(index);
    of.check();
    TORCH_CHECK(!is_over_, "HCCL communicator was aborted (simulated)");
    if (is_stopped_) throw std::runtime_error("HCCL communicator: FORCE STOP, error code is 107022: reinit_process_group has not resumed it (simulated)");
    device_ = index;
    ++calls_[name];
    ++sequence_;
    if (const int error = g_next_error.exchange(RUN)) of.fail(static_cast<State>(error));
    of.reads_library_poison();
    of.check();
    std::vector<Held> reads;
    for (auto& one : inputs) reads.push_back(held(one));
    of.check_safe(reads);
    auto link = connected();

    auto work = c10::make_intrusive<HcclWork>(rank_, op, outputs, on, op == c10d::OpType::BARRIER);
    const auto stream = lane_of(lane, on);
    block(record(current_stream(index)), stream);
    Tensors sources, targets;
    for (auto& one : inputs) sources.push_back(as_host(one));
    for (auto& one : outputs) targets.push_back(as_host(one));
    Task task;
    task.reads = reads;
    task.cancel = [work](std::exception_ptr error) { work->fail(std::move(error)); };
    task.run = [=, &of, timeout = timeout_.load()] {
      for (size_t i = 0; i < sources.size(); ++i) Tensor(from[i]).copy_(sources[i]);
      if (!carried(carry, link, of, timeout, *work)) {
        for (auto& target : targets) garble(target);
        return;
      }
      for (size_t i = 0; i < targets.size(); ++i) {
        Tensor target = targets[i];
        if (parts > 1) Tensor(into[i]).div_(parts);
        target.copy_(into[i]);
      }
    };
    queue_of(stream).push(std::move(task));
    work->end = record(stream);
    {
      const c10::StreamGuard guard(stream);
      work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{on});
      work->future->markCompleted(c10::IValue(outputs));
    }
    if (is_batching_) batch_.push_back(work);
    return work;
  }

  static bool carried(const Carry& carry, const std::shared_ptr<Link>& link, Device& of, milliseconds timeout, HcclWork& work) {
    auto end = std::make_shared<Mark>();
    const auto until = std::chrono::steady_clock::now() + timeout;
    auto is_well = std::make_shared<std::atomic<bool>>(false);
    bool has_begun = false;
    if (!link->is_aborted) {
      try {
        ++*link->running;
        auto below = carry(*link->gloo);
        auto ended = [end, is_well, running = link->running](bool has_succeeded) {
          *is_well = has_succeeded;
          if (!has_succeeded) return;  // a peer that is gone is not noticed
          --*running;
          end->set();
        };
        if (c10d::isP2POp(work.retrieveOpType())) {  // gloo's works of these have no future
          std::thread([below, ended] {
            bool has_succeeded = false;
            try {
              has_succeeded = below->wait();
            } catch (const std::exception&) {
            }
            ended(has_succeeded);
          }).detach();
        } else {
          below->getFuture()->addCallback([ended](c10::ivalue::Future& future) { ended(!future.hasError()); });
        }
        has_begun = true;
      } catch (const std::exception&) {
      }
    }
    while (!end->wait_for(milliseconds(2))) {
      if (link->is_aborted) {
        work.fail(std::make_exception_ptr(std::runtime_error("HCCL communicator was aborted (simulated)")));
        return false;
      }
      if (of.state() != RUN) {
        work.fail(std::make_exception_ptr(std::runtime_error(of.error_text())));
        return false;
      }
      if (has_begun && std::chrono::steady_clock::now() > until) {
        of.fail(TASK_TIMEOUT, "EI0002: a collective has waited for a peer for too long");
        work.fail(std::make_exception_ptr(std::runtime_error(of.error_text())));
        return false;
      }
    }
    return true;
  }

  // What an interrupted collective leaves of its outputs.
  static void garble(const Tensor& target) {
    if (target.is_contiguous()) std::memset(target.data_ptr(), GARBAGE, target.nbytes());
    else Tensor(target).zero_();
  }

  std::shared_ptr<Link> connected() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (link_) return link_;
    }
    auto made = std::make_shared<Link>();
    made->gloo = connect_(generation_);
    std::lock_guard<std::mutex> lock(mutex_);
    if (!link_) link_ = made;
    return link_;
  }

  c10::Stream lane_of(int lane, c10::Device on) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& id = lanes_[{lane, on.index()}];
    if (!id) id = device(on.index()).new_stream();
    return c10::Stream(c10::Stream::UNSAFE, on, id);
  }

  std::atomic<milliseconds> timeout_;
  const Connect connect_;
  std::mutex mutex_;
  std::shared_ptr<Link> link_;
  std::map<std::pair<int, int>, c10::StreamId> lanes_;
  std::map<std::string, int> calls_;
  bool is_batching_ = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> batch_;
  std::atomic<int> generation_{0}, device_{-1};
  std::atomic<bool> is_over_{false}, is_stopped_{false};
  std::atomic<uint64_t> sequence_{0};
};

ProcessGroupHCCL& ours(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto* found = dynamic_cast<ProcessGroupHCCL*>(backend.get());
  TORCH_CHECK(found, "this is no hccl backend");
  return *found;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_hccl(int rank, int size, milliseconds timeout, Connect connect) {
  return c10::make_intrusive<ProcessGroupHCCL>(rank, size, timeout, std::move(connect));
}

void resume_hccl(int device) {
  std::lock_guard<std::mutex> lock(g_groups_mutex);
  for (auto* group : g_groups) group->resume(device);
}

void stop_hccl(int device) {
  std::lock_guard<std::mutex> lock(g_groups_mutex);
  for (auto* group : g_groups) group->stop(device);
}

void reinit_hccl(const c10::intrusive_ptr<c10d::Backend>& backend) { ours(backend).reinit(); }

std::map<std::string, int> calls_of_hccl(const c10::intrusive_ptr<c10d::Backend>& backend) { return ours(backend).calls(); }

void break_next_collective(int state) { g_next_error = state; }

}  // namespace npu

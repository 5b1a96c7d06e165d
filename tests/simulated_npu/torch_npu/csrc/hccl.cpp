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
#include "kind.h"
#include "operators.h"
#include "watchdog.h"

namespace npu {
namespace {

using at::Tensor;
using std::chrono::milliseconds;
using Tensors = std::vector<Tensor>;
using Carry = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend& gloo)>;
constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr int GARBAGE = 0x7a;
std::atomic<int> g_next_error{RUN};
std::atomic<int64_t> g_exposed{0};

// SIMULATED_NPU_TIMES, as in "all_gather=1.0,reduce_scatter=2.0": milliseconds that such an operation takes at least.
double least_ms(const std::string& name) {
  static const char* named = std::getenv("SIMULATED_NPU_TIMES");
  const std::string all = "," + std::string(named ? named : ""), wanted = "," + name + "=";
  const auto at = all.find(wanted);
  return at == std::string::npos ? 0 : std::atof(all.c_str() + at + wanted.size());
}

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

  // The first time that the host hears of it, the device may have nothing else to do: then the host's wait was in its way.
  bool isCompleted() override {
    if (!outcome->is_over()) return false;
    if (!is_seen.exchange(true) && !is_computing(on.index())) ++g_exposed;
    return true;
  }
  bool isSuccess() const override { return outcome->end->is_set() && !outcome->failure(); }
  std::exception_ptr exception() const override { return outcome->failure(); }
  std::vector<Tensor> result() override { return outputs; }
  void synchronize() override { npu::block(outcome->end, current_stream(on.index())); }
  bool wait(milliseconds) override {
    if (auto error = outcome->failure()) std::rethrow_exception(error);
    synchronize();
    if (is_barrier) {
      npu::synchronize(outcome->end, on.index());
      if (auto error = outcome->failure()) std::rethrow_exception(error);
    }
    return true;
  }
  void abort() override { TORCH_CHECK(false, "abort the group"); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  const Tensors outputs;
  const c10::Device on;
  const bool is_barrier;
  std::atomic<bool> is_seen{false};
  const OutcomePtr outcome = std::make_shared<Outcome>();
  c10::intrusive_ptr<c10::ivalue::Future> future;
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

// Whether the caller wants a Work; releases of torch before 2.8 do not say, and do.
template <typename Options>
auto is_async(const Options& opts, int) -> decltype(opts.asyncOp) { return opts.asyncOp || is_kind("work"); }
template <typename Options>
bool is_async(const Options&, long) { return true; }

}  // namespace

class ProcessGroupHCCL;
namespace {
std::mutex g_groups_mutex;
std::set<ProcessGroupHCCL*> g_groups;
}  // namespace

class ProcessGroupHCCL final : public c10d::Backend {
 public:
  ProcessGroupHCCL(int rank, int size, milliseconds timeout, Connect connect)
      : Backend(rank, size), timeout_(timeout), connect_(std::move(connect)), watchdog_(rank) {
    std::lock_guard<std::mutex> lock(g_groups_mutex);
    g_groups.insert(this);
  }
  ~ProcessGroupHCCL() override {
    {
      std::lock_guard<std::mutex> lock(g_groups_mutex);
      g_groups.erase(this);
    }
    if (!is_kind("abort")) finish_all();
    drop_link();
  }
  const std::string getBackendName() const override { return "hccl"; }
  void setTimeout(milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  // torch_npu's own `abort` has an argument, and so does not override this one: it does nothing.
  void abort() override {
    if (!is_kind("abort") && !is_kind("nccl")) return;
    drop_link();
    is_over_ = true;
    if (is_kind("nccl")) finish_all();
  }
  // Ends the watchdog, and no operation.
  void shutdown() override {
    watchdog_.end();
    abort();
  }
  // Waits for what runs, as the library's destruction of a communicator does; the next operation connects anew. A device
  // that is stopped takes no orders for that.
  void abort_hccl_comm() {
    const int on = device_;
    if (on >= 0 && device(on).state() == STOP_EXIT) device(on).check();
    if (!is_kind("abort")) finish_all();
    reinit();
    generation_ = 0;
  }
  void forget_keys() { connect_(FORGET, ALL); }
  void eagerConnectSingleDevice(at::Device on) override {
    connected(device(on.index()));
    is_eager_ = true;
  }
  Watchdog& watchdog() { return watchdog_; }

  void reinit() {
    drop_link();
    is_stopped_ = is_over_ = false;
  }
  void stop(int device) { if (device_ == device) is_stopped_ = true; }
  void resume(int device) {
    if (device_ != device || !is_stopped_) return;
    if (npu::device(device).state() != STOP_EXIT)
      throw std::runtime_error("HcclCommResume after the device was restarted (simulated): resume, then restart");
    // Each rank's queue was emptied at a point of its own: the old connections are of no use.
    reinit();
    ++generation_;
  }
  const std::map<std::string, int>& calls() const { return calls_; }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    is_batching_ = true;
    is_batch_async_ = is_kind("work");
    batch_.clear();
    messages_.clear();
  }
  // As NCCL's: a Work, if the operations have one; sends and receives always have.
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    is_batching_ = false;
    ++calls_["batch"];
    if (!messages_.empty()) {  // all of a batch's messages are one kernel: none waits for another
      Tensors sent, from, received, into;
      std::vector<Carry> carries;
      for (auto& one : messages_) {
        auto& tensors = one.is_send ? sent : received;
        auto& hosts = one.is_send ? from : into;
        tensors.insert(tensors.end(), one.tensors.begin(), one.tensors.end());
        hosts.insert(hosts.end(), one.hosts.begin(), one.hosts.end());
        carries.push_back(one.carry);
      }
      messages_.clear();
      batch_.push_back(issue_all("messages", true, c10d::OpType::COALESCED, sent, from, received, into, carries, ALL));
      is_batch_async_ = true;
    }
    auto work = c10::make_intrusive<BatchWork>(std::move(batch_));
    return is_batch_async_ ? std::move(work) : nullptr;
  }

  using Work = c10::intrusive_ptr<c10d::Work>;

  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return reduce_like("allreduce", c10d::OpType::ALLREDUCE, tensors, opts.reduceOp, is_async(opts, 0), [opts](c10d::Backend& gloo, Tensors& hosts, const c10d::ReduceOp& op) {
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
      with.asyncOp = opts.asyncOp;
      last = allreduce(one, with);
    }
    return last;
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return reduce_like("reduce", c10d::OpType::REDUCE, tensors, opts.reduceOp, is_async(opts, 0), [opts](c10d::Backend& gloo, Tensors& hosts, const c10d::ReduceOp& op) {
      auto with = opts;
      with.reduceOp = op;
      return gloo.reduce(hosts, with);
    });
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto hosts = copies(tensors);
    return issue("broadcast", is_async(opts, 0), c10d::OpType::BROADCAST, tensors, *hosts, tensors, *hosts, [hosts, opts](c10d::Backend& gloo) { return gloo.broadcast(*hosts, opts); });
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto from = copies(inputs);
    auto into = lists(outputs);
    return issue("allgather", is_async(opts, 0), c10d::OpType::ALLGATHER, inputs, *from, flat(outputs), flat(*into), [from, into, opts](c10d::Backend& gloo) { return gloo.allgather(*into, *from, opts); });
  }
  Work _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
    auto from = copies({input}), into = copies({output});
    return issue("_allgather_base", is_async(opts, 0), c10d::OpType::_ALLGATHER_BASE, {input}, *from, {output}, *into, [from, into, opts](c10d::Backend& gloo) {
      Tensor all = (*into)[0].view({-1}), one = (*from)[0].view({-1});  // gloo is particular about their shapes
      return gloo._allgather_base(all, one, opts);
    });
  }
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    Work last;
    for (size_t i = 0; i < inputs.size(); ++i) last = _allgather_base(outputs[i], inputs[i], opts);
    return last;
  }
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    auto from = copies(inputs);
    auto into = lists(outputs);
    return issue("gather", is_async(opts, 0), c10d::OpType::GATHER, inputs, *from, flat(outputs), flat(*into), [from, into, opts](c10d::Backend& gloo) { return gloo.gather(*into, *from, opts); });
  }
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    auto from = lists(inputs);
    auto into = copies(outputs);
    return issue("scatter", is_async(opts, 0), c10d::OpType::SCATTER, flat(inputs), flat(*from), outputs, *into, [from, into, opts](c10d::Backend& gloo) { return gloo.scatter(*into, *from, opts); });
  }
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    // gloo's own is not the same on all releases: reduce all, and take what is ours.
    return scattered("reduce_scatter", c10d::OpType::REDUCE_SCATTER, outputs.at(0), inputs.at(0), opts.reduceOp, is_async(opts, 0));
  }
  Work _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return scattered("_reduce_scatter_base", c10d::OpType::_REDUCE_SCATTER_BASE, output, {input}, opts.reduceOp, is_async(opts, 0));
  }
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    Work last;
    for (size_t i = 0; i < inputs.size(); ++i) last = _reduce_scatter_base(outputs[i], inputs[i], opts);
    return last;
  }
  Work alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& of, const c10d::AllToAllOptions& opts) override {
    auto from = copies({input}), into = copies({output});
    return issue("alltoall_base", is_async(opts, 0), c10d::OpType::ALLTOALL_BASE, {input}, *from, {output}, *into, [from, into, to, of, opts](c10d::Backend& gloo) mutable {
      return gloo.alltoall_base((*into)[0], (*from)[0], to, of, opts);
    });
  }
  // Tags are not looked at: a pair's messages come in the order of the calls.
  Work send(Tensors& tensors, int to, int) override { return message("send", c10d::OpType::SEND, tensors, to); }
  Work recv(Tensors& tensors, int from, int) override { return message("recv", c10d::OpType::RECV, tensors, from); }
  Work barrier(const c10d::BarrierOptions& opts) override {
    const auto work = issue("barrier", is_async(opts, 0), c10d::OpType::BARRIER, {}, {}, {}, {}, [](c10d::Backend& gloo) { return gloo.barrier(); });
    if (!work && !is_batching_) finish(device(device_));  // a synchronous one blocks the host
    return work;
  }

 private:
  static constexpr int ALL = -1;  // the communicator of all members, and no pair's
  struct Message {
    bool is_send;
    Tensors tensors, hosts;
    Carry carry;
  };

  // As torch chooses: two ranks have a communicator of their own, whose first message makes it, with one stream for
  // both directions; unless the group's was made at once, or messages are started together. A batch gives no Work
  // for each.
  Work message(const char* name, c10d::OpType op, Tensors& tensors, int peer) {
    TORCH_CHECK(peer != rank_, "a message to this rank itself (simulated: only between two)");
    const bool is_send = op == c10d::OpType::SEND, is_of_all = is_batching_ || is_eager_;
    auto hosts = copies(tensors);
    const int other = is_of_all ? peer : rank_ < peer ? 1 : 0;
    Carry carry = [hosts, other, is_send](c10d::Backend& gloo) {
      return is_send ? gloo.send(*hosts, other, 0) : gloo.recv(*hosts, other, 0);
    };
    if (is_batching_) {
      ++calls_[name];
      messages_.push_back({is_send, tensors, *hosts, carry});
      return nullptr;
    }
    const Tensors none;
    return issue_all(name, true, op, is_send ? tensors : none, is_send ? *hosts : none, is_send ? none : tensors, is_send ? none : *hosts, {carry}, is_of_all ? ALL : peer);
  }

  template <typename Run>
  Work reduce_like(const char* name, c10d::OpType op, Tensors& tensors, const c10d::ReduceOp& reduce, bool is_async, Run run) {
    auto hosts = copies(tensors);
    const bool is_mean = reduce == c10d::ReduceOp::AVG;
    const c10d::ReduceOp by = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : reduce;
    const int parts = is_mean ? size_ : 1;
    return issue(name, is_async, op, tensors, *hosts, tensors, *hosts, [hosts, by, run](c10d::Backend& gloo) { return run(gloo, *hosts, by); }, parts);
  }

  Work scattered(const char* name, c10d::OpType op, const Tensor& output, const Tensors& inputs, const c10d::ReduceOp& reduce, bool is_async) {
    auto from = copies(inputs);
    auto whole = std::make_shared<Tensors>(Tensors{at::empty({size_, output.numel()}, output.options().device(at::kCPU))});
    const bool is_mean = reduce == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions opts;
    opts.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : reduce;
    const auto mine = whole->at(0)[rank_].view(output.sizes());
    return issue(name, is_async, op, inputs, *from, {output}, {mine}, [from, whole, opts](c10d::Backend& gloo) {
      Tensors parts;
      for (auto& one : *from) parts.push_back(one.reshape({-1}));
      whole->at(0).view({-1}).copy_(at::cat(parts));
      return gloo.allreduce(*whole, opts);
    }, is_mean ? size_ : 1);
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
    for (auto& [_, link] : links_) {
      link->is_aborted = true;
      if (*link->running > 0) new std::shared_ptr<Link>(link);  // never destroyed, see Link
    }
    links_.clear();
  }

  // Wait until all that was issued has ended, on each device.
  void finish_all() {
    std::vector<MarkPtr> ends;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [_, last] : last_) ends.push_back(last.end);
    }
    for (auto& end : ends)
      while (!end->wait_for(milliseconds(5)) && !is_over()) {}
  }

  Work issue(const char* name, bool is_async, c10d::OpType op, const Tensors& inputs, const Tensors& from, const Tensors& outputs,
             const Tensors& into, Carry carry, int parts = 1) {
    return issue_all(name, is_async, op, inputs, from, outputs, into, {std::move(carry)}, ALL, parts);
  }

  // Carry inputs to outputs by way of the hosts' copies of them. Without a Work it runs on the caller's own stream.
  // carries  begun together
  // pair     ALL, or the other rank of a pair: operations of different communicators do not wait for each other
  // parts    results are divided by so many
  Work issue_all(const char* name, bool is_async, c10d::OpType op, const Tensors& inputs, const Tensors& from,
                 const Tensors& outputs, const Tensors& into, std::vector<Carry> carries, int pair = ALL, int parts = 1) {
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
    auto link = connected(of, pair);
    size_t size = 0;  // not that of the operation with which a communicator is made, mostly
    for (auto& one : outputs) size += one.nbytes();
    const auto kind = op == c10d::OpType::BROADCAST ? "broadcast" : name + std::to_string(size);
    const auto gate = of.gate(kind);  // that this one opens

    auto work = c10::make_intrusive<HcclWork>(rank_, op, outputs, on, op == c10d::OpType::BARRIER);
    const auto stream = is_async ? lane_of(pair, on) : current_stream(index);
    Tensors sources, targets;
    for (auto& one : inputs) sources.push_back(as_host(one));
    for (auto& one : outputs) targets.push_back(as_host(one));
    Task task;
    task.reads = reads;
    for (auto& all : {inputs, outputs})
      for (auto& one : all) of.use(held(one), stream.id());
    const auto outcome = work->outcome;
    const bool is_p2p = c10d::isP2POp(op) || op == c10d::OpType::COALESCED;
    const double least = least_ms(op == c10d::OpType::_ALLGATHER_BASE ? "all_gather" : op == c10d::OpType::_REDUCE_SCATTER_BASE ? "reduce_scatter" : name);
    task.cancel = [outcome](std::exception_ptr error) { outcome->fail(std::move(error)); };
    const auto caller = current_stream(index).id();
    task.run = [=, &of, timeout = timeout_.load()] {
      for (size_t i = 0; i < sources.size(); ++i) Tensor(from[i]).copy_(sources[i]);
      ++of.stuck;
      const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double, std::milli>(least);
      const bool has_succeeded = carried(carries, link, of, timeout, *outcome, is_p2p);
      if (!has_succeeded && link->is_aborted && is_kind("gate")) of.close_gate(caller, kind);
      if (has_succeeded && gate) gate->set();
      --of.stuck;
      std::this_thread::sleep_until(until);
      if (!has_succeeded) {
        for (auto& target : targets) garble(target);
        return;
      }
      for (size_t i = 0; i < targets.size(); ++i) {
        Tensor target = targets[i];
        if (parts > 1) Tensor(into[i]).div_(parts);
        target.copy_(into[i]);
      }
    };
    {
      // In the order of the calls, whatever the streams.
      std::lock_guard<std::mutex> lock(mutex_);
      auto& last = last_[{pair, index}];
      if (is_async) block(record(current_stream(index)), stream);
      if (last.end && last.stream != stream.id()) block(last.end, stream);
      queue_of(stream).push(std::move(task));
      outcome->end = record(stream);
      last = {outcome->end, stream.id()};
    }
    watchdog_.watch(outcome);
    if (is_batching_) {
      batch_.push_back(work);
      is_batch_async_ = is_async;
    }
    if (!is_async) return nullptr;
    const c10::StreamGuard guard(stream);
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{on});
    work->future->markCompleted(c10::IValue(outputs));
    return work;
  }

  static bool carried(const std::vector<Carry>& carries, const std::shared_ptr<Link>& link, Device& of, milliseconds timeout, Outcome& outcome, bool is_p2p) {
    auto end = std::make_shared<Mark>();
    const auto until = std::chrono::steady_clock::now() + timeout;
    bool has_begun = false;
    if (!link->is_aborted) {
      try {
        link->running->fetch_add(static_cast<int>(carries.size()));
        auto left = std::make_shared<std::atomic<size_t>>(carries.size());
        auto ended = [end, left, running = link->running](bool has_succeeded) {
          if (!has_succeeded) return;  // a peer that is gone is not noticed
          --*running;
          if (--*left == 0) end->set();
        };
        for (auto& carry : carries) {
          auto below = carry(*link->gloo);
          if (is_p2p) {  // gloo's works of these have no future
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
        }
        has_begun = true;
      } catch (const std::exception&) {
      }
    }
    while (!end->wait_for(milliseconds(2))) {
      if (link->is_aborted) {
        outcome.fail(std::make_exception_ptr(std::runtime_error("HCCL communicator was aborted (simulated)")));
        return false;
      }
      if (of.state() != RUN) {
        outcome.fail(std::make_exception_ptr(std::runtime_error(of.error_text())));
        return false;
      }
      if (has_begun && std::chrono::steady_clock::now() > until) {
        of.fail(TASK_TIMEOUT, "EI0002: a collective has waited for a peer for too long");
        outcome.fail(std::make_exception_ptr(std::runtime_error(of.error_text())));
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

  std::shared_ptr<Link> connected(Device& of, int pair = ALL) {
    if (auto link = link_of(pair)) return link;
    // No abort sees what is being made here, or ends it.
    std::lock_guard<std::mutex> alone(connecting_);
    if (auto link = link_of(pair)) return link;
    auto made = std::make_shared<Link>();
    made->gloo = connect_(generation_, pair);
    if (is_kind("null")) of.queue(0).drain_uncounted();
    std::lock_guard<std::mutex> lock(mutex_);
    return links_[pair] = made;
  }
  std::shared_ptr<Link> link_of(int pair) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = links_.find(pair);
    return found == links_.end() ? nullptr : found->second;
  }

  c10::Stream lane_of(int pair, c10::Device on) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& id = lanes_[{pair, on.index()}];
    if (!id) id = device(on.index()).new_stream();
    return c10::Stream(c10::Stream::UNSAFE, on, id);
  }

  std::atomic<milliseconds> timeout_;
  const Connect connect_;
  struct Last { MarkPtr end; c10::StreamId stream; };  // the newest operation of a lane
  std::mutex mutex_, connecting_;
  std::map<int, std::shared_ptr<Link>> links_;  // ALL, or a pair's other rank
  std::map<std::pair<int, int>, Last> last_;
  std::map<std::pair<int, int>, c10::StreamId> lanes_;
  std::map<std::string, int> calls_;
  bool is_batching_ = false, is_batch_async_ = true;
  std::vector<c10::intrusive_ptr<c10d::Work>> batch_;
  std::vector<Message> messages_;
  std::atomic<bool> is_eager_{false};
  std::atomic<int> generation_{0}, device_{-1};
  std::atomic<bool> is_over_{false}, is_stopped_{false};
  std::atomic<uint64_t> sequence_{0};
  Watchdog watchdog_;  // destroyed first
};

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

int64_t exposed() { return g_exposed; }

void break_next_collective(int state) { g_next_error = state; }

// torch's own holder of a backend: it is destroyed without the GIL.
template <typename T>
class HeldWithoutGil {
 public:
  HeldWithoutGil() = default;
  HeldWithoutGil(c10::intrusive_ptr<T> held) : held(std::move(held)) {}
  explicit HeldWithoutGil(T* held) : held(c10::intrusive_ptr<T>::unsafe_steal_from_new(held)) {}
  HeldWithoutGil(const HeldWithoutGil&) = default;
  HeldWithoutGil(HeldWithoutGil&&) noexcept = default;
  HeldWithoutGil& operator=(const HeldWithoutGil&) = default;
  HeldWithoutGil& operator=(HeldWithoutGil&&) noexcept = default;
  ~HeldWithoutGil() {
    if (!held || !PyGILState_Check()) return;
    const pybind11::gil_scoped_release no_gil;
    held.reset();
  }
  T* get() const { return held.get(); }
  T& operator*() const { return *held; }
  T* operator->() const { return held.get(); }
  explicit operator bool() const { return static_cast<bool>(held); }

 private:
  c10::intrusive_ptr<T> held;
};

}  // namespace npu

PYBIND11_DECLARE_HOLDER_TYPE(T, npu::HeldWithoutGil<T>, true)

namespace npu {

void bind_hccl(pybind11::module_& m) {
  using Group = ProcessGroupHCCL;
  // None of them gives the GIL back while it waits: torch_npu's do not.
  pybind11::class_<Group, c10d::Backend, HeldWithoutGil<Group>> group(m, "ProcessGroupHCCL");
  if (!is_kind("nccl")) group.def("abort_hccl_comm", [](Group& group, const std::optional<std::string>&) { group.abort_hccl_comm(); });
  group.def("resume_hccl_comm", [](Group& group, int device) { group.resume(device); })
      .def("_delete_tcpstore_key", [](Group& group) { group.forget_keys(); }, pybind11::call_guard<pybind11::gil_scoped_release>())
      .def("set_watchdog_status", [](Group& group, int status) { group.watchdog().set_status(status); })
      .def("clear_workmeta_list", [](Group& group) { group.watchdog().clear(); })
      .def("_calls", [](Group& group) { return group.calls(); });
}

}  // namespace npu

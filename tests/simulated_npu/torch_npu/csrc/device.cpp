#include "device.h"
#include "kind.h"
#include <c10/util/Exception.h>
#include <pthread.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

namespace npu {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds POLL(5);  // how soon a wait notices that the device was stopped
constexpr int MOST_DEVICES = 16;
constexpr char GARBAGE = 0x7a;

bool g_initialized = false, g_bad_fork = false;
std::atomic<bool> g_is_over{false};
std::array<std::atomic<Device*>, MOST_DEVICES> g_devices{};
std::mutex g_mutex;
std::atomic<int64_t> g_drains{0};
thread_local int t_device = 0;
thread_local std::array<c10::StreamId, MOST_DEVICES> t_streams{};

struct Text { const char* text; int code; };
Text text_of(State state) {
  switch (state) {
    case UCE_EXIT: return {"UCE ERROR", 507053};
    case STOP_EXIT: return {"FORCE STOP", 107022};
    case HBM_ECC_EXIT: return {"HBM MULTI BIT ECC ERROR", 507054};
    case SUSPECT_MEM_EXIT: return {"SUSPECT MEM ERROR", 507055};
    case HCCS_LINK_EXIT: return {"HCCS LINK ERROR", 507056};
    case HCCL_OP_RETRY_EXIT: return {"HCCL OP RETRY FAILED", 507904};
    case SUSPECT_REMOTE_EXIT: return {"SUSPECT REMOTE ERROR", 507057};
    case TASK_TIMEOUT: return {"AclrtSynchronizeStreamWithTimeout, reason=[task timeout]", 107020};
    case AICORE_EXIT: return {"AclrtSynchronizeStreamWithTimeout, reason=[aicore exception]", 507015};
    default: return {"AclrtSynchronizeStreamWithTimeout, reason=[lost heartbeat]", 507010};
  }
}

size_t limit_bytes() {
  const char* named = std::getenv("SIMULATED_NPU_MEMORY_BYTES");
  return named ? std::strtoull(named, nullptr, 10) : size_t(64) << 30;
}

// No thread of the parent may hold a lock in the child.
void before_fork() {
  g_mutex.lock();
  for (auto& found : g_devices) if (found) found.load()->mutex.lock();
}
void after_fork() {
  for (auto& found : g_devices) if (found) found.load()->mutex.unlock();
  g_mutex.unlock();
}
void after_fork_in_child() {
  after_fork();
  g_bad_fork = true;
}

void check_fork() {
  TORCH_CHECK(!g_bad_fork, "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use ",
              "the 'spawn' start method");
}

}  // namespace

int64_t now_us() {
  using namespace std::chrono;
  return duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
}

// Graphs.

namespace {
std::mutex g_capture_mutex;
std::shared_ptr<Graph> g_capture;
std::atomic<bool> g_is_capturing{false};
std::atomic<c10::StreamId> g_pool{0};  // of the newest graph: in the place of a stream, below all of them
}  // namespace

void capture(std::function<Task()> make) {
  std::lock_guard<std::mutex> lock(g_capture_mutex);
  g_capture->push_back(std::move(make));
}

void begin_capture() {
  std::lock_guard<std::mutex> lock(g_capture_mutex);
  g_capture = std::make_shared<Graph>();
  --g_pool;
  g_is_capturing = true;
}

std::shared_ptr<Graph> end_capture() {
  std::lock_guard<std::mutex> lock(g_capture_mutex);
  g_is_capturing = false;
  return std::move(g_capture);
}

void replay(const Graph& graph) {
  auto& queue = queue_of(current_stream(current_device()));
  for (const auto& make : graph) queue.push(make());
}

bool is_capturing() { return g_is_capturing; }

void check_capture(const char* what) {
  if (g_is_capturing) throw std::runtime_error(std::string(what) + ": operation not permitted when a stream is capturing, error code is 107025 (simulated)");
}

// Marks.

void Mark::set() {
  std::lock_guard<std::mutex> lock(mutex);
  at = std::chrono::steady_clock::now();
  done = true;
  changed.notify_all();
}

bool Mark::wait_for(milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex);
  return changed.wait_for(lock, limit, [this] { return done.load(); });
}

// Queues.

void Queue::push(Task task) {
  if (is_capturing()) return capture([task = std::move(task)] { return task; });
  std::lock_guard<std::mutex> lock(mutex);
  if (!has_thread) {
    has_thread = true;
    std::thread([this] { work(); }).detach();
  }
  tasks.push_back(std::move(task));
  ++pushed;
  arrived.notify_one();
}

void Queue::work() {
  pthread_setname_np(pthread_self(), "npu_stream");  // not that of the thread which has used the stream first
  t_device = device;
  auto& of = npu::device(device);
  for (;;) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex);
      arrived.wait(lock, [this] { return !tasks.empty() && !g_is_over; });
      task = std::move(tasks.front());
      tasks.pop_front();
    }
    try {
      if (task.is_always_run || (of.state() == RUN && !of.meets_poison(task.reads))) task.run();
      else if (task.cancel) task.cancel(std::make_exception_ptr(std::runtime_error(of.error_text())));
    } catch (const std::exception& error) {
      of.fail(AICORE_EXIT, error.what());
    }
    task = Task();  // what it holds is given back before anyone hears that it is done
    std::lock_guard<std::mutex> lock(mutex);
    ++finished;
    progressed.notify_all();
  }
}

void Queue::drain() {
  ++g_drains;
  drain_uncounted();
}

void Queue::drain_uncounted() {
  check_capture("aclrtSynchronizeStream");
  std::unique_lock<std::mutex> lock(mutex);
  const auto wanted = pushed;
  progressed.wait(lock, [&] { return finished >= wanted || g_is_over; });
}

bool Queue::is_idle() {
  check_capture("aclrtStreamQuery");
  return is_idle_unasked();
}

bool Queue::is_idle_unasked() {
  std::lock_guard<std::mutex> lock(mutex);
  return finished == pushed;
}

// Errors.

std::string Device::error_text() {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = text_of(state());
  std::string text = found.text;
  if (state() == HBM_ECC_EXIT) {
    const auto at = std::to_string(failed_at_us);
    text += ".time us= " + at + ".time is " + at;
  }
  if (!detail_.empty()) text += " (" + detail_ + ")";
  return "operator():simulated NPU function error: " + text + ", error code is " + std::to_string(found.code) +
      "\n[ERROR] 1970-01-01-00:00:00 (PID:" + std::to_string(getpid()) + ", Device:" + std::to_string(index) +
      ", RankID:-1) ERR00100 PTA call acl api failed (simulated)";
}

void Device::check() {
  check_fork();
  if (state() != RUN) throw std::runtime_error(error_text());
}

void Device::fail(State state, const std::string& detail, int64_t at_us) {
  std::lock_guard<std::mutex> lock(mutex);
  int expected = RUN;
  if (state == LOST) state_ = LOST;
  else if (!state_.compare_exchange_strong(expected, state)) return;
  detail_ = detail;
  failed_at_us = at_us;
  has_ecc = has_ecc || state == HBM_ECC_EXIT;
}

int Device::stop() {
  if (state() == LOST) return 1;
  {
    std::lock_guard<std::mutex> lock(mutex);
    ++stops;
    is_checked = false;
    detail_.clear();
    state_ = STOP_EXIT;
  }
  synchronize();
  return 0;
}

void Device::restart(bool is_unchecked) {
  if (state() == LOST) throw std::runtime_error(error_text());
  if (state() != STOP_EXIT) throw std::runtime_error("restart_device on a device that was not stopped (simulated)");
  std::lock_guard<std::mutex> lock(mutex);
  if (!is_checked)  // nobody has asked which memory it is: it is not repaired
    for (auto& range : failed_) {
      if (range.begin) poisons.push_back({range.begin, range.size, UCE_EXIT, now_us()});
      else is_library_poisoned = true;
    }
  has_poison = !poisons.empty();
  for (auto& range : failed_)
    for (auto& [begin, block] : blocks)
      if (!is_unchecked && begin < range.begin + range.size && range.begin < begin + block->size) unsafe.push_back(begin);
  has_unsafe = !unsafe.empty();
  failed_.clear();
  has_ecc = false;
  detail_.clear();
  state_ = RUN;
}

int Device::check_uce() {
  if (state() == LOST) throw std::runtime_error(error_text());
  if (state() != STOP_EXIT) throw std::runtime_error("check_uce_in_memory on a device that was not stopped (simulated)");
  empty_cache();
  std::lock_guard<std::mutex> lock(mutex);
  is_checked = true;
  if (has_ecc) return 3;
  if (failed_.empty()) return 0;
  int worst = 2;
  for (auto& range : failed_) {
    if (range.begin == nullptr) return 1;
    if (is_in_pool(range, true)) worst = 3;
  }
  return worst;
}

// Streams.

Queue& Device::queue(c10::StreamId id) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& found = queues[id];
  if (!found) found = std::make_unique<Queue>(index);
  return *found;
}

c10::StreamId Device::new_stream() {
  std::lock_guard<std::mutex> lock(mutex);
  return ++newest_stream;
}

void Device::synchronize() {
  std::vector<Queue*> all;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& [_, queue] : queues) all.push_back(queue.get());
  }
  ++g_drains;
  for (auto* queue : all) queue->drain_uncounted();
}

MarkPtr Device::gate(const std::string& operation) {
  std::lock_guard<std::mutex> lock(mutex);
  return gate_ && !gate_->is_set() && opens_gate.count(operation) ? gate_ : nullptr;
}

void Device::close_gate(c10::StreamId stream, const std::string& operation) {
  MarkPtr gate;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!gate_ || gate_->is_set()) {
      gate_ = std::make_shared<Mark>();
      opens_gate = {"broadcast"};  // in which a survivor gives its result in the place of any operation
    }
    opens_gate.insert(operation);
    gate = gate_;
  }
  ++stuck;
  Task task;
  task.run = [this, gate] { while (!gate->wait_for(POLL) && state() == RUN && !g_is_over) {} --stuck; };
  task.is_always_run = true;
  queue(stream).push(std::move(task));
}

void Device::load(const std::string& kernel) {
  const bool is_alone = is_kind("lock");
  if (!is_alone && !is_kind("load")) return;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (loaded.count(kernel)) return;
  }
  std::unique_lock<std::mutex> alone(launching, std::defer_lock);
  if (is_alone) alone.lock();
  while (stuck > 0 && state() == RUN && !g_is_over) std::this_thread::sleep_for(milliseconds(1));
  std::lock_guard<std::mutex> lock(mutex);
  loaded.insert(kernel);
}

// Memory.

namespace {

// SIMULATED_NPU_MEMORY names a folder in which each process says how much of a device it has; the tests' runs have it. What a process had that
// was killed returns a second after that was noticed.
constexpr double RETURNS_AFTER_S = 1;

std::string shared_folder() {
  static const std::string folder = [] {
    const char* named = std::getenv("SIMULATED_NPU_MEMORY");
    if (!named) return std::string();
    std::filesystem::create_directories(named);
    return std::filesystem::absolute(named).string();
  }();
  return folder;
}

std::string own_file(int index) { return shared_folder() + "/" + std::to_string(index) + "." + std::to_string(getpid()); }

void tell_others(int index, size_t bytes) {
  if (!shared_folder().empty()) std::ofstream(own_file(index)) << bytes;
}

size_t of_others(int index) {
  namespace fs = std::filesystem;
  if (shared_folder().empty()) return 0;
  size_t all = 0;
  std::error_code ignored;
  const auto ours = fs::path(own_file(index)).filename();
  for (const auto& file : fs::directory_iterator(shared_folder(), ignored)) {
    const auto name = file.path().filename().string();
    const auto prefix = std::to_string(index) + ".";
    if (name.rfind(prefix, 0) || file.path().filename() == ours) continue;
    const bool is_marked = file.path().extension() == ".dead";
    const auto pid = std::atoi(name.c_str() + prefix.size());
    size_t bytes = 0;
    std::ifstream(file.path()) >> bytes;
    if (is_marked) {
      const auto age = fs::file_time_type::clock::now() - fs::last_write_time(file.path(), ignored);
      if (std::chrono::duration<double>(age).count() > RETURNS_AFTER_S) {
        fs::remove(file.path(), ignored);
        continue;
      }
    } else if (kill(pid, 0) != 0 && errno == ESRCH) {
      fs::last_write_time(file.path(), fs::file_time_type::clock::now(), ignored);
      fs::rename(file.path(), file.path().string() + ".dead", ignored);
    }
    all += bytes;
  }
  return all;
}

}  // namespace

Held Device::allocate(size_t size, c10::StreamId stream) {
  if (is_capturing()) stream = g_pool;
  const size_t whole = (size + 511) / 512 * 512;
  char* ptr = nullptr;
  put_away_unused();
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto& of_stream = cached[stream];
    auto found = of_stream.lower_bound(whole);
    if (found != of_stream.end() && found->first <= whole * 2) {
      ptr = found->second;
      size = found->first;
      of_stream.erase(found);
    } else {
      size = whole;
    }
  }
  if (ptr) {  // whoever still reads what was there reads garbage, but for what this stream was given before
    Task task;
    task.run = [ptr, size] { std::memset(ptr, GARBAGE, size); };
    queue(stream).push(std::move(task));
  }
  if (!ptr) {
    const auto limit = limit_bytes();
    const auto has_room = [&] { return memory().reserved + of_others(index) + whole <= limit; };
    if (!has_room()) empty_cache();
    if (!has_room())
      TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", whole, " bytes (NPU ", index,
                       "; ", limit, " bytes total capacity)");
    ptr = static_cast<char*>(std::aligned_alloc(512, size));
    std::lock_guard<std::mutex> lock(mutex);
    reserved += size;
    tell_others(index, reserved);
  }
  auto* block = new Block{ptr, size, index, stream, {}};
  std::lock_guard<std::mutex> lock(mutex);
  blocks[ptr] = block;
  allocated += size;
  most_allocated = std::max(most_allocated, allocated);
  return Held(block);
}

void Device::use(const Held& block, c10::StreamId stream) {
  if (!block || stream == block->stream) return;
  std::lock_guard<std::mutex> lock(mutex);
  if (std::find(block->users.begin(), block->users.end(), stream) == block->users.end()) block->users.push_back(stream);
}

void Device::release(Block& block) {
  if (g_bad_fork) return;
  Free free{block.ptr, block.size, block.stream, {}};
  for (const auto user : block.users) free.uses.push_back(record(c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)), user)));
  {
    std::lock_guard<std::mutex> lock(mutex);
    blocks.erase(block.ptr);
    unsafe.erase(std::remove(unsafe.begin(), unsafe.end(), block.ptr), unsafe.end());
    has_unsafe = !unsafe.empty();
    allocated -= block.size;
    if (!free.uses.empty()) return leaving.push_back(std::move(free));
  }
  put_away(free);
}

void Device::put_away(const Free& free) {
  std::lock_guard<std::mutex> lock(mutex);
  cached[free.stream].emplace(free.size, free.ptr);
}

void Device::put_away_unused() {
  std::vector<Free> found;
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto is_used = [](const Free& one) { return std::any_of(one.uses.begin(), one.uses.end(), [](const MarkPtr& mark) { return !mark->is_set(); }); };
    const auto unused = std::stable_partition(leaving.begin(), leaving.end(), is_used);
    found.assign(std::make_move_iterator(unused), std::make_move_iterator(leaving.end()));
    leaving.erase(unused, leaving.end());
  }
  for (auto& free : found) put_away(free);
}

void Device::empty_cache() {
  synchronize();
  put_away_unused();
  decltype(cached) unused;
  {
    std::lock_guard<std::mutex> lock(mutex);
    unused.swap(cached);
    for (auto at = unused.begin(); at != unused.end();) {  // a graph's is not given back
      if (at->first >= 0) ++at;
      else cached.insert(unused.extract(at++));
    }
  }
  synchronize();  // what was asked of that memory before, and its garbage
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& [stream, of_stream] : unused) {
    for (auto& [size, ptr] : of_stream) {
      reserved -= size;
      poisons.erase(std::remove_if(poisons.begin(), poisons.end(), [begin = ptr, length = size](const Poison& one) {
        return one.begin < begin + length && begin < one.begin + one.size; }), poisons.end());
      std::free(ptr);
    }
  }
  tell_others(index, reserved);
}

size_t Device::memory_of_others() { return of_others(index); }

Memory Device::memory() {
  std::lock_guard<std::mutex> lock(mutex);
  return {allocated, reserved, most_allocated, limit_bytes()};
}

void Device::reset_peak() {
  std::lock_guard<std::mutex> lock(mutex);
  most_allocated = allocated;
}

// Memory that fails.

bool Device::is_in_pool(const Range& range, bool is_held_only) {
  for (auto& [begin, block] : blocks)
    if (begin < range.begin + range.size && range.begin < begin + block->size) return true;
  if (!is_held_only)
    for (auto& [stream, of_stream] : cached)
      for (auto& [size, begin] : of_stream)
        if (begin < range.begin + range.size && range.begin < begin + size) return true;
  return false;
}

void Device::poison(char* begin, size_t size, State kind) {
  synchronize();  // what runs has read it before
  std::lock_guard<std::mutex> lock(mutex);
  TORCH_CHECK(is_in_pool({begin, size}, false), "there is no device memory at this address");
  std::memset(begin, GARBAGE, size);
  poisons.push_back({begin, size, kind, now_us()});
  has_poison = true;
}

void Device::poison_library() {
  std::lock_guard<std::mutex> lock(mutex);
  is_library_poisoned = true;
}

bool Device::reads_library_poison() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!is_library_poisoned) return false;
    is_library_poisoned = false;
    failed_.push_back({nullptr, 32});
  }
  fail(UCE_EXIT);
  return true;
}

bool Device::meets_poison(const std::vector<Held>& reads) {
  if (!has_poison) return false;
  Poison hit{nullptr, 0, RUN, 0};
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& block : reads)
      for (auto& one : poisons)
        if (block && one.begin < block->ptr + block->size && block->ptr < one.begin + one.size) hit = one;
    if (!hit.begin) return false;
    failed_.push_back({hit.begin, hit.size});
    poisons.erase(std::remove_if(poisons.begin(), poisons.end(), [&](const Poison& one) {
      return one.begin == hit.begin; }), poisons.end());
    has_poison = !poisons.empty();
  }
  fail(hit.kind, "", hit.at_us);
  return true;
}

std::vector<std::pair<uintptr_t, size_t>> Device::failed() {
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<std::pair<uintptr_t, size_t>> found;
  for (auto& range : failed_) found.emplace_back(reinterpret_cast<uintptr_t>(range.begin), range.size);
  return found;
}

void Device::check_safe(const std::vector<Held>& reads) {
  if (!has_unsafe) return;
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& block : reads)
    if (block && std::find(unsafe.begin(), unsafe.end(), block->ptr) != unsafe.end())
      throw std::runtime_error("There is unsafe data in the input tensor");
}

void Device::mark_safe(const Block& block) {
  std::lock_guard<std::mutex> lock(mutex);
  unsafe.erase(std::remove(unsafe.begin(), unsafe.end(), block.ptr), unsafe.end());
  has_unsafe = !unsafe.empty();
}

void Device::mark_all_unsafe() {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& [begin, _] : blocks) unsafe.push_back(begin);
  has_unsafe = !unsafe.empty();
}

// The process.

int device_count() {
  static const int count = [] {
    const char* named = std::getenv("SIMULATED_NPU_DEVICES");
    const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
    int all = std::clamp(named ? std::atoi(named) : 8, 0, MOST_DEVICES);
    if (visible) all = std::min<int>(all, *visible ? 1 + std::count(visible, visible + std::strlen(visible), ',') : 0);
    return all;
  }();
  return count;
}

bool is_initialized() { return g_initialized; }
bool is_in_bad_fork() { return g_bad_fork; }

Device& device(int index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "invalid device: npu:", index, ", there are ", device_count());
  if (auto* found = g_devices[index].load()) return *found;
  check_fork();
  std::lock_guard<std::mutex> lock(g_mutex);
  if (!g_initialized) pthread_atfork(&before_fork, &after_fork, &after_fork_in_child);
  g_initialized = true;
  if (!g_devices[index]) g_devices[index] = new Device(index);
  return *g_devices[index];
}

std::vector<Device*> used_devices() {
  std::vector<Device*> found;
  for (auto& one : g_devices) if (one) found.push_back(one.load());
  return found;
}

int current_device() { return t_device; }

void set_current_device(int index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "invalid device: npu:", index, ", there are ", device_count());
  t_device = index;
}

c10::Stream current_stream(int index) {
  if (index < 0) index = t_device;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)), t_streams.at(index));
}

c10::Stream set_current_stream(c10::Stream stream) {
  const auto before = current_stream(stream.device_index());
  t_streams.at(stream.device_index()) = stream.id();
  return before;
}

Queue& queue_of(const c10::Stream& stream) { return device(stream.device_index()).queue(stream.id()); }

MarkPtr record(const c10::Stream& stream) {
  check_fork();
  auto mark = std::make_shared<Mark>();
  Task task;
  task.run = [mark] { mark->set(); };
  task.is_always_run = true;
  queue_of(stream).push(std::move(task));
  return mark;
}

void block(const MarkPtr& mark, const c10::Stream& stream) {
  if (mark->is_set()) return;
  auto& of = device(stream.device_index());
  Task task;
  task.run = [mark, &of] { while (!mark->wait_for(POLL) && of.state() == RUN) {} };
  queue_of(stream).push(std::move(task));
}

void synchronize(const MarkPtr& mark, int index) {
  ++g_drains;
  while (!mark->wait_for(std::chrono::seconds(1))) if (g_is_over) return;  // a driver's wait sleeps
  device(index).check();
}

int64_t drains() { return g_drains; }

bool Device::is_computing() {
  std::lock_guard<std::mutex> lock(mutex);
  return std::any_of(queues.begin(), queues.end(), [](const auto& one) { return one.second->computes && !one.second->is_idle_unasked(); });
}

bool is_computing(int index) { return device(index).is_computing(); }

void sleep_on(const c10::Stream& stream, double ms) {
  Task task;
  task.run = [ms] { std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms)); };
  queue_of(stream).computes = true;
  queue_of(stream).push(std::move(task));
}

bool is_over() { return g_is_over; }

void shutdown() {
  if (!g_initialized || g_bad_fork) return;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  for (auto& found : g_devices)
    while (found && std::chrono::steady_clock::now() < until) {
      bool is_idle = true;
      for (c10::StreamId id = 0; id < 64; ++id) is_idle = is_idle && (is_capturing() || found.load()->queue(id).is_idle());
      if (is_idle) break;
      std::this_thread::sleep_for(milliseconds(1));
    }
  g_is_over = true;
  std::error_code ignored;
  for (int index = 0; index < device_count() && !shared_folder().empty(); ++index) std::filesystem::remove(own_file(index), ignored);
}

}  // namespace npu

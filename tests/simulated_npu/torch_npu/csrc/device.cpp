#include "device.h"
#include <c10/util/Exception.h>
#include <pthread.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
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
  std::unique_lock<std::mutex> lock(mutex);
  const auto wanted = pushed;
  progressed.wait(lock, [&] { return finished >= wanted || g_is_over; });
}

bool Queue::is_idle() {
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
    detail_.clear();
    state_ = STOP_EXIT;
  }
  synchronize();
  return 0;
}

void Device::restart(bool is_unchecked) {
  if (state() == LOST) throw std::runtime_error(error_text());
  std::lock_guard<std::mutex> lock(mutex);
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
  empty_cache();
  std::lock_guard<std::mutex> lock(mutex);
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
  for (auto* queue : all) queue->drain();
}

// Memory.

Block::~Block() { npu::device(device).release(*this); }

Held Device::allocate(size_t size) {
  const size_t whole = (size + 511) / 512 * 512;
  char* ptr = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = cached.lower_bound(whole);
    if (found != cached.end() && found->first <= whole * 2) {
      ptr = found->second;
      size = found->first;
      cached.erase(found);
    } else {
      size = whole;
    }
  }
  if (!ptr) {
    const auto limit = limit_bytes();
    if (memory().reserved + whole > limit) empty_cache();
    if (memory().reserved + whole > limit)
      TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", whole, " bytes (NPU ", index,
                       "; ", limit, " bytes total capacity)");
    ptr = static_cast<char*>(std::aligned_alloc(512, size));
    std::lock_guard<std::mutex> lock(mutex);
    reserved += size;
  }
  auto* block = new Block{ptr, size, index};
  std::lock_guard<std::mutex> lock(mutex);
  blocks[ptr] = block;
  allocated += size;
  most_allocated = std::max(most_allocated, allocated);
  return Held(block);
}

void Device::release(Block& block) {
  std::lock_guard<std::mutex> lock(mutex);
  blocks.erase(block.ptr);
  unsafe.erase(std::remove(unsafe.begin(), unsafe.end(), block.ptr), unsafe.end());
  has_unsafe = !unsafe.empty();
  allocated -= block.size;
  cached.emplace(block.size, block.ptr);
}

void Device::empty_cache() {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& [size, ptr] : cached) {
    reserved -= size;
    char* begin = ptr;
    const size_t length = size;
    poisons.erase(std::remove_if(poisons.begin(), poisons.end(), [&](const Poison& one) {
      return one.begin < begin + length && begin < one.begin + one.size; }), poisons.end());
    std::free(ptr);
  }
  cached.clear();
}

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
    for (auto& [size, begin] : cached)
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
  while (!mark->wait_for(POLL)) if (g_is_over) return;
  device(index).check();
}

bool is_over() { return g_is_over; }

void shutdown() {
  if (!g_initialized || g_bad_fork) return;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  for (auto& found : g_devices)
    while (found && std::chrono::steady_clock::now() < until) {
      bool is_idle = true;
      for (c10::StreamId id = 0; id < 64; ++id) is_idle = is_idle && found.load()->queue(id).is_idle();
      if (is_idle) break;
      std::this_thread::sleep_for(milliseconds(1));
    }
  g_is_over = true;
}

}  // namespace npu

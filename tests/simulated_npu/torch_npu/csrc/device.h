// The simulated devices: memory, streams on which work runs late, and the state in which an error leaves a device.
// Begin with Device. Nothing here knows of tensors; operators.cpp and hccl.cpp do.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <condition_variable>
#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace npu {

// Where a device's queue of tasks stands. Up to 11 the numbers are torch_npu's.
enum State : int {
  RUN = 0, UCE_EXIT = 5, STOP_EXIT = 6, HBM_ECC_EXIT = 7, SUSPECT_MEM_EXIT = 8, HCCS_LINK_EXIT = 9,
  HCCL_OP_RETRY_EXIT = 10, SUSPECT_REMOTE_EXIT = 11, TASK_TIMEOUT = 20, AICORE_EXIT = 21, LOST = 22,
};

// One piece of device memory. It goes back to its device's pool when its tensor gives it back (`Device::release`), and
// then belongs to whoever comes next on its stream, also while tasks that were given it are still to run.
struct Block {
  char* ptr; size_t size; int device;
  c10::StreamId stream;                 // on which it was asked for
  std::vector<c10::StreamId> users;     // other streams that `Device::use` was told of
};
using Held = std::shared_ptr<Block>;

// A point in a stream's work: an event, or the end of a task.
struct Mark {
  void set();
  bool is_set() const { return done; }
  // Wait for so long at most; whether it is set.
  bool wait_for(std::chrono::milliseconds limit);
  std::chrono::steady_clock::time_point at;
 private:
  std::atomic<bool> done{false};
  std::mutex mutex;
  std::condition_variable changed;
};
using MarkPtr = std::shared_ptr<Mark>;

// A piece of work of a stream.
struct Task {
  std::function<void()> run;
  std::vector<Held> reads;                          // memory that it reads
  std::function<void(std::exception_ptr)> cancel;   // instead of `run`, if the device does not work; may be empty
  bool is_always_run = false;                       // also on a device that does not work: an event
};

// Tasks run one after the other, in a thread of their own.
class Queue {
 public:
  explicit Queue(int device) : device(device) {}
  void push(Task task);
  // Wait until all that was pushed before has run or was cancelled.
  void drain();
  void drain_uncounted();
  bool is_idle();
  bool is_idle_unasked();
  std::atomic<bool> computes{false};   // kernels run here, and not collectives alone
  const int device;
 private:
  void work();
  std::mutex mutex;
  std::condition_variable arrived, progressed;
  std::deque<Task> tasks;
  uint64_t pushed = 0, finished = 0;
  bool has_thread = false;
};

// Memory that fails when it is read.
struct Poison { char* begin; size_t size; State kind; int64_t at_us; };

struct Memory { size_t allocated, reserved, most_allocated, total; };

class Device {
 public:
  explicit Device(int index) : index(index) {}
  const int index;

  // Raises what an operation meets in the present state, in the full shape of torch_npu's errors.
  void check();
  std::string error_text();
  State state() const { return static_cast<State>(state_.load()); }
  // An error has happened; the first one stays. detail: what else is known.
  void fail(State state, const std::string& detail = "", int64_t at_us = 0);
  // 0, or 1 if it failed.
  int stop();
  void restart(bool is_unchecked);
  int check_uce();
  int stops = 0;
  std::atomic<bool> was_in_backward{false};        // work came from a backward pass

  Queue& queue(c10::StreamId id);
  c10::StreamId new_stream();
  void synchronize();
  bool is_computing();

  // What this stream is given from now on waits until an operation like this one succeeds, or the device is stopped.
  void close_gate(c10::StreamId stream, const std::string& operation);
  MarkPtr gate(const std::string& operation);      // that it opens; null: none
  // A kernel is about to be launched, maybe for the first time: see kind.h, load and lock.
  void load(const std::string& kernel);
  std::atomic<int> stuck{0};                       // tasks that wait for a peer or at a gate
  std::mutex launching;                            // held during a first launch

  // For a tensor of this stream.
  Held allocate(size_t size, c10::StreamId stream);
  // The stream uses it, too: it is not given away before what is there now has run (`record_stream`).
  void use(const Held& block, c10::StreamId stream);
  void release(Block& block);
  // Waits for all that runs, as the driver's own function does.
  void empty_cache();
  Memory memory();
  size_t memory_of_others();
  void reset_peak();

  // Memory that holds garbage from now on, and fails when a task reads it.
  void poison(char* begin, size_t size, State kind);
  // Memory that is no tensor's; the next collective reads it.
  void poison_library();
  bool reads_library_poison();
  // If memory among these has failed, the device has too.
  bool meets_poison(const std::vector<Held>& reads);
  std::vector<std::pair<uintptr_t, size_t>> failed();
  // Raises "unsafe data" if one of these was in failed memory, and nobody has marked it safe since.
  void check_safe(const std::vector<Held>& reads);
  void mark_safe(const Block& block);
  void mark_all_unsafe();

  std::mutex mutex;                               // of all that follows

 private:
  struct Range { char* begin; size_t size; };
  bool is_in_pool(const Range& range, bool is_held_only);
  std::atomic<int> state_{RUN};
  std::atomic<bool> has_poison{false}, has_unsafe{false};
  std::string detail_;
  int64_t failed_at_us = 0;
  bool has_ecc = false, is_library_poisoned = false;
  bool is_checked = false;                        // check_uce was called since the newest stop
  std::map<c10::StreamId, std::unique_ptr<Queue>> queues;
  c10::StreamId newest_stream = 0;
  MarkPtr gate_;
  std::set<std::string> opens_gate;
  std::set<std::string> loaded;                   // kernels
  struct Free { char* ptr; size_t size; c10::StreamId stream; std::vector<MarkPtr> uses; };
  void put_away(const Free& free);
  void put_away_unused();
  std::map<char*, Block*> blocks;                 // in use
  std::vector<Free> leaving;                      // other streams may still use it
  std::map<c10::StreamId, std::multimap<size_t, char*>> cached;  // of each stream: size -> free memory
  size_t allocated = 0, reserved = 0, most_allocated = 0;
  std::vector<Poison> poisons;                    // not read so far
  std::vector<Range> failed_;                     // has been read, or is a library's
  std::vector<char*> unsafe;                      // beginnings of blocks in use
};

int device_count();
// Raises if the process may not use devices: it was forked from one that has.
Device& device(int index);
bool is_initialized();
// Those that this process has used.
std::vector<Device*> used_devices();
bool is_in_bad_fork();

int current_device();
void set_current_device(int index);
c10::Stream current_stream(int index);
c10::Stream set_current_stream(c10::Stream stream);
Queue& queue_of(const c10::Stream& stream);

// An event at the present end of a stream.
MarkPtr record(const c10::Stream& stream);
// The stream's later work waits for it.
void block(const MarkPtr& mark, const c10::Stream& stream);
// The host waits for it; with whatever error the device has met.
void synchronize(const MarkPtr& mark, int device);
// How often the host has waited for a stream, an event or a device so far, for a copy's end too. That it was idle counts,
// as a real driver is asked all the same.
int64_t drains();
// While a graph is captured, what the streams are given is kept for `replay`, and the host may not ask for results.
// Memory that is asked for meanwhile is the graph's alone for ever, and each element makes a task anew.
using Graph = std::vector<std::function<Task()>>;
void begin_capture();
std::shared_ptr<Graph> end_capture();
void capture(std::function<Task()> make);
// All of it runs on this thread's stream.
void replay(const Graph& graph);
bool is_capturing();
// Raises while a graph is captured.
void check_capture(const char* what);

// End all threads at the interpreter's exit: wait a second for running work, and run no more.
void shutdown();
bool is_over();

// Whether the device has work on a stream of the script's: one on which a kernel was given to it.
bool is_computing(int index);
// A kernel that takes so long.
void sleep_on(const c10::Stream& stream, double ms);

int64_t now_us();

}  // namespace npu

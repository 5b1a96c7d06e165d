// The thread of each group that looks for operations that have failed, as NCCL's and HCCL's do. Begin with Watchdog.
#pragma once
#include <condition_variable>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include "device.h"

namespace npu {

// How an operation ends; it holds no tensor.
struct Outcome {
  MarkPtr end;
  bool is_over() const { return end->is_set() || failure(); }
  std::exception_ptr failure() const;
  void fail(std::exception_ptr with);

 private:
  mutable std::mutex guard;
  std::exception_ptr error;
};
using OutcomePtr = std::shared_ptr<Outcome>;

// It holds a mutex over each failed operation for as long as NCCL's does: TORCH_HCCL_WAIT_TIMEOUT_DUMP_MILSEC, a minute
// unless that is set, none with TORCH_HCCL_DUMP_ON_TIMEOUT=0. Then it ends the process, unless
// TORCH_HCCL_ASYNC_ERROR_HANDLING=0. All three are read once, when torch_npu is imported.
class Watchdog {
 public:
  enum Status { RUNNING = 1, STOPPED = 2 };  // torch_npu's numbers
  explicit Watchdog(int rank);
  // Waits for the thread, and so until it has slept enough.
  ~Watchdog();
  // An operation was issued. Waits while the thread holds the mutex, as the next two do.
  void watch(const OutcomePtr& outcome);
  void clear();
  void set_status(int status);
  // Ask the thread to end.
  void end();

 private:
  void run();
  void meet(const std::string& error);
  const int rank;
  std::mutex mutex;
  std::condition_variable changed;
  std::list<OutcomePtr> watched;
  std::atomic<int> status{RUNNING};
  std::atomic<bool> is_ended{false};
  std::thread thread;
};

// Read the environment, at the import.
void read_watchdog_settings();

}  // namespace npu

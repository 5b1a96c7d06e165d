#include "watchdog.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include "kind.h"

namespace npu {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds POLL(100);
milliseconds g_sleep(0);
bool g_ends_process = true;

bool is_off(const char* variable) {
  const char* named = std::getenv(variable);
  return named && !std::strcmp(named, "0");
}

}  // namespace

bool is_kind(const char* fact) {
  const char* named = std::getenv("SIMULATED_NPU_KIND");
  return ("," + std::string(named ? named : KIND_UNLESS_SET) + ",").find("," + std::string(fact) + ",") != std::string::npos;
}

void read_watchdog_settings() {
  const char* named = std::getenv("TORCH_HCCL_WAIT_TIMEOUT_DUMP_MILSEC");
  if (!is_off("TORCH_HCCL_DUMP_ON_TIMEOUT")) g_sleep = named ? milliseconds(std::atoll(named)) : milliseconds(60000);
  g_ends_process = !is_off("TORCH_HCCL_ASYNC_ERROR_HANDLING");
}

std::exception_ptr Outcome::failure() const {
  std::lock_guard<std::mutex> lock(guard);
  return error;
}

void Outcome::fail(std::exception_ptr with) {
  std::lock_guard<std::mutex> lock(guard);
  if (!error) error = std::move(with);
}

Watchdog::Watchdog(int rank) : rank(rank) {
  if (!is_kind("watchdog")) thread = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
  end();
  if (thread.joinable()) thread.join();
}

void Watchdog::watch(const OutcomePtr& outcome) {
  if (!thread.joinable()) return;
  std::lock_guard<std::mutex> lock(mutex);
  watched.push_back(outcome);
  changed.notify_all();
}

void Watchdog::clear() {
  std::lock_guard<std::mutex> lock(mutex);
  watched.clear();
}

void Watchdog::set_status(int to) { status = to; }

void Watchdog::end() {
  is_ended = true;
  changed.notify_all();
}

void Watchdog::run() {
  std::unique_lock<std::mutex> lock(mutex);
  while (!is_ended) {
    if (watched.empty()) changed.wait_for(lock, std::chrono::seconds(1));  // `end` takes no lock
    else changed.wait_for(lock, POLL);
    for (auto one = watched.begin(); one != watched.end() && !is_ended && status == RUNNING;) {
      const auto error = (*one)->failure();
      if (error || (*one)->is_over()) one = watched.erase(one);
      else ++one;
      if (!error) continue;
      try {
        std::rethrow_exception(error);
      } catch (const std::exception& what) {
        meet(what.what());
      }
    }
  }
}

void Watchdog::meet(const std::string& error) {
  // Whoever has stopped the device or the group knows.
  if (error.find("FORCE STOP") != std::string::npos || error.find("was aborted") != std::string::npos) return;
  std::fprintf(stderr, "[rank %d] HCCL watchdog thread has found a failed operation: %s\n", rank, error.c_str());
  std::this_thread::sleep_for(g_sleep);
  if (!g_ends_process) return;
  std::fprintf(stderr, "[rank %d] HCCL watchdog thread ends the process: %s\n", rank, error.c_str());
  std::abort();
}

}  // namespace npu

// What Python is given of all this.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/autograd/python_variable.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <execinfo.h>
#include <exception>
#include <thread>
#include "hccl.h"
#include "kind.h"
#include "operators.h"
#include "watchdog.h"

namespace py = pybind11;
using no_gil = py::call_guard<py::gil_scoped_release>;

struct Captured { std::shared_ptr<npu::Graph> graph; };

// A process that C++ ends by itself says where: "terminate called" alone does not.
[[noreturn]] void say_where_and_abort() {
  void* frames[64];
  backtrace_symbols_fd(frames, backtrace(frames, 64), 2);
  std::abort();
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  std::set_terminate(&say_where_and_abort);
  m.def("device_count", &npu::device_count);
  m.def("current_device", &npu::current_device);
  m.def("set_device", &npu::set_current_device);
  m.def("init", [] { npu::device(npu::current_device()).check(); });
  m.def("is_initialized", &npu::is_initialized);
  m.def("is_in_bad_fork", &npu::is_in_bad_fork);
  m.def("default_generator", &npu::default_generator);
  m.def("shutdown", [] {
    if (npu::is_in_bad_fork()) return;
    for (auto* device : npu::used_devices()) npu::settle_autograd(*device);
    npu::shutdown();
  }, no_gil());
  m.def("synchronize", [](int index) { npu::device(index).synchronize(); npu::device(index).check(); }, no_gil());
  m.def("state", [](int index) { return static_cast<int>(npu::device(index).state()); });
  m.def("check", [](int index) { npu::device(index).check(); });
  m.def("stop_device", [](int index) { npu::stop_hccl(index); return npu::device(index).stop(); }, no_gil());
  m.def("restart_device", [](int index, bool is_unchecked) { npu::device(index).restart(is_unchecked); });
  m.def("stops", [](int index) { return npu::device(index).stops; });
  m.def("fail", [](int index, int state) { npu::device(index).fail(static_cast<npu::State>(state), "", npu::now_us()); });
  m.def("check_uce_in_memory", [](int index) { return npu::device(index).check_uce(); }, no_gil());
  m.def("get_uce_addr", [](int index) { return npu::device(index).failed(); });
  m.def("poison", [](int index, uintptr_t address, size_t size, int kind) {
    npu::device(index).poison(reinterpret_cast<char*>(address), size, static_cast<npu::State>(kind));
  }, no_gil());
  m.def("poison_library", [](int index) { npu::device(index).poison_library(); });
  m.def("mark_safe", [](const at::Tensor& tensor) {
    if (auto memory = npu::held(tensor)) npu::device(memory->device).mark_safe(*memory);
  });
  m.def("is_safe", [](const at::Tensor& tensor) {
    try {
      if (auto memory = npu::held(tensor)) npu::device(memory->device).check_safe({memory});
    } catch (const std::runtime_error&) {
      return false;
    }
    return true;
  });
  m.def("mark_all_unsafe", [](int index) { npu::device(index).mark_all_unsafe(); });
  m.def("empty_cache", [](int index) { npu::device(index).empty_cache(); }, no_gil());
  m.def("memory", [](int index) {
    const auto found = npu::device(index).memory();
    return std::make_tuple(found.allocated, found.reserved, found.most_allocated, found.total);
  });
  m.def("memory_of_others", [](int index) { return npu::device(index).memory_of_others(); });
  py::class_<Captured>(m, "Graph").def("replay", [](const Captured& captured) { npu::replay(*captured.graph); });
  m.def("begin_capture", &npu::begin_capture);
  m.def("end_capture", [] { return Captured{npu::end_capture()}; });
  m.def("is_capturing", &npu::is_capturing);
  m.def("copied_to_host", &npu::copied_to_host);
  m.def("drains", &npu::drains);
  m.def("pin", &npu::pin);
  m.def("unpin", &npu::unpin);
  m.def("exposed", &npu::exposed);
  m.def("close_gate", [] { npu::device(npu::current_device()).close_gate(npu::current_stream(npu::current_device()).id(), "broadcast"); });
  m.def("sleep", [](double ms) { npu::sleep_on(npu::current_stream(npu::current_device()), ms); });
  m.def("reset_peak", [](int index) { npu::device(index).reset_peak(); });

  py::module_::import("torch.distributed");
  m.def("make_hccl", [](int rank, int size, std::chrono::milliseconds timeout, py::object connect) {
    // Called without the GIL, and destroyed by whoever destroys the group.
    auto held = std::shared_ptr<py::object>(new py::object(std::move(connect)), [](py::object* object) {
      if (!Py_IsInitialized()) return;
      const py::gil_scoped_acquire gil;
      delete object;
    });
    return npu::make_hccl(rank, size, timeout, [held](int generation, int peer) {
      const py::gil_scoped_acquire gil;
      const auto made = (*held)(generation, peer);
      return made.is_none() ? nullptr : made.cast<c10::intrusive_ptr<c10d::Backend>>();
    });
  });
  m.def("resume_hccl", &npu::resume_hccl, no_gil());
  m.def("is_kind", &npu::is_kind);
  // Block as C++ does: no signal handler of Python's runs meanwhile.
  m.def("block_for", [](double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }, no_gil());
  npu::bind_hccl(m);
  npu::read_watchdog_settings();
  m.def("break_next_collective", &npu::break_next_collective);
}

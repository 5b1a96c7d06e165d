// The backend hccl: collectives of device tensors. See ProcessGroupHCCL in hccl.cpp.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <functional>

namespace npu {

using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(int generation, int peer)>;

// connect: makes the gloo group that carries the data, of all members (peer -1), or of this rank and a peer; called by
// the first operation over it, and again after an abort or a resume. A communicator is known by how often the group was
// resumed since its newest abort: a process that has just started knows the group as aborted ones do. FORGET deletes
// what the members have left in the store, and makes nothing.
constexpr int FORGET = -1;
c10::intrusive_ptr<c10d::Backend> make_hccl(int rank, int size, std::chrono::milliseconds timeout, Connect connect);
// What stop_device and reinit_process_group do to all groups of a device.
void stop_hccl(int device);
void resume_hccl(int device);
// The next collective of this process meets this error.
void break_next_collective(int state);
// Operations that the host has first seen complete while the device had nothing else to do.
int64_t exposed();
// What Python has of a group beyond torch's Backend.
void bind_hccl(pybind11::module_& m);

}  // namespace npu

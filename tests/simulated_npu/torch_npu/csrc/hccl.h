// The backend hccl: collectives of device tensors. See ProcessGroupHCCL in hccl.cpp.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <functional>
#include <map>
#include <string>

namespace npu {

using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(int generation)>;

// connect: makes the gloo group that carries the data; called by the first collective, again after `reinit`.
c10::intrusive_ptr<c10d::Backend> make_hccl(int rank, int size, std::chrono::milliseconds timeout, Connect connect);
// What reinit_process_group does to all groups of a device, and to one.
void resume_hccl(int device);
void reinit_hccl(const c10::intrusive_ptr<c10d::Backend>& backend);
// Operation -> how often it was issued.
std::map<std::string, int> calls_of_hccl(const c10::intrusive_ptr<c10d::Backend>& backend);
// The next collective of this process meets this error.
void break_next_collective(int state);
void stop_hccl(int device);

}  // namespace npu

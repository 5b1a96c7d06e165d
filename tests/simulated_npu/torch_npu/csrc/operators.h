// Tensors of the simulated devices. Begin with as_host.
#pragma once
#include <ATen/ATen.h>
#include "device.h"

namespace npu {

// The memory that holds a tensor's data; null if it has none.
Held held(const at::Tensor& tensor);
// The same memory as a CPU tensor, which a stream's thread may use; it holds the memory, and not the tensor.
at::Tensor as_host(const at::Tensor& tensor);
// Let the present stream of the device run this; raises what the device has met.
void launch(Device& device, std::function<void()> run, std::vector<Held> reads);
// Wait for the device's present stream; raises what the device has met.
void finish(Device& device);
// Of a device; makes no device of it.
const at::Generator& default_generator(int index);
bool is_pinned(const void* ptr);
void pin(uintptr_t address, size_t size);
void unpin(uintptr_t address);
// Wait a second at most until the device's thread of autograd has let go of its last backward, which it may hold a moment
// longer than the caller of that waits. What it frees may be Python's: if the interpreter ends while it waits for the GIL
// in a destructor, Python ends the thread there, and C++ the process (std::terminate).
void settle_autograd(Device& device);
// Bytes of the devices' memory that were copied to the host's so far, and in how many copies.
std::pair<int64_t, int64_t> copied_to_host();

}  // namespace npu

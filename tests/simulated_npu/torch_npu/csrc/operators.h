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
// Bytes of the devices' memory that were copied to the host's so far, and in how many copies.
std::pair<int64_t, int64_t> copied_to_host();

}  // namespace npu

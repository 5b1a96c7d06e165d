// Where a simulated device may still be kinder than a real one. Each kindness has the name of the fact it hides:
//
// connect    communicators are made over the group's own store, and an error of that ends the wait for peers
// abort      Backend::abort ends running operations, and neither an abort nor a destructor waits for them
// walk       stop_device and restart_device do not look at torch's process groups
// watchdog   no thread of a group looks for errors, sleeps over them, and ends the process
// work       synchronous operations have a Work, and run on the group's stream
//
// One more is no kindness: groups of this kind end as NCCL's do, for what the product does on CUDA alone.
//
// nccl       abort ends running operations, and returns when all that was given to the communicator has ended
//
// And some are in the way, as a real one may be:
//
// gate       a stream whose collective was aborted computes nothing more until one like it has succeeded
// null       a communicator is made with a copy on the null stream, as CollNet's is: after all that this was given
// load       a kernel's first launch waits until no stream waits for a peer or at a gate
// lock       the same, and no other kernel is launched meanwhile
//
// SIMULATED_NPU_KIND names those to have, separated by commas; "" none.
#pragma once

namespace npu {

// What there is of them if the variable is not set: none, as the product copes with all.
constexpr const char* KIND_UNLESS_SET = "";

bool is_kind(const char* fact);

}  // namespace npu

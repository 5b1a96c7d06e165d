// What runs on the devices: each operator is the CPU's, in a stream's thread, on the same memory. The host only finds
// out what the result will look like, from the operator's implementation for meta tensors. Begin with `fallback`.
#include "operators.h"
#include "kind.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>

namespace npu {
namespace {

using at::IntArrayRef;
using at::Tensor;
using torch::jit::Stack;
constexpr auto NPU = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// Memory.

void give_back(void* context) {
  auto* held = static_cast<Held*>(context);
  device((*held)->device).release(**held);
  delete held;
}
// Of a view for a stream's thread, which does not own the memory.
void drop(void* context) { delete static_cast<Held*>(context); }

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const int index = current_device();
    const c10::Device on(NPU, static_cast<c10::DeviceIndex>(index));
    auto& of = device(index);
    of.check();
    if (!size) return {nullptr, on};
    auto* context = new Held(of.allocate(size, current_stream(index).id()));
    return {(*context)->ptr, context, &give_back, on};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
Allocator g_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &g_allocator);

std::atomic<int64_t> g_bytes_to_host{0}, g_copies_to_host{0};

void count_to_host(int64_t bytes) {
  g_bytes_to_host += bytes;
  ++g_copies_to_host;
}

std::mutex g_pinned_mutex;
std::map<const char*, size_t> g_pinned;

struct PinnedAllocator final : c10::Allocator {
  static void unpin(void* ptr) {
    std::lock_guard<std::mutex> lock(g_pinned_mutex);
    g_pinned.erase(static_cast<char*>(ptr));
    std::free(ptr);
  }
  c10::DataPtr allocate(size_t size) override {
    if (!size) return {nullptr, c10::Device(c10::kCPU)};
    void* ptr = std::aligned_alloc(64, (size + 63) / 64 * 64);
    std::lock_guard<std::mutex> lock(g_pinned_mutex);
    g_pinned[static_cast<char*>(ptr)] = size;
    return {ptr, ptr, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
PinnedAllocator g_pinned_allocator;

// Generators. The state is the host's: each random operator draws one number from it, which seeds that operator; one in a
// graph draws at each replay.

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index)
      : GeneratorImpl(c10::Device(NPU, index), KEYS), host(at::detail::createCPUGenerator(c10::default_rng_seed_val)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the simulated NPU's generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the simulated NPU's generator has no offset"); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  // A generator for one operator.
  at::Generator draw() {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* from = static_cast<at::CPUGeneratorImpl*>(host.unsafeGetGeneratorImpl());
    if (!is_capturing()) return at::detail::createCPUGenerator(from->random64());
    auto made = at::detail::createCPUGenerator();
    capture([from, made] {
      Task task;
      task.run = [made, seed = from->random64()]() mutable { made.set_current_seed(seed); };
      return task;
    });
    return made;
  }
  at::Generator host;

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->host = host.clone();
    return copy;
  }
};

}  // namespace

std::pair<int64_t, int64_t> copied_to_host() { return {g_bytes_to_host, g_copies_to_host}; }

const at::Generator& default_generator(int index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); ++i) made->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i)));
    return made;
  }();
  return all->at(index < 0 ? current_device() : index);
}

namespace {

// The seams of torch: guard and hooks.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static MarkPtr& mark(void* event) { return *static_cast<MarkPtr*>(event); }
  c10::DeviceType type() const override { return NPU; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const auto before = getDevice();
    if (to.index() >= 0) set_current_device(to.index());
    return before;
  }
  c10::Device getDevice() const override { return {NPU, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device to) const override { if (to.index() >= 0) set_current_device(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { if (to.index() >= 0) set_current_device(to.index()); }
  c10::Stream getStream(c10::Device of) const override { return current_stream(of.index()); }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::DEFAULT, of.has_index() ? of : getDevice());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return getNewStream(of, 0); }
  c10::Stream getNewStream(c10::Device of, int) const override {
    const auto on = of.has_index() ? of : getDevice();
    return c10::Stream(c10::Stream::UNSAFE, on, device(on.index()).new_stream());
  }
  c10::Stream exchangeStream(c10::Stream to) const override { return set_current_stream(to); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr;
    mark(*event) = npu::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override { if (event) npu::block(mark(event), stream); }
  bool queryEvent(void* event) const override {
    check_capture("aclrtQueryEventStatus");
    return !event || mark(event)->is_set();
  }
  // Memory of a finished operation of another stream, which this one uses.
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    if (ptr.get_context() && ptr.get_deleter() == &give_back) use(*static_cast<Held*>(ptr.get_context()), stream);
  }
  static void use(const Held& memory, const c10::Stream& stream) { if (memory) npu::device(memory->device).use(memory, stream.id()); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<MarkPtr*>(event); }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).is_idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    queue_of(stream).drain();
    device(stream.device_index()).check();
  }
  void synchronizeEvent(void* event) const override { 
    check_capture("aclrtSynchronizeEvent");
    if (event) npu::synchronize(mark(event), current_device());
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    device(index).synchronize();
    device(index).check();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(from) && queryEvent(to), "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(mark(to)->at - mark(from)->at).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_initialized(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  void init() const override { device(current_device()); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = getCurrentDevice();
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(static_cast<c10::DeviceIndex>(index < 0 ? current_device() : index));
  }
  c10::Device getDeviceFromPtr(void*) const override { return {NPU, static_cast<c10::DeviceIndex>(current_device())}; }
  bool isPinnedPtr(const void* ptr) const override { return is_pinned(ptr); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(storage.device());
    auto& of = device(storage.device().index());
    auto grown = g_allocator.allocate(size);
    const size_t common = std::min(size, static_cast<size_t>(impl->nbytes()));
    if (common) launch(of, [to = grown.get(), from = impl->data(), common] { std::memcpy(to, from, common); }, {});
    impl->set_data_ptr_noswap(std::move(grown));
    impl->set_nbytes(size);
  }
};
const Hooks* const g_hooks = [] {
  auto* made = new Hooks;
  at::RegisterPrivateUse1HooksInterface(made);
  return made;
}();

// Operators that make or look at tensors.

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> on, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(on);
  return at::detail::empty_generic(size, &g_allocator, KEYS, dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> on, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(on);
  return at::detail::empty_strided_generic(size, stride, &g_allocator, KEYS, dtype.value_or(at::get_default_dtype_as_scalartype()));
}

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto needed = (c10::multiply_integers(size) + self.storage_offset()) * self.element_size();
  if (static_cast<size_t>(needed) > self.storage().nbytes()) g_hooks->resizePrivateUse1Bytes(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage_at(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage_at(self, std::move(storage), 0, {count}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) {
  return set_storage_at(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &g_allocator, true), 0, {0}, {1});
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool is_non_blocking) {
  if (!to.numel()) return to;
  if (self.is_privateuseone() && to.is_privateuseone()) {
    auto& of = device(to.device().index());
    if (self.device() != to.device()) finish(device(self.device().index()));
    of.check_safe({held(self)});
    if (self.scalar_type() != to.scalar_type() || !self.is_contiguous() || !to.is_contiguous())  // else the copy engine does it
      of.load("copy");
    launch(of, [from = as_host(self), into = as_host(to)]() mutable { into.copy_(from); }, {held(self)});
    if (self.device() != to.device()) finish(of);
  } else if (to.is_privateuseone()) {
    auto& of = device(to.device().index());
    const bool is_late = is_non_blocking && is_pinned(self.const_data_ptr());
    // What is not pinned is copied at once to where the device can read it.
    launch(of, [from = is_late ? self.detach() : self.detach().clone(), into = as_host(to)]() mutable { into.copy_(from); }, {});
    if (!is_non_blocking) finish(of);
  } else {
    auto& of = device(self.device().index());
    of.check_safe({held(self)});
    check_capture("aclrtMemcpy to the host");
    count_to_host(static_cast<int64_t>(self.nbytes()));
    launch(of, [from = as_host(self), into = to.detach()]() mutable { into.copy_(from); }, {held(self)});
    if (!is_non_blocking || !is_pinned(to.const_data_ptr())) finish(of);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  auto& of = device(self.device().index());
  of.check_safe({held(self)});
  count_to_host(self.element_size());
  auto value = std::make_shared<at::Scalar>();
  launch(of, [from = as_host(self), value] { *value = at::native::_local_scalar_dense_cpu(from); }, {held(self)});
  finish(of);
  return *value;
}

void record_stream(Tensor& self, c10::Stream stream) { Guard::use(held(self), stream); }

// Noise: as on a real device, where some backward kernels add in an order that nobody controls. Deterministic algorithms
// switch it off.
bool is_noisy(const std::string& operation) {
  static const std::set<std::string> noisy{
      "aten::embedding_dense_backward", "aten::convolution_backward_overrideable", "aten::_index_put_impl_",
      "aten::scatter_add", "aten::scatter_add_", "aten::_scaled_dot_product_fused_attention_overrideable_backward"};
  return !at::globalContext().deterministicAlgorithms() && noisy.count(operation);
}

// One unit in the last place, or none.
void disturb(const Tensor& out) {
  static std::mutex mutex;
  static std::mt19937 random{std::random_device()()};
  std::lock_guard<std::mutex> lock(mutex);
  if (!out.defined() || !out.numel() || out.scalar_type() != at::kFloat || !out.is_contiguous() || random() % 2) return;
  auto& value = out.data_ptr<float>()[random() % out.numel()];
  value = std::nextafterf(value, 2 * value);
}

// All other operators.

// What the host must know at once, or what has a shape that depends on the data.
bool needs_the_host(const c10::OperatorHandle& op) {
  for (const auto& out : op.schema().returns()) {
    const auto kind = out.type()->kind();
    const bool is_list = kind == c10::ListType::Kind && out.type()->castRaw<c10::ListType>()->getElementType()->kind() == c10::TensorType::Kind;
    if (kind != c10::TensorType::Kind && !is_list) return true;
  }
  return op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
}

bool draws(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::nondeterministic_seeded); }

bool only_writes(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  return draws(op) || name == "aten::zero_" || name == "aten::fill_";
}

Tensor as_meta(const Tensor& tensor) {
  Tensor made = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// Arguments three times over: as they came, as the shapes alone, and as the stream's thread will use them.
struct Call {
  Stack meta, host;
  std::vector<Held> reads;
  std::vector<std::pair<Tensor, Tensor>> written;  // as it came, as a shape
  std::vector<at::ScalarType> types;               // of its tensors on the device
  int index = -1;                                  // of the device

  void add(const Tensor& tensor, bool is_written, bool is_read, Tensor& meta_of, Tensor& host_of) {
    if (!tensor.defined()) return;
    meta_of = tensor.is_cpu() && tensor.dim() == 0 ? tensor : as_meta(tensor);
    if (tensor.is_privateuseone()) {
      TORCH_CHECK(index < 0 || index == tensor.device().index(),
                  "Expected all tensors to be on the same device, but found npu:", index, " and ", tensor.device());
      index = tensor.device().index();
      types.push_back(tensor.scalar_type());
      host_of = as_host(tensor);
      if (is_written) written.emplace_back(tensor, meta_of);
      if (is_read) reads.push_back(held(tensor));
    } else {
      host_of = tensor.detach().clone();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) host_of.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
  }
};

void check_devices(const c10::OperatorHandle& op, const std::vector<Tensor>& on_host) {
  const auto& name = op.schema().name();
  if (name.find("index") != std::string::npos) return;  // an index may be the host's
  for (const auto& tensor : on_host)
    TORCH_CHECK(tensor.dim() == 0, "Expected all tensors to be on the same device, but found at least two devices, npu and ",
                tensor.device(), "! (", name, ")");
}

// On the stream, and waited for, with copies to the host and back.
void run_at_once(const c10::OperatorHandle& op, Stack* stack, int index) {
  auto& of = device(index < 0 ? current_device() : index);
  finish(of);
  if (!draws(op)) return at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  auto* generator = static_cast<Generator*>(default_generator(of.index).unsafeGetGeneratorImpl());
  const auto count = op.schema().arguments().size();
  bool is_given = false;
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    const auto& type = op.schema().arguments()[i - (stack->size() - count)].type()->str();
    if (type != "Generator?" && type != "Generator") continue;
    auto* named = value.isNone() ? generator : dynamic_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl());
    if (named) value = named->draw();
    is_given = true;
  }
  if (is_given) return at::native::cpu_fallback(op, stack, true);
  // It takes the CPU's default generator, which must be as it was afterwards.
  auto cpu = at::detail::getDefaultCPUGenerator();
  const auto before = cpu.get_state();
  cpu.set_state(generator->draw().get_state());
  at::native::cpu_fallback(op, stack, true);
  cpu.set_state(before);
}

// What runs in the place of an operator, with its arguments.
c10::OperatorHandle stand_in(const c10::OperatorHandle& op, Call& call, const Stack& stack) {
  const auto& name = op.schema().name();
  auto& dispatcher = c10::Dispatcher::singleton();
  if (name == "aten::convolution_overrideable") return dispatcher.findSchemaOrThrow("aten::convolution", "");
  if (name != "aten::convolution_backward_overrideable") return op;
  const auto first = stack.size() - op.schema().arguments().size();
  const std::vector<int64_t> bias{stack[first].toTensor().size(1)};
  for (auto* arguments : {&call.meta, &call.host}) arguments->insert(arguments->begin() + 3, c10::IValue(bias));
  return dispatcher.findSchemaOrThrow("aten::convolution_backward", "");
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto first = stack->size() - count;
  Call call;
  std::vector<Tensor> on_host;
  bool is_random_unnamed = draws(op);
  for (size_t i = 0; i < count; ++i) {
    const auto& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool is_written = alias && alias->isWrite();
    const bool is_read = !is_written || !(schema.arguments()[i].is_out() || only_writes(op));
    if (value.isTensor()) {
      Tensor meta, host;
      call.add(value.toTensor(), is_written, is_read, meta, host);
      if (host.defined() && value.toTensor().is_cpu()) on_host.push_back(value.toTensor());
      call.meta.emplace_back(meta);
      call.host.emplace_back(host);
    } else if (value.isTensorList()) {
      std::vector<Tensor> metas, hosts;
      for (const Tensor& one : value.toTensorList()) {
        metas.emplace_back();
        hosts.emplace_back();
        call.add(one, is_written, is_read, metas.back(), hosts.back());
      }
      call.meta.emplace_back(metas);
      call.host.emplace_back(hosts);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> metas, hosts;
      for (const std::optional<Tensor>& one : value.toOptionalTensorList()) {
        Tensor meta, host;
        if (one) call.add(*one, is_written, is_read, meta, host);
        metas.push_back(one ? std::optional(meta) : std::nullopt);
        hosts.push_back(one ? std::optional(host) : std::nullopt);
      }
      call.meta.emplace_back(metas);
      call.host.emplace_back(hosts);
    } else if (value.isDevice()) {
      if (value.toDevice().is_privateuseone()) call.index = std::max<int>(0, value.toDevice().index());
      call.meta.emplace_back(c10::Device(c10::kMeta));
      call.host.emplace_back(c10::Device(c10::kCPU));
    } else {
      call.meta.push_back(value);
      call.host.push_back(value);
    }
  }
  if (call.index < 0) call.index = current_device();
  auto& of = device(call.index);
  of.check();
  of.check_safe(call.reads);
  check_devices(op, on_host);
  for (size_t i = 0; i < count && draws(op); ++i) {
    const auto& type = schema.arguments()[i].type()->str();
    if (type != "Generator?" && type != "Generator") continue;
    is_random_unnamed = false;
    const auto& value = (*stack)[first + i];
    const auto& named = value.isNone() ? default_generator(call.index) : value.toGenerator();
    TORCH_CHECK(named.device().is_privateuseone(), "Expected a 'npu' device type for generator but found 'cpu'");
    call.host[i] = static_cast<Generator*>(named.unsafeGetGeneratorImpl())->draw();
  }
  std::string kernel = schema.name() + "." + schema.overload_name();
  for (const auto& type : call.types) kernel += std::string(" ") + c10::toString(type);
  of.load(kernel);
  if (needs_the_host(op) || is_random_unnamed) return run_at_once(op, stack, call.index);

  const auto runs = stand_in(op, call, *stack);
  bool is_only_written = true;
  for (const auto& out : schema.returns()) is_only_written = is_only_written && out.alias_info() && out.alias_info()->isWrite();
  try {
    const c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    runs.callBoxed(call.meta);
  } catch (const std::exception& error) {
    // Also by way of Python, where some of these implementations are.
    const bool is_missing = dynamic_cast<const c10::NotImplementedError*>(&error) || std::strstr(error.what(), "NotImplementedError");
    if (!is_missing) throw;
    if (!is_only_written) return run_at_once(op, stack, call.index);
    call.meta.clear();
  }
  if (schema.name() == "aten::native_batch_norm" && !(*stack)[first + 5].toBool() && call.meta.size() == 3)
    // The CPU's saves no statistics when it is not training.
    call.meta[1] = call.meta[2] = Tensor(at::detail::empty_strided_meta({0}, {1}, at::kFloat));
  for (const auto& [real, shape] : call.written)
    if (!real.sizes().equals(shape.sizes())) return run_at_once(op, stack, call.index);

  // The results, made now and filled later; `into` are those that the operator does not write by itself.
  Stack results;
  std::vector<std::pair<size_t, Tensor>> into;  // result, or element of the one list of results
  const c10::DeviceGuard guard(c10::Device(NPU, static_cast<c10::DeviceIndex>(call.index)));
  const auto like = [](const Tensor& shape) -> Tensor {
    if (!shape.defined()) return Tensor();
    return shape.is_non_overlapping_and_dense() ? at::detail::empty_strided_generic(shape.sizes(), shape.strides(), &g_allocator, KEYS, shape.scalar_type())
                                                : at::detail::empty_generic(shape.sizes(), &g_allocator, KEYS, shape.scalar_type(), std::nullopt);
  };
  bool is_list = false;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias && !alias->isWrite()) TORCH_CHECK(false, "the simulated NPU does not have the view operator ", schema.name());
    if (alias) {
      for (size_t j = 0; j < count; ++j) {
        const auto* of_argument = schema.arguments()[j].alias_info();
        if (of_argument && *of_argument == *alias) results.push_back((*stack)[first + j]);
      }
    } else if (call.meta.at(i).isTensor()) {
      const Tensor made = like(call.meta[i].toTensor());
      if (made.defined()) into.emplace_back(i, as_host(made));
      results.emplace_back(made);
    } else {
      is_list = true;
      std::vector<Tensor> all;
      for (const Tensor& shape : call.meta[i].toTensorList()) {
        all.push_back(like(shape));
        into.emplace_back(all.size() - 1, as_host(all.back()));
      }
      results.emplace_back(all);
    }
  }
  TORCH_CHECK(!is_list || schema.returns().size() == 1, "the simulated NPU does not have ", schema.name());
  launch(of, [op, runs, host = std::move(call.host), into, is_list, is_noisy = is_noisy(schema.name())]() mutable {
    const at::AutoDispatchBelowADInplaceOrView guard;
    runs.callBoxed(host);
    for (auto& [i, out] : into) {
      const Tensor made = is_list ? host.at(0).toTensorVector().at(i) : host.at(i).toTensor();
      TORCH_CHECK(made.sizes().equals(out.sizes()), "simulated NPU: ", op.schema().name(), " gives ", made.sizes(), ", not ", out.sizes());
      out.copy_(made);
      if (is_noisy) disturb(out);
    }
    if (is_noisy && into.empty() && host.at(0).isTensor()) disturb(host.at(0).toTensor());
  }, std::move(call.reads));
  torch::jit::drop(*stack, count);
  for (auto& result : results) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("alias", TORCH_FN(at::native::alias));
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  m.impl("_local_scalar_dense", &local_scalar_dense);
}

// torch.amp.autocast("npu"): as on a GPU.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#undef LOWER
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FP32)
#undef FP32
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
#undef PROMOTE
}

}  // namespace

Held held(const Tensor& tensor) {
  if (!tensor.is_privateuseone()) return nullptr;
  auto* context = tensor.storage().data_ptr().get_context();
  return context ? *static_cast<Held*>(context) : nullptr;
}

Tensor as_host(const Tensor& tensor) {
  const auto& storage = tensor.storage();
  auto memory = held(tensor);
  auto* ptr = memory ? memory->ptr : nullptr;
  auto* context = new Held(std::move(memory));
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(ptr, context, &drop, c10::Device(c10::kCPU)), nullptr, false);
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

void launch(Device& of, std::function<void()> run, std::vector<Held> reads) {
  of.check();
  if (is_kind("lock")) std::lock_guard<std::mutex> lock(of.launching);
  if (torch::autograd::get_current_graph_task_id() != -1) of.was_in_backward = true;
  Task task;
  task.run = std::move(run);
  task.reads = std::move(reads);
  queue_of(current_stream(of.index)).push(std::move(task));
}

void finish(Device& of) {
  check_capture("a copy to the host");
  queue_of(current_stream(of.index)).drain();
  of.check();
}

void settle_autograd(Device& of) {
  if (!of.was_in_backward || of.state() != RUN || is_capturing()) return;
  auto is_done = std::make_shared<Mark>();
  std::thread([index = of.index, is_done] {
    try {
      auto leaf = at::ones({1}, at::TensorOptions().device(c10::Device(NPU, static_cast<c10::DeviceIndex>(index))));
      leaf.set_requires_grad(true).sum().backward();  // its nodes hold nothing of Python's
    } catch (const std::exception&) {  // the device has failed meanwhile
    }
    is_done->set();
  }).detach();
  is_done->wait_for(std::chrono::seconds(1));
}

void pin(uintptr_t address, size_t size) {
  std::lock_guard<std::mutex> lock(g_pinned_mutex);
  g_pinned[reinterpret_cast<const char*>(address)] = size;
}

void unpin(uintptr_t address) {
  std::lock_guard<std::mutex> lock(g_pinned_mutex);
  g_pinned.erase(reinterpret_cast<const char*>(address));
}

bool is_pinned(const void* ptr) {
  std::lock_guard<std::mutex> lock(g_pinned_mutex);
  auto found = g_pinned.upper_bound(static_cast<const char*>(ptr));
  if (found == g_pinned.begin()) return false;
  --found;
  return static_cast<const char*>(ptr) < found->first + found->second;
}

}  // namespace npu

#include <torch/extension.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <cstdlib>
using namespace at;
static int g_dev = 0;
struct Alloc final : c10::Allocator {
  static void del(void* p){ std::free(p); }
  c10::DataPtr allocate(size_t n) override { void* p = n ? std::malloc(n) : nullptr; return {p, p, &del, c10::Device(c10::DeviceType::PrivateUse1, g_dev)}; }
  c10::DeleterFnPtr raw_deleter() const override { return &del; }
  void copy_data(void* d, const void* s, std::size_t c) const override { std::memcpy(d, s, c); }
};
static Alloc g_alloc;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &g_alloc);
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device d) const override { auto o = getDevice(); g_dev = d.index()<0?0:d.index(); return o; }
  c10::Device getDevice() const override { return {c10::DeviceType::PrivateUse1, (c10::DeviceIndex)g_dev}; }
  void setDevice(c10::Device d) const override { g_dev = d.index()<0?0:d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { g_dev = d.index()<0?0:d.index(); }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return c10::Stream(c10::Stream::DEFAULT, s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** e, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return g_dev; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto* impl = s.unsafeGetStorageImpl(); auto np = g_alloc.allocate(n); size_t k = std::min(n, (size_t)impl->nbytes());
    if (k) std::memcpy(np.get(), impl->data(), k); impl->set_data_ptr_noswap(std::move(np)); impl->set_nbytes(n); }
};
static Hooks* hooks = [](){ auto* h = new Hooks(); at::RegisterPrivateUse1HooksInterface(h); return h; }();
static c10::DispatchKeySet ks(c10::DispatchKey::PrivateUse1);
Tensor empty_mf(IntArrayRef s, std::optional<ScalarType> dt, std::optional<Layout>, std::optional<Device>, std::optional<bool>, std::optional<MemoryFormat> mf){
  return at::detail::empty_generic(s, &g_alloc, ks, dt.value_or(at::get_default_dtype_as_scalartype()), mf); }
Tensor empty_st(IntArrayRef s, IntArrayRef st, std::optional<ScalarType> dt, std::optional<Layout>, std::optional<Device>, std::optional<bool>){
  return at::detail::empty_strided_generic(s, st, &g_alloc, ks, dt.value_or(at::get_default_dtype_as_scalartype())); }
static Tensor as_cpu(const Tensor& t){ // alias of the same memory
  if (t.is_cpu()) return t;
  return at::from_blob(const_cast<void*>(t.storage().data()), {(int64_t)(t.storage().nbytes()/t.element_size())}, t.options().device(kCPU)).as_strided(t.sizes(), t.strides(), t.storage_offset()); }
Tensor copy_from(const Tensor& self, const Tensor& dst, bool){ if (dst.numel()) as_cpu(dst).copy_(as_cpu(self)); return dst; }
Tensor copy_from_resize(const Tensor& self, const Tensor& dst){ dst.resize_(self.sizes()); if (dst.numel()) as_cpu(dst).copy_(as_cpu(self)); return dst; }
Tensor as_st(const Tensor& s, IntArrayRef a, IntArrayRef b, std::optional<int64_t> o){ return at::native::as_strided_tensorimpl(s,a,b,o); }
Tensor reshape_alias(const Tensor& s, IntArrayRef a, IntArrayRef b){ return at::native::as_strided_tensorimpl(s,a,b,s.storage_offset()); }
Tensor view_(const Tensor& s, IntArrayRef a){ return at::native::view(s,a); }
const Tensor& resize__(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat> mf){ 
  int64_t n=1; for (auto x: size) n*=x; auto need=(n+self.storage_offset())*self.element_size(); if ((size_t)need > self.storage().nbytes()) hooks->resizePrivateUse1Bytes(self.storage(), need);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size); return self; }
Tensor& set_ss(Tensor& r, Storage s, int64_t off, IntArrayRef size, IntArrayRef st){ r.unsafeGetTensorImpl()->set_storage_keep_dtype(s); r.unsafeGetTensorImpl()->set_storage_offset(off); r.unsafeGetTensorImpl()->set_sizes_and_strides(size, st); return r; }
Tensor& set_s(Tensor& r, Storage s){ int64_t n = s.nbytes()/r.element_size(); return set_ss(r, s, 0, {n}, {1}); }
Scalar lsd(const Tensor& t){ return at::native::_local_scalar_dense_cpu(as_cpu(t)); }
void fb(const c10::OperatorHandle& op, torch::jit::Stack* st){ at::native::cpu_fallback(op, st); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m){ m.fallback(torch::CppFunction::makeFromBoxedFunction<&fb>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m){
  m.impl("empty.memory_format", &empty_mf); m.impl("empty_strided", &empty_st); m.impl("_copy_from", &copy_from); m.impl("_copy_from_and_resize", &copy_from_resize);
  m.impl("as_strided", &as_st); m.impl("view", &view_); m.impl("_reshape_alias", &reshape_alias); m.impl("resize_", &resize__); m.impl("set_.source_Storage_storage_offset", &set_ss); m.impl("set_.source_Storage", &set_s); m.impl("_local_scalar_dense", &lsd);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}

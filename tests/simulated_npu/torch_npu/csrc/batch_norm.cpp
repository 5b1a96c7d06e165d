// What torch.nn.SyncBatchNorm asks of a device, by the formulas of torch's CUDA kernels: channels are dimension 1, and
// statistics are float32 at least.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

namespace npu {
namespace {

using at::Tensor;
using Given = const std::optional<Tensor>&;

at::ScalarType precise(const Tensor& like) { return at::toOpMathType(like.scalar_type()); }

std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

// One value per channel, in a shape that is broadcast over the input.
Tensor spread(const Tensor& per_channel, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = per_channel.numel();
  return per_channel.to(precise(input)).view(shape);
}

bool is_given(Given tensor) { return tensor && tensor->defined(); }

std::tuple<Tensor, Tensor> stats(const Tensor& input, double eps) {
  const auto dims = all_but_channels(input);
  const auto exact = input.to(precise(input));
  const auto mean = exact.mean(dims);
  const auto variance = (exact - spread(mean, input)).pow(2).mean(dims);
  return {mean, (variance + eps).rsqrt()};
}

std::tuple<Tensor, Tensor> gather_stats(const Tensor& input, const Tensor& mean, const Tensor& invstd, Given running_mean,
                                        Given running_var, double momentum, double eps, const Tensor& counts) {
  const auto weights = counts.to(mean.scalar_type()).view({-1, 1});
  const auto total = weights.sum();
  const auto joint = (weights * mean).sum(0) / total;
  const auto squares = (weights * (invstd.reciprocal().pow(2) - eps + (mean - joint).pow(2))).sum(0);
  if (is_given(running_mean)) {
    Tensor into = *running_mean;
    into.mul_(1 - momentum).add_(joint.to(into.scalar_type()), momentum);
  }
  if (is_given(running_var)) {
    Tensor into = *running_var;
    into.mul_(1 - momentum).add_((squares / (total - 1)).to(into.scalar_type()), momentum);
  }
  return {joint, (squares / total + eps).rsqrt()};
}

Tensor elemt(const Tensor& input, Given weight, Given bias, const Tensor& mean, const Tensor& invstd, double) {
  auto result = (input.to(precise(input)) - spread(mean, input)) * spread(invstd, input);
  if (is_given(weight)) result = result * spread(*weight, input);
  if (is_given(bias)) result = result + spread(*bias, input);
  return result.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_reduce(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                                           const Tensor& invstd, Given weight, bool, bool has_weight, bool has_bias) {
  const auto dims = all_but_channels(input);
  const auto exact = grad.to(precise(grad));
  const auto sum = exact.sum(dims);
  const auto sum_of_products = (exact * (input.to(precise(input)) - spread(mean, input))).sum(dims);
  const auto kind = is_given(weight) ? weight->scalar_type() : sum.scalar_type();
  return {sum, sum_of_products, has_weight ? (sum_of_products * invstd).to(kind) : Tensor(), has_bias ? sum.to(kind) : Tensor()};
}

Tensor backward_elemt(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& invstd, Given weight,
                      const Tensor& sum, const Tensor& sum_of_products, const Tensor& counts) {
  const auto total = counts.sum().to(sum.scalar_type());
  const auto centred = input.to(precise(input)) - spread(mean, input);
  auto scale = invstd;
  if (is_given(weight)) scale = scale * weight->to(scale.scalar_type());
  const auto result = (grad.to(precise(grad)) - spread(sum / total, input) -
                       centred * spread(invstd.pow(2) * sum_of_products / total, input)) * spread(scale, input);
  return result.to(input.scalar_type());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("batch_norm_stats", &stats);
  m.impl("batch_norm_gather_stats_with_counts", &gather_stats);
  m.impl("batch_norm_elemt", &elemt);
  m.impl("batch_norm_backward_reduce", &backward_reduce);
  m.impl("batch_norm_backward_elemt", &backward_elemt);
}

}  // namespace
}  // namespace npu

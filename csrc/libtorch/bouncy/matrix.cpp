#include "libtorch/bouncy/matrix.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "libtorch/core/checks.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {
namespace {

int64_t SizeOf(const std::vector<at::Tensor>& params) {
  int64_t size = 0;
  for (const at::Tensor& p : params) size += p.numel();
  return size;
}

// What keeps a matrix from being one that can be used; empty if nothing does.
std::string FaultOf(const at::Tensor& a) {
  if (!a.isfinite().all().item<bool>()) {
    return "elements that are not finite (must be finite)";
  }
  const auto [inverse, info] = at::linalg_inv_ex(a);
  double condition = 1;
  if (a.numel() > 0) {
    for (const at::Tensor& x : {a, inverse}) {
      condition *= x.abs().sum(0).max().item<double>();
    }
  }
  // The inverse of one that is nearly singular may be anything, NaN too.
  if (info.item().toLong() != 0 ||
      !(condition < 1 / std::numeric_limits<double>::epsilon())) {
    return "no inverse in float64 (must be invertible)";
  }
  return "";
}

}  // namespace

FlightMatrix::FlightMatrix(const at::Tensor& a, std::vector<at::Tensor> like)
    : a_(a), transposed_(a.t().contiguous()), like_(std::move(like)) {}

std::vector<at::Tensor> FlightMatrix::times(
    const std::vector<at::Tensor>& v) const {
  return product(a_, v);
}

std::vector<at::Tensor> FlightMatrix::transposed_times(
    const std::vector<at::Tensor>& g) const {
  return product(transposed_, g);
}

std::vector<at::Tensor> FlightMatrix::solved(
    const std::vector<at::Tensor>& x) const {
  if (!inverse_.defined()) inverse_ = at::linalg_inv(a_).contiguous();
  return product(inverse_, x);
}

std::vector<at::Tensor> FlightMatrix::product(
    const at::Tensor& a, const std::vector<at::Tensor>& with) const {
  std::vector<at::Tensor> flat;
  flat.reserve(with.size());
  for (const at::Tensor& x : with) flat.push_back(x.flatten().to(at::kDouble));
  const at::Tensor whole = (a * at::cat(flat)).sum(1);
  std::vector<at::Tensor> result;
  int64_t begin = 0;
  for (const at::Tensor& x : like_) {
    result.push_back(at::empty_like(x).copy_(
        whole.narrow(0, begin, x.numel()).view(x.sizes())));
    begin += x.numel();
  }
  return result;
}

at::Tensor CheckedMatrix(const at::Tensor& value,
                         const std::vector<at::Tensor>& params) {
  const std::string what = "Invalid preconditioner matrix: ";
  if (!value.defined()) Invalid(what + "it is undefined");
  std::set<std::string> devices;
  int64_t moving = 0;
  for (const at::Tensor& p : params) {
    devices.insert(p.device().str());
    if (p.requires_grad()) moving += p.numel();
  }
  if (devices.size() > 1) {
    std::string names;
    for (const std::string& name : devices) {
      names += (names.empty() ? "" : ", ") + name;
    }
    Invalid(what + "parameters on " + names + " (must be on one device)");
  }
  const int64_t d = SizeOf(params);
  if (moving < d) {
    Invalid(what + std::to_string(moving) + " of " + std::to_string(d) +
            " parameters require gradients (must be all)");
  }
  if (value.sizes() != c10::IntArrayRef({d, d})) {
    Invalid(what + "shape " + Shape(value.sizes()) + " (must be " +
            Shape({d, d}) + ")");
  }
  const at::NoGradGuard no_grad;
  at::Tensor a = value.detach().to(
      value.options()
          .dtype(at::kDouble)
          .device(params.empty() ? value.device() : params[0].device()),
      /*non_blocking=*/false,
      /*copy=*/true,
      at::MemoryFormat::Contiguous);
  const std::string fault = FaultOf(a);
  if (!fault.empty()) Invalid(what + fault);
  return a;
}

at::Tensor SavedMatrix(const c10::IValue& saved,
                       int64_t d,
                       c10::Device device) {
  const std::string what = "Invalid state_dict: its preconditioner";
  const bool is_one = saved.isGenericDict() && StateDict(saved).size() == 1 &&
                      StateDict(saved).contains("matrix");
  if (!is_one) Invalid(what + " is not a dict of a matrix alone");
  const c10::IValue value = StateDict(saved).at("matrix");
  CheckTensor("the preconditioner's matrix", value, {d, d}, at::kDouble);
  at::Tensor a = value.toTensor().detach().to(
      device, at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  const std::string fault = FaultOf(a);
  if (!fault.empty()) Invalid(what + "'s matrix has " + fault);
  return a;
}

at::Tensor MatrixOf(const at::Tensor& a,
                    const std::vector<at::Tensor>& all,
                    const std::vector<at::Tensor>& moving) {
  const int64_t size = SizeOf(all);
  const int64_t flying = SizeOf(moving);
  const bool is_elsewhere = std::ranges::any_of(
      moving, [&](const at::Tensor& p) { return p.device() != a.device(); });
  if (a.size(0) != size || size != flying || is_elsewhere) {
    throw std::runtime_error(
        "SBPS has a preconditioner that is a matrix " + Shape(a.sizes()) +
        ", and of its " + std::to_string(size) + " parameters " +
        std::to_string(flying) +
        " require gradients (must be all, of the matrix's size and on its "
        "device): call set_preconditioner_matrix() or set_preconditioner()");
  }
  std::unordered_map<const void*, at::Tensor> places;
  int64_t begin = 0;
  for (const at::Tensor& p : all) {
    places[p.unsafeGetTensorImpl()] =
        at::arange(begin, begin + p.numel(), a.options().dtype(at::kLong));
    begin += p.numel();
  }
  std::vector<at::Tensor> order;
  order.reserve(moving.size());
  for (const at::Tensor& p : moving) {
    order.push_back(places.at(p.unsafeGetTensorImpl()));
  }
  const at::Tensor index = at::cat(order);
  return a.index_select(0, index).index_select(1, index);
}

}  // namespace torch_sgmcmc

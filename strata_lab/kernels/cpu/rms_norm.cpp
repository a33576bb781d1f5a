// strata::rms_norm: float32 rows, one task per block of rows.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "norm.h"
#include "parallel.h"
#include "replay.h"

namespace strata {
namespace {

constexpr int64_t kTaskFloats = 16384;  // numbers in a task: a few microseconds, more than a thread costs to wake

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  CHECK_VALUE(x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat,
              "x and weight must be float32 on the CPU, not ", x.scalar_type(), " and ", weight.scalar_type());
  CHECK_VALUE(x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(-1), "weight ", weight.sizes(),
              " must be as long as the last dimension of x ", x.sizes());
  const at::Tensor in = contiguous(x), w = contiguous(weight);
  at::Tensor out = at::empty(x.sizes(), in.options());
  const int64_t width = x.size(-1), rows = width == 0 ? 0 : in.numel() / width;
  const int64_t rows_per_task = std::max<int64_t>(1, kTaskFloats / std::max<int64_t>(width, 1));
  const int64_t tasks = (rows + rows_per_task - 1) / rows_per_task;
  perform([=] {
    const float* from = in.const_data_ptr<float>();
    const float* scale = w.const_data_ptr<float>();
    float* to = out.mutable_data_ptr<float>();
    for_each_task(tasks, true, [&](int64_t task) {
      for (int64_t row = task * rows_per_task; row < std::min(rows, (task + 1) * rows_per_task); ++row) {
        const float* r = from + row * width;
        rms_norm_row(r, scale, static_cast<float>(eps), width, to + row * width);
      }
    });
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(STRATA_NAMESPACE, m) { m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor"); }

TORCH_LIBRARY_IMPL(STRATA_NAMESPACE, CPU, m) { m.impl("rms_norm", &rms_norm); }

}  // namespace
}  // namespace strata

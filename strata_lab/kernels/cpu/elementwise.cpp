// strata::rope, silu_mul, add and take_rows: the steps that the fused operators have inside, as operators of their own.
// They use the fused operators' arithmetic, so that fusing changes no bit of any result.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "parallel.h"
#include "replay.h"
#include "rotation.h"
#include "simd.h"

namespace strata {
namespace {

constexpr int64_t kTaskFloats = 16384;  // numbers in a task: a few microseconds, more than a thread costs to wake

void check_float(const at::Tensor& x, at::IntArrayRef sizes, const char* name) {
  CHECK_VALUE(x.scalar_type() == at::kFloat && x.sizes() == sizes, name, " must be float32 ", sizes, ", not ",
              x.scalar_type(), " ", x.sizes());
}

// Calls run(first, count) for runs of at most kTaskFloats of `total` numbers.
template <typename Run>
void for_each_run(int64_t total, const Run& run) {
  for_each_task((total + kTaskFloats - 1) / kTaskFloats, true, [&](int64_t task) {
    run(task * kTaskFloats, std::min(kTaskFloats, total - task * kTaskFloats));
  });
}

at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  CHECK_VALUE(x.dim() == 3 && x.size(2) % 2 == 0, "x must be [T, H, D] with D even, not ", x.sizes());
  const int64_t tokens = x.size(0), heads = x.size(1), dim = x.size(2);
  check_float(x, x.sizes(), "x");
  check_float(cos, {tokens, dim / 2}, "cos");
  check_float(sin, {tokens, dim / 2}, "sin");
  const at::Tensor in = contiguous(x), cosines = contiguous(cos), sines = contiguous(sin);
  at::Tensor out = at::empty(x.sizes(), in.options());
  perform([=] {
    const float *from = in.const_data_ptr<float>(), *c = cosines.const_data_ptr<float>(), *s = sines.const_data_ptr<float>();
    float* to = out.mutable_data_ptr<float>();
    for_each_task(tokens, tokens * heads * dim >= kTaskFloats, [&](int64_t t) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = (t * heads + h) * dim;
        rotate_row(from + at, c + t * dim / 2, s + t * dim / 2, dim, to + at);
      }
    });
  });
  return out;
}

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  check_float(gate, gate.sizes(), "gate");
  check_float(up, gate.sizes(), "up");
  const at::Tensor g = contiguous(gate), u = contiguous(up);
  at::Tensor out = at::empty(gate.sizes(), g.options());
  perform([=] {
    const float *a = g.const_data_ptr<float>(), *b = u.const_data_ptr<float>();
    float* to = out.mutable_data_ptr<float>();
    for_each_run(g.numel(), [&](int64_t first, int64_t count) {
      for (int64_t i = first; i < first + count; i += 8) {
        const int64_t left = first + count - i;
        store_lanes(to + i, _mm256_mul_ps(silu8(load_lanes(a + i, left)), load_lanes(b + i, left)), left);
      }
    });
  });
  return out;
}

at::Tensor add(const at::Tensor& x, const at::Tensor& y) {
  check_float(x, x.sizes(), "x");
  check_float(y, x.sizes(), "y");
  const at::Tensor left = contiguous(x), right = contiguous(y);
  at::Tensor out = at::empty(x.sizes(), left.options());
  perform([=] {
    const float *a = left.const_data_ptr<float>(), *b = right.const_data_ptr<float>();
    float* to = out.mutable_data_ptr<float>();
    for_each_run(left.numel(), [&](int64_t first, int64_t count) {
      for (int64_t i = first; i < first + count; ++i) to[i] = a[i] + b[i];
    });
  });
  return out;
}

at::Tensor take_rows(const at::Tensor& table, const at::Tensor& ids) {
  CHECK_VALUE(table.dim() == 2 && table.scalar_type() == at::kFloat, "table must be float32 [R, C], not ",
              table.scalar_type(), " ", table.sizes());
  CHECK_VALUE(ids.dim() == 1 && ids.scalar_type() == at::kLong, "ids must be int64 [T], not ", ids.scalar_type(),
              " ", ids.sizes());
  const at::Tensor from = contiguous(table), rows = contiguous(ids);
  at::Tensor out = at::empty({ids.size(0), table.size(1)}, from.options());
  perform([=] {
    const int64_t* id = rows.const_data_ptr<int64_t>();
    const int64_t width = from.size(1);
    for (int64_t t = 0; t < rows.numel(); ++t) {
      CHECK_INDEX(id[t] >= 0 && id[t] < from.size(0), "id ", id[t], " is not a row of a table of ", from.size(0),
                  " rows");
      std::copy_n(from.const_data_ptr<float>() + id[t] * width, width, out.mutable_data_ptr<float>() + t * width);
    }
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(STRATA_NAMESPACE, m) {
  m.def("rope(Tensor x, Tensor cos, Tensor sin) -> Tensor");
  m.def("silu_mul(Tensor gate, Tensor up) -> Tensor");
  m.def("add(Tensor x, Tensor y) -> Tensor");
  m.def("take_rows(Tensor table, Tensor ids) -> Tensor");
}

TORCH_LIBRARY_IMPL(STRATA_NAMESPACE, CPU, m) {
  m.impl("rope", &rope);
  m.impl("silu_mul", &silu_mul);
  m.impl("add", &add);
  m.impl("take_rows", &take_rows);
}

}  // namespace
}  // namespace strata

// strata::linear: y = epilogue(prologue(x) @ w.T) with packed weights. The prologue (RMSNorm, quantization) runs once
// per row; then one parallel region takes blocks of panels, and finishes each block (bias, SiLU gate, residual) while
// it is in the cache.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <memory>

#include "dot_float.h"
#include "dot_int.h"
#include "norm.h"
#include "parallel.h"
#include "replay.h"
#include "weights.h"

namespace strata {
namespace {

constexpr int64_t kTaskPanels = 4;  // panels a task takes at most, of each half when gated
constexpr int64_t kTasksPerThread = 4;  // with fewer, the last one to finish is waited for too long
constexpr int64_t kSharedBytes = 32768;  // a product that reads fewer bytes of weights, times rows, stays on its thread
constexpr int64_t kTaskRows = 128;  // rows of x a task finishes at a time: bounds its scratch to 32 KB
constexpr int64_t kSharedRowFloats = 8192;  // a prologue of fewer numbers is not worth a second thread

// Memory that grows and is used again by the next call of the same thread.
template <int kUse>
char* scratch(int64_t bytes) {
  static thread_local std::unique_ptr<char[]> memory;
  static thread_local int64_t size = 0;
  if (bytes > size) {
    memory = std::make_unique_for_overwrite<char[]>(bytes + 64);
    size = bytes;
  }
  return memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
}

struct Epilogue {
  int64_t n;  // columns of the output
  bool silu_mul;
  const float* bias;
  const float* row_scale;  // per output row of w, times row_unit
  float row_unit;
  const float* residual;
  float* out;
};

struct Rows {  // x after the prologue, one of the two
  const float* values;
  IntRows codes;
  int64_t stride, count;
};

Rows prologue(const at::Tensor& x, const Weights& w, const float* norm_weight, float eps) {
  const int64_t rows = x.size(0), k = x.size(1);
  const bool quantize = w.is_int(), copy = !quantize && (norm_weight || w.columns != k);
  Rows result{x.const_data_ptr<float>(), {}, k, rows};
  const int64_t groups = w.groups();
  const int64_t bytes = quantize ? rows * groups * (kGroup + 8) : copy ? rows * w.columns * 4 : 0;
  char* memory = scratch<0>(bytes);
  if (quantize) {
    float* scale = reinterpret_cast<float*>(memory + rows * groups * kGroup);
    result.codes = {reinterpret_cast<int8_t*>(memory), scale, scale + rows * groups, groups};
  } else if (copy) {
    result.values = reinterpret_cast<float*>(memory);
    result.stride = w.columns;
  } else {
    return result;
  }
  const float* source = x.const_data_ptr<float>();
  constexpr int64_t kRows = 2;
  for_each_task((rows + kRows - 1) / kRows, rows * k >= kSharedRowFloats, [&](int64_t task) {
    for (int64_t t = task * kRows; t < std::min(rows, (task + 1) * kRows); ++t) {
      const float* row = source + t * k;
      if (copy) {
        float* out = reinterpret_cast<float*>(memory) + t * w.columns;
        norm_weight ? rms_norm_row(row, norm_weight, eps, k, out) : static_cast<void>(std::copy_n(row, k, out));
        std::fill(out + k, out + w.columns, 0.0f);
        continue;
      }
      if (norm_weight) {
        float* normed = reinterpret_cast<float*>(scratch<1>(k * 4));
        rms_norm_row(row, norm_weight, eps, k, normed);
        row = normed;
      }
      quantize_row(row, k, t, w.format == Format::kInt4, result.codes);
    }
  });
  return result;
}

template <typename Columns>
void float_block(const Weights& w, const uint8_t* data, int64_t panels, const float* x, int64_t x_stride, int64_t count,
                 bool large, float* y, int64_t y_stride) {
  const int64_t steps = w.columns / Columns::kColumns;
  const auto run = large ? float_large<Columns> : float_small<Columns>;
  run(data, w.panel_bytes, panels, x, x_stride, count, steps, y, y_stride);
}

// As float_block for weights with a scale per row and 128 columns: each block's sums are scaled, then added up.
void scaled_blocks(const Weights& w, int64_t panel, int64_t panels, const float* x, int64_t x_stride, int64_t count,
                   bool large, float* y, int64_t y_stride) {
  constexpr int64_t kWidth = kTaskPanels * kPanelRows, kSteps = kFp8Block / Fp8Columns::kColumns;
  alignas(64) static thread_local float part[kTaskRows * kWidth];
  const auto run = large ? float_large<Fp8Columns> : float_small<Fp8Columns>;
  const int64_t steps = w.columns / Fp8Columns::kColumns;
  for (int64_t t = 0; t < count; ++t) std::fill_n(y + t * y_stride, panels * kPanelRows, 0.0f);
  for (int64_t b = 0; b < w.blocks(); ++b) {
    const uint8_t* data = w.data + panel * w.panel_bytes + b * kSteps * Fp8Columns::kStepBytes;
    run(data, w.panel_bytes, panels, x + b * kFp8Block, x_stride, count, std::min(kSteps, steps - b * kSteps), part,
        kWidth);
    for (int64_t p = 0; p < panels; ++p) {
      const float* scales = w.block_scales + ((panel + p) * w.blocks() + b) * kPanelRows;
      const __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(scales), _mm256_set1_ps(kFp8Bias));
      for (int64_t t = 0; t < count; ++t) {
        float* sum = y + t * y_stride + p * kPanelRows;
        const __m256 more = _mm256_load_ps(part + t * kWidth + p * kPanelRows);
        _mm256_storeu_ps(sum, _mm256_fmadd_ps(scale, more, _mm256_loadu_ps(sum)));
      }
    }
  }
}

// y [count, y_stride] = rows first.. of x times `panels` panels from `panel` on, nothing applied yet.
void block(const Weights& w, int64_t panel, int64_t panels, const Rows& x, int64_t first, int64_t count, float* y,
           int64_t y_stride) {
  const uint8_t* data = w.data + panel * w.panel_bytes;
  if (!w.is_int()) {
    const bool large = x.count >= kFloatTileFrom;
    const float* rows = x.values + first * x.stride;
    if (w.block_scales) return scaled_blocks(w, panel, panels, rows, x.stride, count, large, y, y_stride);
    const auto run = w.format == Format::kFp32   ? float_block<Fp32Columns>
                     : w.format == Format::kBf16 ? float_block<Bf16Columns>
                                                 : float_block<Fp8Columns>;
    return run(w, data, panels, rows, x.stride, count, large, y, y_stride);
  }
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t part = (panel + p) * w.groups() * kPanelRows;
    const IntPanel source{data + p * w.panel_bytes, w.scales ? w.scales + part : nullptr, w.mins + part};
    const auto run = w.format == Format::kInt4 ? int_panel_rows<true> : int_panel_rows<false>;
    run(source, x.codes, first, count, y + p * kPanelRows, y_stride);
  }
}

// Eight outputs of w's rows row.. for one row of x: scale and bias.
inline __m256 finish(const Epilogue& e, const float* y, int64_t row, int64_t lanes) {
  __m256 v = _mm256_loadu_ps(y);
  if (e.row_scale) v = _mm256_mul_ps(v, _mm256_mul_ps(_mm256_loadu_ps(e.row_scale + row), _mm256_set1_ps(e.row_unit)));
  return e.bias ? _mm256_add_ps(v, load_lanes(e.bias + row, lanes)) : v;
}

// Output panels first_panel .. first_panel + panels - 1, all rows.
void task(const Weights& w, const Epilogue& e, const Rows& x, int64_t first_panel, int64_t panels) {
  constexpr int64_t kWidth = kTaskPanels * kPanelRows;
  alignas(64) static thread_local float y[kTaskRows * kWidth * 2];
  const int64_t up = e.silu_mul ? e.n / kPanelRows : 0;  // panels between a gate and its up
  const int64_t stride = e.silu_mul ? 2 * kWidth : kWidth;
  for (int64_t first = 0; first < x.count; first += kTaskRows) {
    const int64_t count = std::min(kTaskRows, x.count - first);
    block(w, first_panel, panels, x, first, count, y, stride);
    if (e.silu_mul) block(w, first_panel + up, panels, x, first, count, y + kWidth, stride);
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t row = (first_panel + p) * kPanelRows, at = (first + t) * e.n + row, lanes = e.n - row;
        const float* source = y + t * stride + p * kPanelRows;
        __m256 v = finish(e, source, row, lanes);
        if (e.silu_mul) v = _mm256_mul_ps(silu8(v), finish(e, source + kWidth, e.n + row, kPanelRows));
        if (e.residual) v = _mm256_add_ps(v, load_lanes(e.residual + at, lanes));
        store_lanes(e.out + at, v, lanes);
      }
    }
  }
}

const float* floats(const std::optional<at::Tensor>& tensor, int64_t numel, const char* name) {
  if (!tensor) return nullptr;
  CHECK_VALUE(tensor->scalar_type() == at::kFloat && tensor->is_contiguous() && tensor->numel() == numel, name,
              " must be contiguous float32 with ", numel, " elements, not ", tensor->scalar_type(), " ",
              tensor->sizes());
  return tensor->const_data_ptr<float>();
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& data, const std::optional<at::Tensor>& scales,
                  const std::optional<at::Tensor>& mins, int64_t n, const std::optional<at::Tensor>& bias,
                  const std::optional<at::Tensor>& norm_weight, double norm_eps,
                  const std::optional<at::Tensor>& residual, bool silu_mul) {
  CHECK_VALUE(x.dim() == 2 && x.scalar_type() == at::kFloat, "x must be float32 [T, K], not ", x.scalar_type(),
              " ", x.sizes());
  CHECK_VALUE(!silu_mul || n % (2 * kPanelRows) == 0, "silu_mul needs N divisible by 16, not ", n);
  const at::Tensor rows = contiguous(x);
  const Weights w = as_weights(data, scales, mins, n, x.size(1));
  const int64_t out_n = silu_mul ? n / 2 : n;
  at::Tensor out = at::empty({x.size(0), out_n}, x.options());
  if (out.numel() == 0) return out;
  const Epilogue epilogue{out_n,
                          silu_mul,
                          floats(bias, n, "bias"),
                          w.row_scales,
                          w.format == Format::kFp8 ? kFp8Bias : 1.0f,
                          floats(residual, out.numel(), "residual"),
                          out.mutable_data_ptr<float>()};
  const float* norm = floats(norm_weight, x.size(1), "norm_weight");
  const int64_t out_panels = (out_n + kPanelRows - 1) / kPanelRows;
  const bool worth_sharing = w.panels * w.panel_bytes * x.size(0) >= kSharedBytes;
  const std::array<std::optional<at::Tensor>, 7> owned{data, scales, mins, bias, norm_weight, residual, out};
  // `owned` holds the memory that w, epilogue and norm point into; it is named since `[=]` keeps only what is used.
  perform([=, owned = owned] {
    const Rows ready = prologue(rows, w, norm, static_cast<float>(norm_eps));
    const int64_t size = std::clamp<int64_t>(out_panels / (kTasksPerThread * at::get_num_threads()), 1, kTaskPanels);
    for_each_task((out_panels + size - 1) / size, worth_sharing, [&](int64_t i) {
      task(w, epilogue, ready, i * size, std::min(size, out_panels - i * size));
    });
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(STRATA_NAMESPACE, m) {
  m.def(
      "linear(Tensor x, Tensor data, Tensor? scales, Tensor? mins, int n, Tensor? bias, Tensor? norm_weight, "
      "float norm_eps, Tensor? residual, bool silu_mul) -> Tensor");
}

TORCH_LIBRARY_IMPL(STRATA_NAMESPACE, CPU, m) { m.impl("linear", &linear); }

}  // namespace
}  // namespace strata

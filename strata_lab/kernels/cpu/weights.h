// The packed tensors of a LinearWeight as the kernels see them. The data's dtype names the format, as packing.py lays
// it out: float32, bfloat16, float8_e4m3fn, int8 (+ scales), uint8 (int4 + scales + mins). float8 and int8 come in two
// variants each, told apart by their scales: one per row, or one per row and group of columns.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "refuse.h"
#include "simd.h"

namespace strata {

enum class Format { kFp32, kBf16, kFp8, kInt8, kInt4 };

constexpr int64_t kFp8Block = 128;

struct Weights {
  Format format;
  int64_t panels, columns;  // columns: K as stored, padded
  int64_t panel_bytes;
  const uint8_t* data;
  const uint16_t* scales;     // half [panels, groups, 8]: int4, and int8 in groups
  const float* row_scales;    // float [panels, 1, 8]: fp8 and int8 by rows
  const float* block_scales;  // float [panels, blocks, 8]: fp8 in blocks of kFp8Block columns
  const uint16_t* mins;       // half [panels, groups, 8], int4 only

  bool is_int() const { return format == Format::kInt8 || format == Format::kInt4; }
  int64_t groups() const { return columns / kGroup; }
  int64_t blocks() const { return (columns + kFp8Block - 1) / kFp8Block; }
};

inline Format format_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return Format::kFp32;
    case at::kBFloat16: return Format::kBf16;
    case at::kFloat8_e4m3fn: return Format::kFp8;
    case at::kChar: return Format::kInt8;
    case at::kByte: return Format::kInt4;
    default: CHECK_VALUE(false, "packed weights of dtype ", dtype, " are unknown; use packing.pack");
  }
}

inline Weights as_weights(const at::Tensor& data, const std::optional<at::Tensor>& scales,
                          const std::optional<at::Tensor>& mins, int64_t n, int64_t k) {
  const Format format = format_of(data.scalar_type());
  const int64_t step = format == Format::kFp32 ? 1 : format == Format::kBf16 ? 2 : format == Format::kFp8 ? 4 : kGroup;
  const int64_t panels = data.size(0), columns = (k + step - 1) / step * step;
  CHECK_VALUE(data.is_contiguous() && data.size(1) * step == columns && (n + 7) / 8 == panels,
              "packed data of shape ", data.sizes(), " does not hold [", n, ", ", k, "]");
  const auto part = [&](const std::optional<at::Tensor>& tensor, at::ScalarType dtype, int64_t groups) -> const void* {
    CHECK_VALUE(tensor && tensor->scalar_type() == dtype && tensor->is_contiguous() &&
                    tensor->numel() == panels * groups * kPanelRows,
                "packed scales or mins are missing or do not match the data of shape ", data.sizes());
    return tensor->const_data_ptr();
  };
  Weights w{format, panels, columns, 0, static_cast<const uint8_t*>(data.const_data_ptr())};
  w.panel_bytes = data.numel() / panels * data.element_size();
  const auto halves = [&](const auto& tensor) {
    return static_cast<const uint16_t*>(part(tensor, at::kHalf, w.groups()));
  };
  const auto floats = [&](int64_t groups) { return static_cast<const float*>(part(scales, at::kFloat, groups)); };
  if (format == Format::kInt4) {
    w.scales = halves(scales);
    w.mins = halves(mins);
  } else if (format == Format::kInt8) {
    if (scales && scales->scalar_type() == at::kFloat) {
      w.row_scales = floats(1);
    } else {
      w.scales = halves(scales);
    }
  } else if (format == Format::kFp8) {
    if (scales && scales->numel() == panels * kPanelRows) {
      w.row_scales = floats(1);
    } else {
      w.block_scales = floats(w.blocks());
    }
  }
  return w;
}

}  // namespace strata

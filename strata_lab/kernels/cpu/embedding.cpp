// strata::embedding: rows of a packed weight as float32. The same packed head serves lookup and logits when tied.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "parallel.h"
#include "replay.h"
#include "weights.h"

namespace strata {
namespace {

constexpr int64_t kSharedFloats = 65536;  // fewer numbers are not worth a second thread

float half_to_float(uint16_t bits) { return _cvtsh_ss(bits); }

float fp8_to_float(uint8_t code) {
  const auto bits = static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7);
  return half_to_float(bits) * kFp8Bias;
}

float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Element (lane, column) of a panel in storage order of packing.py.
float element(const Weights& w, int64_t panel, int64_t lane, int64_t c) {
  const uint8_t* data = w.data + panel * w.panel_bytes;
  const int64_t part = (panel * w.groups() + c / kGroup) * kPanelRows + lane;
  const int64_t in_group = c % kGroup;
  switch (w.format) {
    case Format::kFp32: return reinterpret_cast<const float*>(data)[c * kPanelRows + lane];
    case Format::kBf16:
      return bf16_to_float(reinterpret_cast<const uint16_t*>(data)[c / 2 * 2 * kPanelRows + lane * 2 + c % 2]);
    case Format::kFp8:
      return fp8_to_float(data[c * kPanelRows + lane]) *
             (w.row_scales ? w.row_scales[panel * kPanelRows + lane]
                           : w.block_scales[(panel * w.blocks() + c / kFp8Block) * kPanelRows + lane]);
    case Format::kInt8: {
      const int code = data[(c / 4 * kPanelRows + lane) * 4 + c % 4] - 128;
      const float scale = w.row_scales ? w.row_scales[panel * kPanelRows + lane] : half_to_float(w.scales[part]);
      return static_cast<float>(code) * scale;
    }
    case Format::kInt4: {
      const int64_t column = in_group % 16;  // the upper 16 columns of a group are in the high nibbles
      const uint8_t byte = data[c / kGroup * 128 + (column / 4 * kPanelRows + lane) * 4 + column % 4];
      const int code = in_group < 16 ? byte & 15 : byte >> 4;
      const float scaled = static_cast<float>(code) * half_to_float(w.scales[part]);
      return scaled + half_to_float(w.mins[part]);
    }
  }
  return 0.0f;
}

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& data, const std::optional<at::Tensor>& scales,
                     const std::optional<at::Tensor>& mins, int64_t n, int64_t k) {
  CHECK_VALUE(ids.dim() == 1 && ids.scalar_type() == at::kLong, "ids must be int64 [T], not ", ids.scalar_type(),
              " ", ids.sizes());
  const Weights w = as_weights(data, scales, mins, n, k);
  const at::Tensor rows = contiguous(ids);
  const int64_t count = rows.numel();
  at::Tensor out = at::empty({count, k}, data.options().dtype(at::kFloat));
  // w points into data, scales and mins; they are named since `[=]` keeps only what is used.
  perform([=, data = data, scales = scales, mins = mins] {
    const int64_t* id = rows.const_data_ptr<int64_t>();
    for (int64_t t = 0; t < count; ++t) {
      CHECK_INDEX(id[t] >= 0 && id[t] < n, "id ", id[t], " is not a row of a table of ", n, " rows");
    }
    float* y = out.mutable_data_ptr<float>();
    for_each_task(count, count * k >= kSharedFloats, [&](int64_t t) {
      const int64_t panel = id[t] / kPanelRows, lane = id[t] % kPanelRows;
      for (int64_t c = 0; c < k; ++c) y[t * k + c] = element(w, panel, lane, c);
    });
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(STRATA_NAMESPACE, m) {
  m.def("embedding(Tensor ids, Tensor data, Tensor? scales, Tensor? mins, int n, int k) -> Tensor");
}

TORCH_LIBRARY_IMPL(STRATA_NAMESPACE, CPU, m) { m.impl("embedding", &embedding); }

}  // namespace
}  // namespace strata

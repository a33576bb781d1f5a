// Panels of fp32, bf16 or fp8 weights times fp32 rows. Every output is one chain of fused multiply-adds over the
// columns in their order, in the small-T kernel as in the tiled one: bitwise the same whatever T, build or batch.
#pragma once

#include <algorithm>

#include "simd.h"

namespace strata {

// How one format stores columns, in steps of kColumns: `expand` gives kColumns registers of 8 rows.
struct Fp32Columns {
  static constexpr int kColumns = 1, kStepBytes = 32;
  static inline void expand(const uint8_t* w, __m256* out) {
    out[0] = _mm256_loadu_ps(reinterpret_cast<const float*>(w));
  }
};

struct Bf16Columns {  // [K / 2, 8 rows, 2 columns]: the first column in the low half of each lane
  static constexpr int kColumns = 2, kStepBytes = 32;
  static inline void expand(const uint8_t* w, __m256* out) {
    const __m256i pairs = load256(w);
    out[0] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    out[1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000))));
  }
};

struct Fp8Columns {  // [K / 4, 4 columns, 8 rows]
  static constexpr int kColumns = 4, kStepBytes = 32;
  static inline void expand(const uint8_t* w, __m256* out) { fp8_columns(load256(w), out); }
};

// y[t * y_stride + 8 * p + lane] of P panels, `panel_bytes` apart, for T rows of x of `steps` steps each.
template <typename Format, int T, int P>
void float_panels(const uint8_t* w, int64_t panel_bytes, const float* x, int64_t x_stride, int64_t steps, float* y,
                  int64_t y_stride) {
  constexpr int kColumns = Format::kColumns;
  __m256 acc[T][P];
  for (int t = 0; t < T; ++t) {
    for (int p = 0; p < P; ++p) acc[t][p] = _mm256_setzero_ps();
  }
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const int64_t offset = p * panel_bytes + step * Format::kStepBytes;
      if (step % 2 == 0) prefetch(w, offset + kFloatAheadBytes);  // a step is half a cache line
      __m256 columns[kColumns];
      Format::expand(w + offset, columns);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          const __m256 x1 = _mm256_broadcast_ss(x + t * x_stride + step * kColumns + c);
          acc[t][p] = _mm256_fmadd_ps(columns[c], x1, acc[t][p]);
        }
      }
    }
  }
  for (int t = 0; t < T; ++t) {
    for (int p = 0; p < P; ++p) _mm256_storeu_ps(y + t * y_stride + 8 * p, acc[t][p]);
  }
}

// Small T: `panels` panels times `count` rows. Few rows take several panels at a time to keep enough chains in flight.
template <typename Format>
void float_small(const uint8_t* w, int64_t panel_bytes, int64_t panels, const float* x, int64_t x_stride, int64_t count,
                 int64_t steps, float* y, int64_t y_stride) {
  using Kernel = void (*)(const uint8_t*, int64_t, const float*, int64_t, int64_t, float*, int64_t);
  static constexpr int widths[8] = {4, 4, 2, 2, 1, 1, 1, 1};
  static constexpr Kernel wide[4] = {
      float_panels<Format, 1, 4>, float_panels<Format, 2, 4>, float_panels<Format, 3, 2>, float_panels<Format, 4, 2>,
  };
  static constexpr Kernel single[8] = {
      float_panels<Format, 1, 1>, float_panels<Format, 2, 1>, float_panels<Format, 3, 1>, float_panels<Format, 4, 1>,
      float_panels<Format, 5, 1>, float_panels<Format, 6, 1>, float_panels<Format, 7, 1>, float_panels<Format, 8, 1>,
  };
  for (int64_t t = 0; t < count; t += 8) {
    const int64_t block = std::min<int64_t>(count - t, 8);
    const float* rows = x + t * x_stride;
    int64_t p = 0;
    if (const int width = widths[block - 1]; width > 1) {
      for (; p + width <= panels; p += width) {
        wide[block - 1](w + p * panel_bytes, panel_bytes, rows, x_stride, steps, y + t * y_stride + 8 * p, y_stride);
      }
    }
    for (; p < panels; ++p) {
      single[block - 1](w + p * panel_bytes, panel_bytes, rows, x_stride, steps, y + t * y_stride + 8 * p, y_stride);
    }
  }
}

// Large T: a strip of panels is expanded to fp32 once for all rows, kDepth columns at a time (so that the strip stays
// in the first-level cache), and multiplied in register tiles of kTileRows rows.
#ifdef __AVX512F__
using Vec = __m512;
constexpr int kTileRows = 12, kStripPanels = 4, kVecFloats = 16;
constexpr int64_t kFloatTileFrom = 9;  // rows from which float_large is faster, measured
inline Vec vec_load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec vec_one(const float* p) { return _mm512_set1_ps(*p); }
inline Vec vec_fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline void vec_store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
#else
using Vec = __m256;
constexpr int kTileRows = 6, kStripPanels = 2, kVecFloats = 8;
constexpr int64_t kFloatTileFrom = 24;
inline Vec vec_load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec vec_one(const float* p) { return _mm256_broadcast_ss(p); }
inline Vec vec_fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline void vec_store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
#endif
constexpr int kStrip = kStripPanels * kPanelRows;  // floats: two registers
constexpr int64_t kDepth = 256;

// y += x * strip for M rows, over `depth` columns.
template <int M>
void tile(const float* x, int64_t x_stride, const float* strip, int64_t depth, float* y, int64_t y_stride) {
  Vec acc[M][2];
  for (int m = 0; m < M; ++m) {
    acc[m][0] = vec_load(y + m * y_stride);
    acc[m][1] = vec_load(y + m * y_stride + kVecFloats);
  }
  for (int64_t k = 0; k < depth; ++k) {
    const Vec a = vec_load(strip + k * kStrip), b = vec_load(strip + k * kStrip + kVecFloats);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Vec x1 = vec_one(x + m * x_stride + k);
      acc[m][0] = vec_fma(a, x1, acc[m][0]);
      acc[m][1] = vec_fma(b, x1, acc[m][1]);
    }
  }
  for (int m = 0; m < M; ++m) {
    vec_store(y + m * y_stride, acc[m][0]);
    vec_store(y + m * y_stride + kVecFloats, acc[m][1]);
  }
}

template <int M>
void tile_rest(int64_t rows, const float* x, int64_t x_stride, const float* strip, int64_t depth, float* y,
               int64_t y_stride) {
  if constexpr (M > 0) {
    if (rows == M) return tile<M>(x, x_stride, strip, depth, y, y_stride);
    tile_rest<M - 1>(rows, x, x_stride, strip, depth, y, y_stride);
  }
}

// `steps` steps of one panel as fp32, its columns kStrip apart.
template <typename Format>
void expand_panel(const uint8_t* w, int64_t steps, float* out) {
  for (int64_t step = 0; step < steps; ++step) {
    if (step % 2 == 0) prefetch(w, step * Format::kStepBytes + kFloatAheadBytes);
    __m256 columns[Format::kColumns];
    Format::expand(w + step * Format::kStepBytes, columns);
    for (int c = 0; c < Format::kColumns; ++c) {
      _mm256_store_ps(out + (step * Format::kColumns + c) * kStrip, columns[c]);
    }
  }
}

// As float_small, with y of at least ceil(panels / kStripPanels) * kStrip floats a row.
template <typename Format>
void float_large(const uint8_t* w, int64_t panel_bytes, int64_t panels, const float* x, int64_t x_stride, int64_t count,
                 int64_t steps, float* y, int64_t y_stride) {
  alignas(64) static thread_local float strip[kDepth * kStrip];
  constexpr int kColumns = Format::kColumns;
  constexpr int64_t kBlock = kDepth / kColumns;
  const int64_t width = (panels + kStripPanels - 1) / kStripPanels * kStrip;
  for (int64_t t = 0; t < count; ++t) std::fill_n(y + t * y_stride, width, 0.0f);
  for (int64_t first = 0; first < steps; first += kBlock) {
    const int64_t block = std::min(steps - first, kBlock), depth = block * kColumns;
    for (int64_t p = 0; p < panels; p += kStripPanels) {
      for (int64_t lane = 0; lane < kStripPanels; ++lane) {  // past the last panel: any numbers, they are not used
        const int64_t panel = std::min(p + lane, panels - 1);
        expand_panel<Format>(w + panel * panel_bytes + first * Format::kStepBytes, block, strip + lane * kPanelRows);
      }
      const float* x_block = x + first * kColumns;
      float* y_strip = y + p * kPanelRows;
      int64_t t = 0;
      for (; t + kTileRows <= count; t += kTileRows) {
        tile<kTileRows>(x_block + t * x_stride, x_stride, strip, depth, y_strip + t * y_stride, y_stride);
      }
      const float* x_rest = x_block + t * x_stride;
      tile_rest<kTileRows - 1>(count - t, x_rest, x_stride, strip, depth, y_strip + t * y_stride, y_stride);
    }
  }
}

}  // namespace strata

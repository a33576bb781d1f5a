// One panel of int4 or int8 weights times up to eight quantized rows. The products of a group are exact integers, the
// groups add up in fp32 in their order, so a row's result is the same whatever T, the build or the batch.
//
// A register holds 4 consecutive columns of 8 output rows, so every product lands in its own row's lane: no horizontal
// sums, and weights are unpacked once for all T rows of x.
#pragma once

#include "activations.h"

namespace strata {

struct IntPanel {
  const uint8_t* data;     // int4: [groups, 4, 8, 4], int8 + 128: [groups, 8, 8, 4]
  const uint16_t* scales;  // [groups, 8] half; null: 1 everywhere
  const uint16_t* mins;    // [groups, 8] half, int4 only
};

constexpr int64_t kInt4GroupBytes = kGroup * kPanelRows / 2;
constexpr int64_t kInt8GroupBytes = kGroup * kPanelRows;

#ifdef STRATA_VNNI
constexpr bool kVnni = true;
#else
constexpr bool kVnni = false;
inline __m256i dot4(__m256i, __m256i, __m256i);  // not there, never called
#endif
// With few rows the latency of a chain of VNNI dot products shows. Measured on int4 with one row: with 16-bit sums it
// reads weights 1.25 times as fast.
constexpr int kVnniInt4From = 3;  // rows
constexpr int kOneChainFrom = 5;  // rows

// Sums of the 8 rows of one group. `x` points at the group's codes of the first row, rows are `stride` apart.
template <int T>
inline void int4_group(const uint8_t* w, const int8_t* x, int64_t stride, __m256i sums[T]) {
  constexpr bool kUseVnni = kVnni && T >= kVnniInt4From;
  constexpr bool kTwoChains = kUseVnni && T < kOneChainFrom;
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256i more[T];
  for (int t = 0; t < T; ++t) sums[t] = more[t] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int step = 0; step < 4; ++step) {
    const __m256i packed = load256(w + 32 * step);
    const __m256i low = _mm256_and_si256(packed, nibble);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m256i x_low = broadcast4(x + t * stride + 4 * step);
      const __m256i x_high = broadcast4(x + t * stride + 16 + 4 * step);
      if constexpr (kUseVnni) {
        __m256i& high_sums = kTwoChains ? more[t] : sums[t];
        sums[t] = dot4(sums[t], low, x_low);
        high_sums = dot4(high_sums, high, x_high);
      } else {
        // 16-bit lanes hold at most 16 products of 15 * 128 = 30,720: no saturation, no overflow
        sums[t] = _mm256_add_epi16(sums[t], _mm256_maddubs_epi16(low, x_low));
        sums[t] = _mm256_add_epi16(sums[t], _mm256_maddubs_epi16(high, x_high));
      }
    }
  }
  for (int t = 0; t < T; ++t) {
    if constexpr (kTwoChains) sums[t] = _mm256_add_epi32(sums[t], more[t]);
    if constexpr (!kUseVnni) sums[t] = _mm256_madd_epi16(sums[t], _mm256_set1_epi16(1));
  }
}

// As above for codes stored as unsigned, 128 too high; `correction` takes the excess off. A product of two 8-bit
// numbers leaves no headroom in 16 bits, so without VNNI the codes are taken apart into nibbles, added up as int4 is.
template <int T>
inline void int8_group(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t* correction, int64_t groups,
                       __m256i sums[T]) {
  constexpr bool kTwoChains = kVnni && T < kOneChainFrom;
  const __m256i nibble = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
  __m256i more[T];
  for (int t = 0; t < T; ++t) sums[t] = more[t] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int step = 0; step < 8; ++step) {
    const __m256i codes = load256(w + 32 * step);
    const __m256i low = _mm256_and_si256(codes, nibble);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m256i x4 = broadcast4(x + t * stride + 4 * step);
      if constexpr (kVnni) {
        __m256i& chain = kTwoChains && step % 2 ? more[t] : sums[t];
        chain = dot4(chain, codes, x4);
      } else {
        sums[t] = _mm256_add_epi16(sums[t], _mm256_maddubs_epi16(low, x4));
        more[t] = _mm256_add_epi16(more[t], _mm256_maddubs_epi16(high, x4));
      }
    }
  }
  for (int t = 0; t < T; ++t) {
    const __m256i excess = _mm256_set1_epi32(correction[t * groups]);
    if constexpr (!kVnni) {
      more[t] = _mm256_slli_epi32(_mm256_madd_epi16(more[t], one), 4);
      sums[t] = _mm256_madd_epi16(sums[t], one);
    }
    if constexpr (!kVnni || kTwoChains) sums[t] = _mm256_add_epi32(sums[t], more[t]);
    sums[t] = _mm256_add_epi32(sums[t], excess);
  }
}

template <bool kInt4>
inline void prefetch_group(const IntPanel& panel, int64_t g) {
  constexpr int64_t kBytes = kInt4 ? kInt4GroupBytes : kInt8GroupBytes, kScaleBytes = 2 * kPanelRows;
  const int64_t ahead = g + kIntAheadBytes / kBytes;
  for (int64_t line = 0; line < kBytes; line += 64) prefetch(panel.data, ahead * kBytes + line);
  if (g % (64 / kScaleBytes) == 0) {
    if (panel.scales) prefetch(panel.scales, ahead * kScaleBytes);
    if constexpr (kInt4) prefetch(panel.mins, ahead * kScaleBytes);
  }
}

// y[t * y_stride + lane] for rows first .. first + T - 1.
template <bool kInt4, int T>
void int_panel(const IntPanel& panel, const IntRows& rows, int64_t first, float* y, int64_t y_stride) {
  const int64_t groups = rows.groups, stride = groups * kGroup;
  const int8_t* x = rows.codes + first * stride;
  const float* x_scale = rows.scale + first * groups;
  const float* x_sum = static_cast<const float*>(rows.correction) + first * groups;
  const int32_t* x_excess = static_cast<const int32_t*>(rows.correction) + first * groups;
  __m256 acc[T];
  for (int t = 0; t < T; ++t) acc[t] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    __m256i sums[T];
    prefetch_group<kInt4>(panel, g);
    if constexpr (kInt4) {
      int4_group<T>(panel.data + g * kInt4GroupBytes, x + g * kGroup, stride, sums);
    } else {
      int8_group<T>(panel.data + g * kInt8GroupBytes, x + g * kGroup, stride, x_excess + g, groups, sums);
    }
    const __m256 scale = panel.scales ? load_half8(panel.scales + g * kPanelRows) : _mm256_set1_ps(1.0f);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m256 both = _mm256_mul_ps(scale, _mm256_broadcast_ss(x_scale + t * groups + g));
      acc[t] = _mm256_fmadd_ps(both, _mm256_cvtepi32_ps(sums[t]), acc[t]);
    }
    if constexpr (kInt4) {
      const __m256 min = load_half8(panel.mins + g * kPanelRows);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) acc[t] = _mm256_fmadd_ps(min, _mm256_broadcast_ss(x_sum + t * groups + g), acc[t]);
    }
  }
  for (int t = 0; t < T; ++t) _mm256_storeu_ps(y + t * y_stride, acc[t]);
}

constexpr int64_t kIntBlock = 8;

// All rows first .. first + count - 1, in blocks of at most kIntBlock.
template <bool kInt4>
void int_panel_rows(const IntPanel& panel, const IntRows& rows, int64_t first, int64_t count, float* y,
                    int64_t y_stride) {
  using Kernel = void (*)(const IntPanel&, const IntRows&, int64_t, float*, int64_t);
  static constexpr Kernel kernels[kIntBlock] = {
      int_panel<kInt4, 1>, int_panel<kInt4, 2>, int_panel<kInt4, 3>, int_panel<kInt4, 4>,
      int_panel<kInt4, 5>, int_panel<kInt4, 6>, int_panel<kInt4, 7>, int_panel<kInt4, 8>,
  };
  for (int64_t t = 0; t < count; t += kIntBlock) {
    const int64_t block = std::min(count - t, kIntBlock);
    kernels[block - 1](panel, rows, first + t, y + t * y_stride, y_stride);
  }
}

}  // namespace strata

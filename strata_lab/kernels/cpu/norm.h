// RMSNorm of one row; the order of the sum depends on the row's length alone.
#pragma once

#include <cmath>

#include "simd.h"

namespace strata {

inline float rms_factor(const float* x, int64_t count, float eps) {
  __m256 sum[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    for (int j = 0; j < 4; ++j) {
      const __m256 v = _mm256_loadu_ps(x + i + 8 * j);
      sum[j] = _mm256_fmadd_ps(v, v, sum[j]);
    }
  }
  for (; i < count; i += 8) {
    const __m256 v = load_lanes(x + i, count - i);
    sum[0] = _mm256_fmadd_ps(v, v, sum[0]);
  }
  const float total = sum_lanes(_mm256_add_ps(_mm256_add_ps(sum[0], sum[1]), _mm256_add_ps(sum[2], sum[3])));
  return 1.0f / std::sqrt(total / static_cast<float>(count) + eps);
}

// y = x * factor * weight; y may be x.
inline void scale_row(const float* x, float factor, const float* weight, int64_t count, float* y) {
  const __m256 f = _mm256_set1_ps(factor);
  for (int64_t i = 0; i < count; i += 8) {
    const __m256 normalized = _mm256_mul_ps(load_lanes(x + i, count - i), f);
    store_lanes(y + i, _mm256_mul_ps(normalized, load_lanes(weight + i, count - i)), count - i);
  }
}

// out = x / sqrt(mean(x^2) + eps) * weight; the one RMSNorm of this folder, so that fusing it changes no bit.
inline void rms_norm_row(const float* x, const float* weight, float eps, int64_t count, float* out) {
  scale_row(x, rms_factor(x, count, eps), weight, count, out);
}

}  // namespace strata

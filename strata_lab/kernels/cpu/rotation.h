// Rotary position embedding of one head, half-split: element i turns with element i + dim / 2.
#pragma once

#include "simd.h"

namespace strata {

// y = x rotated by cos and sin (dim / 2 numbers each); y may be x.
inline void rotate_row(const float* x, const float* cos, const float* sin, int64_t dim, float* y) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += 8) {
    const int64_t left = half - i;
    const __m256 a = load_lanes(x + i, left), b = load_lanes(x + half + i, left);
    const __m256 c = load_lanes(cos + i, left), s = load_lanes(sin + i, left);
    store_lanes(y + i, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)), left);
    store_lanes(y + half + i, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)), left);
  }
}

}  // namespace strata

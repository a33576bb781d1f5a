// What happens to x before a product with integer weights: quantization to int8 in groups of 32. Each row is treated
// alone, so nothing depends on the batch.
#pragma once

#include <cmath>

#include "simd.h"

namespace strata {

// Quantized rows: x = scale * code. `correction` per group is what the integer kernels need of the sum of the codes:
// scale * sum (float) for int4, whose minimum multiplies it; -128 * sum (int32) for int8, stored with an offset of 128.
struct IntRows {
  int8_t* codes;     // [T, groups * 32], zero padded
  float* scale;      // [T, groups]
  void* correction;  // [T, groups]
  int64_t groups;
};

// One group of at most 32 columns -> codes, scale, and the sum of the codes. scale = amax / 127; codes round to
// nearest even. A NaN or an infinity makes the scale NaN or infinite, so it reaches the output.
inline int32_t quantize_group(const float* x, int64_t count, int8_t* codes, float* scale) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256 v[4];
  __m256i top = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) {
    v[i] = load_lanes(x + 8 * i, std::max<int64_t>(count - 8 * i, 0));
    // compared as integers, where NaN is above infinity and infinity above all numbers
    top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
  }
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  const float amax = _mm_cvtss_f32(_mm_castsi128_ps(m));
  *scale = amax / 127.0f;
  const __m256 inverse = _mm256_set1_ps(amax < 1e-36f ? 0.0f : 127.0f / amax);  // below, 127 / amax would overflow
  const auto to_int = [&](int i) { return _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse)); };
  const __m256i ab = _mm256_packs_epi32(to_int(0), to_int(1)), cd = _mm256_packs_epi32(to_int(2), to_int(3));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // undoes the packs' interleaving of 128-bit halves
  const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), packed);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), packed);
  const __m256i quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

// Row `t` of k columns into `rows`. `int4` chooses the kind of correction.
inline void quantize_row(const float* x, int64_t k, int64_t t, bool int4, const IntRows& rows) {
  const int64_t first = t * rows.groups;
  for (int64_t g = 0; g < rows.groups; ++g) {
    float scale;
    const int32_t sum = quantize_group(x + g * kGroup, k - g * kGroup, rows.codes + (first + g) * kGroup, &scale);
    rows.scale[first + g] = scale;
    if (int4) {
      static_cast<float*>(rows.correction)[first + g] = scale * static_cast<float>(sum);
    } else {
      static_cast<int32_t*>(rows.correction)[first + g] = -128 * sum;
    }
  }
}

}  // namespace strata

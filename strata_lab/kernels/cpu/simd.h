// Register-level pieces shared by the linear and embedding kernels. AVX2, FMA and F16C are assumed (build.py checks);
// VNNI dot products are used where the compiler may. Everything here is exact or documents its error.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace strata {

constexpr int64_t kPanelRows = 8;  // output rows in a panel: the 32-bit lanes of a ymm register
constexpr int64_t kGroup = 32;     // columns that share a scale in int8 and int4

#if (defined(__AVX512VNNI__) && defined(__AVX512VL__)) || defined(__AVXVNNI__)
#define STRATA_VNNI 1
// acc (int32) += the four products of unsigned w and signed x in each 32-bit lane. Never saturates.
inline __m256i dot4(__m256i acc, __m256i w, __m256i x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpbusd_epi32(acc, w, x);
#else
  return _mm256_dpbusd_avx_epi32(acc, w, x);
#endif
}
#endif

// How far ahead of its use the weights' memory is asked for. One stream is too little for the hardware prefetcher to
// keep memory busy: measured cold, one core reads int4 panels 1.6 times as fast with this, as fast as it reads at all.
constexpr int64_t kIntAheadBytes = 4096;    // one panel at a time
constexpr int64_t kFloatAheadBytes = 2048;  // up to four panels at a time

inline void prefetch(const void* base, int64_t offset) {
  _mm_prefetch(static_cast<const char*>(base) + offset, _MM_HINT_T0);
}

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Four bytes, repeated in every lane.
inline __m256i broadcast4(const int8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}

inline __m256 load_half8(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline __m256i first_lanes(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline __m256 load_lanes(const float* p, int64_t count) {
  return count >= 8 ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, first_lanes(count));
}

inline void store_lanes(float* p, __m256 v, int64_t count) {
  if (count >= 8) {
    _mm256_storeu_ps(p, v);
  } else {
    _mm256_maskstore_ps(p, first_lanes(count), v);
  }
}

inline float sum_lanes(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// e^x, relative error below 2e-7: 2^n * p(r) with x = n ln2 + r, p the Taylor polynomial of degree 7, |r| <= ln2/2.
// Saturates at e^-87 and e^88; NaN stays NaN.
inline __m256 exp8(__m256 x) {
  x = _mm256_max_ps(_mm256_set1_ps(-87.0f), _mm256_min_ps(_mm256_set1_ps(88.0f), x));
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), kNearest);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), x);  // ln2 in two parts, the first exact times n
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860677e-6f), r);
  __m256 p = _mm256_set1_ps(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
  }
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(exponent));
}

inline __m256 silu8(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  return _mm256_div_ps(x, _mm256_add_ps(one, exp8(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

// 32 e4m3 codes (4 columns of 8 rows) -> four registers of 8 floats, times 2^-8: shifted by one bit an e4m3 code is a
// half with the exponent bias off by 8. Subnormals come out exact; the caller multiplies by kFp8Bias.
constexpr float kFp8Bias = 256.0f;
inline void fp8_columns(__m256i codes, __m256 out[4]) {
  const __m256i zero = _mm256_setzero_si256(), keep = _mm256_set1_epi16(static_cast<int16_t>(0xBFFF));
  const __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_unpacklo_epi8(zero, codes), 1), keep);
  const __m256i odd = _mm256_and_si256(_mm256_srai_epi16(_mm256_unpackhi_epi8(zero, codes), 1), keep);
  out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(even));
  out[1] = _mm256_cvtph_ps(_mm256_castsi256_si128(odd));
  out[2] = _mm256_cvtph_ps(_mm256_extracti128_si256(even, 1));
  out[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1));
}

}  // namespace strata

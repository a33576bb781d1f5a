// KV caches [NB, BS, Hkv, D] in float32, bfloat16 or float8_e4m3fn: checked views, reading and writing.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "refuse.h"
#include "simd.h"

namespace strata {

constexpr float kFp8Max = 448.0f;  // largest finite float8_e4m3fn

// Any strides, but the elements of a head lie side by side.
template <typename C>
struct CacheView {
  C* data;
  int64_t num_blocks, block_size, num_heads, head_dim;
  int64_t block_stride, slot_stride, head_stride;

  explicit CacheView(const at::Tensor& t)
      : data(static_cast<C*>(t.data_ptr())), num_blocks(t.size(0)), block_size(t.size(1)), num_heads(t.size(2)),
        head_dim(t.size(3)), block_stride(t.stride(0)), slot_stride(t.stride(1)), head_stride(t.stride(2)) {}

  C* row(int64_t block, int64_t offset, int64_t head) const {
    return data + block * block_stride + offset * slot_stride + head * head_stride;
  }
};

inline void check_caches(const at::Tensor& k, const at::Tensor& v) {
  CHECK_VALUE(k.dim() == 4 && k.sizes() == v.sizes(), "k_cache and v_cache must be [NB, BS, Hkv, D] alike, not ",
              k.sizes(), " and ", v.sizes());
  CHECK_VALUE(k.scalar_type() == v.scalar_type(), "k_cache and v_cache must have one dtype, not ", k.scalar_type(),
              " and ", v.scalar_type());
  CHECK_VALUE(k.stride(3) == 1 && v.stride(3) == 1, "the last dimension of a cache must be contiguous");
}

// Slots [tokens] of a cache; a negative one is nobody's.
inline void check_slots(const at::Tensor& slots, int64_t tokens, const at::Tensor& cache) {
  CHECK_VALUE(slots.scalar_type() == at::kLong && slots.dim() == 1 && slots.size(0) == tokens && slots.is_contiguous(),
              "slot_mapping must be contiguous int64 [", tokens, "], not ", slots.scalar_type(), " ", slots.sizes());
  const int64_t limit = cache.size(0) * cache.size(1);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < tokens; ++t) {
    CHECK_VALUE(slot[t] < limit, "slot ", slot[t], " of token ", t, " lies outside the cache's ", limit, " slots");
  }
}

// Calls run(C{}) with C the element type of the cache.
template <typename Run>
void with_cache_type(const at::Tensor& cache, const Run& run) {
  switch (cache.scalar_type()) {
    case at::kFloat: run(float{}); break;
    case at::kBFloat16: run(c10::BFloat16{}); break;
    case at::kFloat8_e4m3fn: run(c10::Float8_e4m3fn{}); break;
    default:
      CHECK_VALUE(false, "a cache must be float32, bfloat16 or float8_e4m3fn, not ", cache.scalar_type());
  }
}

// What a row read by `as_float_row` must be multiplied by; a power of two, so it may be applied at any later step.
template <typename C>
constexpr float kReadUnit = std::is_same_v<C, c10::Float8_e4m3fn> ? kFp8Bias : 1.0f;

// A row of a cache as float32 / kReadUnit: where it lies, or converted into `room`. `count` is a multiple of 8.
inline const float* as_float_row(const float* row, float*, int64_t) { return row; }

inline const float* as_float_row(const c10::BFloat16* row, float* room, int64_t count) {
  const auto convert = [&](int64_t i) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i));
    _mm256_storeu_ps(room + i, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
  };
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    convert(i);
    convert(i + 8);
    convert(i + 16);
    convert(i + 24);
  }
  for (; i < count; i += 8) convert(i);
  return room;
}

// 16 codes moved to the exponent of a half (see fp8_columns), NaN to a NaN.
inline __m256i e4m3_to_half(__m256i codes) {
  const __m256i high = _mm256_slli_epi16(codes, 8);
  const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(static_cast<int16_t>(0xBFFF)));
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7f));
  return _mm256_or_si256(half, nan);
}

inline const float* as_float_row(const c10::Float8_e4m3fn* row, float* room, int64_t count) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256i half = e4m3_to_half(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i))));
    _mm256_storeu_ps(room + i, _mm256_cvtph_ps(_mm256_castsi256_si128(half)));
    _mm256_storeu_ps(room + i + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)));
  }
  if (i < count) {
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + i));
    const __m256i half = e4m3_to_half(_mm256_cvtepu8_epi16(codes));
    _mm256_storeu_ps(room + i, _mm256_cvtph_ps(_mm256_castsi256_si128(half)));
  }
  return room;
}

// Rounding to nearest even; e4m3 saturates, NaN stays NaN.
inline void store(float* p, float x) { *p = x; }
inline void store(c10::BFloat16* p, float x) { *p = c10::BFloat16(x); }
inline void store(c10::Float8_e4m3fn* p, float x) { *p = c10::Float8_e4m3fn(std::clamp(x, -kFp8Max, kFp8Max)); }

// The codes of eight floats, as `store` makes them one by one.
inline __m128i e4m3_codes(__m256 x) {
  const auto all = [](int value) { return _mm256_set1_epi32(value); };
  const __m256 magnitude = _mm256_min_ps(_mm256_set1_ps(kFp8Max), _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x));
  const __m256i bits = _mm256_castps_si256(magnitude);
  // 20 mantissa bits go: add half of what goes, less one where the last bit that stays is even. 120: 127 less e4m3's bias.
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), all(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, all(0x7ffff))), 20);
  const __m256i normal = _mm256_sub_epi32(rounded, all(120 << 3));
  // Subnormal codes count steps of 2^-9, which is the last bit of a float near 2^14: the sum rounds.
  const __m256 shift = _mm256_set1_ps(16384.0f);
  const __m256i small = _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(magnitude, shift)), _mm256_castps_si256(shift));
  const __m256 is_small = _mm256_cmp_ps(magnitude, _mm256_set1_ps(0x1p-6f), _CMP_LT_OQ);
  __m256i code = _mm256_blendv_epi8(normal, small, _mm256_castps_si256(is_small));
  code = _mm256_blendv_epi8(code, all(0x7f), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  code = _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(x), 24), all(0x80)));
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
  return _mm_packus_epi16(words, words);
}

template <typename C>
void store_row(C* out, const float* x, int64_t count, float scale) {
  int64_t i = 0;
  if constexpr (std::is_same_v<C, c10::Float8_e4m3fn>) {
    for (; i + 8 <= count; i += 8) {
      const __m256 scaled = _mm256_div_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(scale));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i), e4m3_codes(scaled));
    }
  }
  for (; i < count; ++i) store(out + i, x[i] / scale);
}

}  // namespace strata

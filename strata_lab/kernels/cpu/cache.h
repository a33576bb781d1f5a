// KV caches [NB, BS, Hkv, D] in float32, bfloat16 or float8_e4m3fn: checked views, reading and writing.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

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
  TORCH_CHECK_VALUE(k.dim() == 4 && k.sizes() == v.sizes(), "k_cache and v_cache must be [NB, BS, Hkv, D] alike, not ",
                    k.sizes(), " and ", v.sizes());
  TORCH_CHECK_VALUE(k.scalar_type() == v.scalar_type(), "k_cache and v_cache must have one dtype, not ", k.scalar_type(),
                    " and ", v.scalar_type());
  TORCH_CHECK_VALUE(k.stride(3) == 1 && v.stride(3) == 1, "the last dimension of a cache must be contiguous");
}

// Calls run(C{}) with C the element type of the cache.
template <typename Run>
void with_cache_type(const at::Tensor& cache, const Run& run) {
  switch (cache.scalar_type()) {
    case at::kFloat: run(float{}); break;
    case at::kBFloat16: run(c10::BFloat16{}); break;
    case at::kFloat8_e4m3fn: run(c10::Float8_e4m3fn{}); break;
    default:
      TORCH_CHECK_VALUE(false, "a cache must be float32, bfloat16 or float8_e4m3fn, not ", cache.scalar_type());
  }
}

inline __m256 load8(const float* p) { return _mm256_loadu_ps(p); }

inline __m256 load8(const c10::BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// An e4m3 code shifted to a half's exponent is the value times 2^-8, subnormals included; only NaN needs care.
inline __m256 load8(const c10::Float8_e4m3fn* p) {
  const __m128i code = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i magnitude = _mm_and_si128(code, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_slli_epi16(_mm_andnot_si128(_mm_set1_epi16(0x7f), code), 8);
  const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
  const __m128i half = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(magnitude, 7), sign), nan);
  return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}

// Round to nearest even; e4m3 saturates, NaN stays NaN.
inline void store(float* p, float x) { *p = x; }
inline void store(c10::BFloat16* p, float x) { *p = c10::BFloat16(x); }
inline void store(c10::Float8_e4m3fn* p, float x) { *p = c10::Float8_e4m3fn(std::clamp(x, -kFp8Max, kFp8Max)); }

template <typename C>
void store_row(C* out, const float* x, int64_t count, float scale) {
  for (int64_t i = 0; i < count; ++i) store(out + i, x[i] / scale);
}

}  // namespace strata

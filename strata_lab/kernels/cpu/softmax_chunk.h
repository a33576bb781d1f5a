// One query row over one chunk of keys, and the merge of two such results. Every sum here has one order, given by the
// position of a key in its chunk: that is what makes a row's result independent of what is computed beside it.
#pragma once

#include <cmath>
#include <limits>

#include "simd.h"

namespace strata {

constexpr int64_t kChunk = 64;  // keys that share a softmax maximum; chunks are cut at absolute positions

// What is known of a row after some keys, in D + kStateExtra floats: D weighted values, then the two fields.
constexpr int64_t kStateExtra = 8;
inline float& highest_of(float* state, int64_t dim) { return state[dim]; }
inline float& total_of(float* state, int64_t dim) { return state[dim + 1]; }

inline void clear_state(float* state, int64_t dim) {
  std::fill_n(state, dim + kStateExtra, 0.0f);
  highest_of(state, dim) = -std::numeric_limits<float>::infinity();
}

// Dot products of q with eight keys, in the eight lanes.
inline __m256 dots8(const float* q, const float* const* k, int64_t dim) {
  __m256 sum[8];
  for (auto& s : sum) s = _mm256_setzero_ps();
  for (int64_t c = 0; c < dim; c += 8) {
    const __m256 x = _mm256_loadu_ps(q + c);
    for (int j = 0; j < 8; ++j) sum[j] = _mm256_fmadd_ps(x, _mm256_loadu_ps(k[j] + c), sum[j]);
  }
  const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(sum[0], sum[1]), _mm256_hadd_ps(sum[2], sum[3]));
  const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(sum[4], sum[5]), _mm256_hadd_ps(sum[6], sum[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

inline float max_lanes(__m256 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

// out[8 * N] = sum over j < count of weights[j] * v[j][offset : offset + 8 * N], added in the order of j.
template <int N>
void weighted_sum(const float* weights, const float* const* v, int64_t count, int64_t offset, float* out) {
  __m256 sum[N];
  for (auto& s : sum) s = _mm256_setzero_ps();
  for (int64_t j = 0; j < count; ++j) {
    const __m256 w = _mm256_broadcast_ss(weights + j);
    const float* row = v[j] + offset;
    for (int i = 0; i < N; ++i) sum[i] = _mm256_fmadd_ps(w, _mm256_loadu_ps(row + 8 * i), sum[i]);
  }
  for (int i = 0; i < N; ++i) _mm256_storeu_ps(out + offset + 8 * i, sum[i]);
}

inline void weighted_sum(const float* weights, const float* const* v, int64_t count, int64_t dim, float* out) {
  for (int64_t offset = 0; offset < dim;) {
    const int64_t left = (dim - offset) / 8;
    const int64_t blocks = (left + 7) / 8, width = (left + blocks - 1) / blocks;  // even widths: short chains stall
    switch (width) {
      case 8: weighted_sum<8>(weights, v, count, offset, out); break;
      case 7: weighted_sum<7>(weights, v, count, offset, out); break;
      case 6: weighted_sum<6>(weights, v, count, offset, out); break;
      case 5: weighted_sum<5>(weights, v, count, offset, out); break;
      case 4: weighted_sum<4>(weights, v, count, offset, out); break;
      case 3: weighted_sum<3>(weights, v, count, offset, out); break;
      case 2: weighted_sum<2>(weights, v, count, offset, out); break;
      default: weighted_sum<1>(weights, v, count, offset, out); break;
    }
    offset += 8 * width;
  }
}

// State of row q over the first `count` keys of a chunk, 0 < count <= kChunk. `k` holds readable pointers up to the next
// multiple of 8; what they hold past `count` does not matter, NaN included.
inline void attend_chunk(const float* q, const float* const* k, const float* const* v, int64_t count, float scale,
                         int64_t dim, float* state) {
  const __m256 nothing = _mm256_set1_ps(-std::numeric_limits<float>::infinity());
  alignas(32) float weights[kChunk];
  __m256 highest = nothing;
  for (int64_t j = 0; j < count; j += 8) {
    __m256 score = _mm256_mul_ps(dots8(q, k + j, dim), _mm256_set1_ps(scale));
    if (count - j < 8) score = _mm256_blendv_ps(nothing, score, _mm256_castsi256_ps(first_lanes(count - j)));
    _mm256_store_ps(weights + j, score);
    highest = _mm256_max_ps(highest, score);
  }
  const float top = max_lanes(highest);
  __m256 total = _mm256_setzero_ps();
  for (int64_t j = 0; j < count; j += 8) {
    __m256 weight = exp8(_mm256_sub_ps(_mm256_load_ps(weights + j), _mm256_set1_ps(top)));
    if (count - j < 8) weight = _mm256_and_ps(weight, _mm256_castsi256_ps(first_lanes(count - j)));
    _mm256_store_ps(weights + j, weight);
    total = _mm256_add_ps(total, weight);
  }
  weighted_sum(weights, v, count, dim, state);
  highest_of(state, dim) = top;
  total_of(state, dim) = sum_lanes(total);
}

// state becomes what it would be after the keys of both, which come later than its own. A NaN in either stays.
inline void merge_states(float* state, float* later, int64_t dim) {
  const float mine = highest_of(state, dim), theirs = highest_of(later, dim);
  const bool mine_is_top = mine > theirs;
  const float keep = mine_is_top ? 1.0f : std::exp(mine - theirs);
  const float take = mine_is_top ? std::exp(theirs - mine) : 1.0f;
  const __m256 a = _mm256_set1_ps(keep), b = _mm256_set1_ps(take);
  for (int64_t i = 0; i < dim; i += 8) {
    const __m256 old = _mm256_mul_ps(_mm256_loadu_ps(state + i), a);
    _mm256_storeu_ps(state + i, _mm256_fmadd_ps(_mm256_loadu_ps(later + i), b, old));
  }
  highest_of(state, dim) = mine_is_top ? mine : theirs;
  total_of(state, dim) = total_of(state, dim) * keep + total_of(later, dim) * take;
}

}  // namespace strata

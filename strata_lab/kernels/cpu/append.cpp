// strata::kv_append and strata::qkv_rope_append: what happens to q, k and v between their product and attention.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cache.h"
#include "norm.h"
#include "parallel.h"
#include "replay.h"
#include "rotation.h"

namespace strata {
namespace {

constexpr int64_t kSharedFloats = 16384;  // fewer numbers are not worth a second thread
constexpr int64_t kTaskTokens = 8;

// Calls run(token) for each token, on several threads if the numbers are many.
template <typename Run>
void for_each_token(int64_t tokens, int64_t floats, const Run& run) {
  for_each_task((tokens + kTaskTokens - 1) / kTaskTokens, floats >= kSharedFloats, [&](int64_t task) {
    for (int64_t t = task * kTaskTokens; t < std::min(tokens, (task + 1) * kTaskTokens); ++t) run(t);
  });
}

void check_rows(const at::Tensor& x, const char* name, const at::Tensor& cache) {
  CHECK_VALUE(x.scalar_type() == at::kFloat && x.dim() == 3 && x.size(1) == cache.size(2) && x.size(2) == cache.size(3),
              name, " must be float32 [T, ", cache.size(2), ", ", cache.size(3), "] like its cache, not ",
              x.scalar_type(), " ", x.sizes());
}

void kv_append(const at::Tensor& k, const at::Tensor& v, at::Tensor k_cache, at::Tensor v_cache,
               const at::Tensor& slot_mapping, double k_scale, double v_scale) {
  check_caches(k_cache, v_cache);
  check_rows(k, "k", k_cache);
  check_rows(v, "v", v_cache);
  CHECK_VALUE(v.size(0) == k.size(0), "k and v must have as many tokens, not ", k.size(0), " and ", v.size(0));
  const at::Tensor new_k = contiguous(k), new_v = contiguous(v);
  perform([=] {
    check_slots(slot_mapping, new_k.size(0), k_cache);  // at every replay too: a bad slot would write elsewhere
    const float *from_k = new_k.const_data_ptr<float>(), *from_v = new_v.const_data_ptr<float>();
    const int64_t* slots = slot_mapping.const_data_ptr<int64_t>();
    with_cache_type(k_cache, [&](auto element) {
      const CacheView<decltype(element)> to_k(k_cache), to_v(v_cache);
      const int64_t heads = to_k.num_heads, dim = to_k.head_dim;
      for_each_token(new_k.size(0), 2 * new_k.numel(), [&](int64_t t) {
        if (slots[t] < 0) return;
        const int64_t block = slots[t] / to_k.block_size, offset = slots[t] % to_k.block_size;
        for (int64_t h = 0; h < heads; ++h) {
          store_row(to_k.row(block, offset, h), from_k + (t * heads + h) * dim, dim, static_cast<float>(k_scale));
          store_row(to_v.row(block, offset, h), from_v + (t * heads + h) * dim, dim, static_cast<float>(v_scale));
        }
      });
    });
  });
}

// y = x (normalized if there is a weight) rotated; element i turns with i + dim / 2.
struct Rotation {
  const float* norm_weight;
  float eps;

  void operator()(const float* x, const float* cos, const float* sin, int64_t dim, float* y) const {
    if (norm_weight != nullptr) {
      rms_norm_row(x, norm_weight, eps, dim, y);
      x = y;
    }
    rotate_row(x, cos, sin, dim, y);
  }
};

void check_float(const at::Tensor& x, at::IntArrayRef sizes, const char* name) {
  CHECK_VALUE(x.scalar_type() == at::kFloat && x.sizes() == sizes, name, " must be float32 ", sizes, ", not ",
              x.scalar_type(), " ", x.sizes());
}

Rotation rotation(const std::optional<at::Tensor>& weight, double eps, int64_t dim, const char* name) {
  if (!weight.has_value()) return {nullptr, 0.0f};
  check_float(*weight, {dim}, name);
  CHECK_VALUE(weight->is_contiguous(), name, " must be contiguous");
  return {weight->const_data_ptr<float>(), static_cast<float>(eps)};
}

at::Tensor qkv_rope_append(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                           const std::optional<at::Tensor>& q_norm_weight, const std::optional<at::Tensor>& k_norm_weight,
                           double eps, at::Tensor k_cache, at::Tensor v_cache, const at::Tensor& slot_mapping,
                           int64_t num_q_heads, int64_t num_kv_heads, double k_scale, double v_scale) {
  check_caches(k_cache, v_cache);
  const int64_t tokens = qkv.size(0), dim = k_cache.size(3), heads = num_q_heads + num_kv_heads;
  CHECK_VALUE(num_kv_heads == k_cache.size(2) && dim % 2 == 0, "the cache ", k_cache.sizes(), " must have ",
              num_kv_heads, " heads of an even size");
  check_float(qkv, {tokens, (heads + num_kv_heads) * dim}, "qkv");
  check_float(cos, {tokens, dim / 2}, "cos");
  check_float(sin, {tokens, dim / 2}, "sin");
  const Rotation rotate_q = rotation(q_norm_weight, eps, dim, "q_norm_weight");
  const Rotation rotate_k = rotation(k_norm_weight, eps, dim, "k_norm_weight");
  const at::Tensor in = contiguous(qkv), cosines = contiguous(cos), sines = contiguous(sin);
  at::Tensor out = at::empty({tokens, num_q_heads, dim}, in.options());
  perform([=, q_norm = q_norm_weight, k_norm = k_norm_weight] {  // the norms' memory is owned through their tensors
    check_slots(slot_mapping, tokens, k_cache);
    const float *x = in.const_data_ptr<float>(), *c = cosines.const_data_ptr<float>(), *s = sines.const_data_ptr<float>();
    float* q = out.mutable_data_ptr<float>();
    const int64_t* slots = slot_mapping.const_data_ptr<int64_t>();
    with_cache_type(k_cache, [&](auto element) {
      const CacheView<decltype(element)> to_k(k_cache), to_v(v_cache);
      for_each_token(tokens, in.numel(), [&](int64_t t) {
        const float *row = x + t * (heads + num_kv_heads) * dim, *ct = c + t * dim / 2, *st = s + t * dim / 2;
        for (int64_t h = 0; h < num_q_heads; ++h) rotate_q(row + h * dim, ct, st, dim, q + (t * num_q_heads + h) * dim);
        if (slots[t] < 0) return;
        const int64_t block = slots[t] / to_k.block_size, offset = slots[t] % to_k.block_size;
        thread_local std::vector<float> rotated;
        rotated.resize(dim);
        for (int64_t h = 0; h < num_kv_heads; ++h) {
          rotate_k(row + (num_q_heads + h) * dim, ct, st, dim, rotated.data());
          store_row(to_k.row(block, offset, h), rotated.data(), dim, static_cast<float>(k_scale));
          store_row(to_v.row(block, offset, h), row + (heads + h) * dim, dim, static_cast<float>(v_scale));
        }
      });
    });
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(STRATA_NAMESPACE, m) {
  m.def(
      "kv_append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, float k_scale, "
      "float v_scale) -> ()");
  m.def(
      "qkv_rope_append(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_norm_weight, Tensor? k_norm_weight, float eps, "
      "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, int num_q_heads, int num_kv_heads, float k_scale, "
      "float v_scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(STRATA_NAMESPACE, CPU, m) {
  m.impl("kv_append", &kv_append);
  m.impl("qkv_rope_append", &qkv_rope_append);
}

}  // namespace
}  // namespace strata

// strata::paged_attention: the queries of a step over all of their past, or over sinks and a window (see attention.h).

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "attention.h"

namespace strata {
namespace {

at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                           const at::Tensor& block_tables, const at::Tensor& seq_lens, const at::Tensor& cu_seqlens_q,
                           double scale, double k_scale, double v_scale, int64_t sinks, int64_t window) {
  check_caches(k_cache, v_cache);
  const int64_t dim = k_cache.size(3), kv_heads = k_cache.size(2), requests = block_tables.size(0);
  CHECK_VALUE(q.scalar_type() == at::kFloat && q.dim() == 3 && q.size(2) == dim && q.size(1) % kv_heads == 0,
              "q must be float32 [T, H, ", dim, "] with H a multiple of ", kv_heads, ", not ", q.scalar_type(), " ",
              q.sizes());
  CHECK_VALUE(dim % 8 == 0, "head_dim ", dim, " must be a multiple of 8");
  CHECK_VALUE(sinks >= 0 && window >= 0, "sinks and window must not be negative, not ", sinks, " and ", window);
  const at::Tensor rows = q.stride(2) == 1 ? q : contiguous(q);
  const at::Tensor tables = as_int32(block_tables, {requests, block_tables.size(1)}, "block_tables");
  const at::Tensor lens = as_int32(seq_lens, {requests}, "seq_lens");
  const at::Tensor starts = as_int32(cu_seqlens_q, {requests + 1}, "cu_seqlens_q");
  at::Tensor out = at::empty(q.sizes(), q.options());
  perform([=] {
    Queries queries{rows.const_data_ptr<float>(),
                    rows.stride(0),
                    rows.stride(1),
                    dim,
                    rows.size(1) / kv_heads,
                    starts.const_data_ptr<int32_t>(),
                    starts.const_data_ptr<int32_t>() + 1,
                    lens.const_data_ptr<int32_t>(),
                    tables.const_data_ptr<int32_t>(),
                    tables.size(1),
                    static_cast<float>(scale * k_scale),
                    static_cast<float>(v_scale),
                    out.mutable_data_ptr<float>(),
                    rows.size(1),
                    sinks,
                    window};
    check_lengths(queries, requests, rows.size(0), k_cache.size(0), k_cache.size(1));
    const int64_t used = queries.starts[requests] * rows.size(1) * dim;
    std::fill(queries.out + used, queries.out + out.numel(), 0.0f);
    with_cache_type(k_cache, [&](auto element) {
      using C = decltype(element);
      queries.scale *= kReadUnit<C>;
      queries.v_scale *= kReadUnit<C>;
      run(queries, requests, CacheView<C>(k_cache), CacheView<C>(v_cache));
    });
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(STRATA_NAMESPACE, m) {
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, "
      "Tensor cu_seqlens_q, float scale, float k_scale, float v_scale, int sinks=0, int window=0) -> Tensor");
}

TORCH_LIBRARY_IMPL(STRATA_NAMESPACE, CPU, m) { m.impl("paged_attention", &paged_attention); }

}  // namespace
}  // namespace strata

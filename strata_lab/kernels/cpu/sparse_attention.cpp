// strata::page_bounds and strata::sparse_attention: attention of answers over the pages that promise most, a page being a
// block of the cache. A page's promise is an upper bound of the products of its keys with a query, found from the smallest
// and largest key in every dimension; so most keys are never read. The chosen pages stand side by side in a table of their
// own, over which the attention of attention.h runs as over any other: with all pages chosen it computes the same bits.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "attention.h"

namespace strata {
namespace {

constexpr int64_t kFirstPages = 1, kLastPages = 2;  // always attended: what attention rests on, and what is being written
constexpr int64_t kSharedFloats = 65536;            // fewer numbers are not worth a second thread

void check_bounds(const at::Tensor& bounds, const at::Tensor& k_cache) {
  CHECK_VALUE(bounds.sizes() == at::IntArrayRef({k_cache.size(0), k_cache.size(2), 2, k_cache.size(3)}) &&
                  bounds.scalar_type() == k_cache.scalar_type() && bounds.is_contiguous(),
              "bounds_cache must be contiguous ", k_cache.scalar_type(), " [NB, Hkv, 2, D] of the cache ",
              k_cache.sizes(), ", not ", bounds.scalar_type(), " ", bounds.sizes());
}

// The smallest and largest of keys [0, count) of a block in every dimension, as they are stored.
template <typename C>
void bound_page(const CacheView<C>& cache, int64_t block, int64_t count, int64_t head, C* out) {
  const int64_t dim = cache.head_dim;
  thread_local std::vector<float> memory;
  float *low = scratch(memory, 3 * dim), *high = low + dim, *room = high + dim;
  for (int64_t j = 0; j < count; ++j) {
    const float* key = as_float_row(cache.row(block, j, head), room, dim);
    for (int64_t i = 0; i < dim; ++i) {
      low[i] = j == 0 ? key[i] : std::min(low[i], key[i]);
      high[i] = j == 0 ? key[i] : std::max(high[i], key[i]);
    }
  }
  for (int64_t i = 0; i < 2 * dim; ++i) low[i] *= kReadUnit<C>;
  store_row(out, low, 2 * dim, 1.0f);
}

void page_bounds(const at::Tensor& k_cache, at::Tensor bounds, const at::Tensor& slot_mapping) {
  check_caches(k_cache, k_cache);
  check_bounds(bounds, k_cache);
  CHECK_VALUE(k_cache.size(3) % 8 == 0, "head_dim ", k_cache.size(3), " must be a multiple of 8");
  perform([=] {
    check_slots(slot_mapping, slot_mapping.numel(), k_cache);
    const int64_t* slots = slot_mapping.const_data_ptr<int64_t>();
    const int64_t tokens = slot_mapping.size(0), heads = k_cache.size(2), size = k_cache.size(1);
    const int64_t row = 2 * k_cache.size(3);
    with_cache_type(k_cache, [&](auto element) {
      using C = decltype(element);
      const CacheView<C> keys(k_cache);
      C* out = static_cast<C*>(bounds.mutable_data_ptr());
      for_each_task(tokens, tokens * heads * size * row >= kSharedFloats, [&](int64_t t) {
        const int64_t block = slots[t] / size, offset = slots[t] % size;
        if (slots[t] < 0) return;
        // Tokens of a text stand side by side: only the last one in a block bounds it.
        if (t + 1 < tokens && slots[t + 1] == slots[t] + 1 && offset + 1 < size) return;
        for (int64_t h = 0; h < heads; ++h) bound_page(keys, block, offset + 1, h, out + (block * heads + h) * row);
      });
    });
  });
}

// What a query that sees `length` tokens attends.
struct Choice {
  int64_t row, length;
  const int32_t* table;
};

// The sums over the q heads of a group of min(q, 0) and max(q, 0): their product with the smallest and largest keys of a
// page is no less than the sum of the group's products with any key in it.
void signs_apart(const float* q, int64_t group, int64_t dim, float* weights) {
  std::fill_n(weights, 2 * dim, 0.0f);
  for (int64_t g = 0; g < group; ++g) {
    for (int64_t i = 0; i < dim; ++i) {
      const float x = q[g * dim + i];
      weights[i] += std::min(x, 0.0f);
      weights[dim + i] += std::max(x, 0.0f);
    }
  }
}

// Promises of the pages table[0 .. count); NaN promises most.
template <typename C>
void score_pages(const C* bounds, int64_t heads, int64_t head, int64_t dim, const int32_t* table, int64_t count,
                 const float* weights, float* room, float* scores) {
  for (int64_t first = 0; first < count; first += 8) {
    const float* rows[8];
    alignas(32) float found[8];
    const int64_t some = std::min<int64_t>(8, count - first);
    for (int64_t j = 0; j < 8; ++j) {
      const int64_t block = table[first + std::min(j, some - 1)];
      rows[j] = as_float_row(bounds + (block * heads + head) * 2 * dim, room + j * 2 * dim, 2 * dim);
    }
    _mm256_store_ps(found, dots8(weights, rows, 2 * dim));
    for (int64_t j = 0; j < some; ++j) {
      scores[first + j] = std::isnan(found[j]) ? std::numeric_limits<float>::infinity() : found[j];
    }
  }
}

// Writes the ids of the pages that a row of one kv head attends, in the order of the text; returns how many.
template <typename C>
int64_t choose(const Choice& row, const C* bounds, const Queries& q, int64_t kv_heads, int64_t head, int64_t block_size,
               int64_t pages, int32_t* chosen, int32_t unit, int32_t offset) {
  const int64_t total = (row.length + block_size - 1) / block_size;
  const auto id = [&](int64_t page) { return row.table[page] * unit + offset; };
  if (total <= pages) {
    for (int64_t i = 0; i < total; ++i) chosen[i] = id(i);
    return total;
  }
  const int64_t candidates = total - kFirstPages - kLastPages, wanted = pages - kFirstPages - kLastPages;
  thread_local std::vector<float> memory;
  thread_local std::vector<int32_t> order;
  float* weights = scratch(memory, 18 * q.dim + candidates);
  float *room = weights + 2 * q.dim, *scores = room + 16 * q.dim;
  signs_apart(q.data + row.row * q.token_stride + head * q.group * q.head_stride, q.group, q.dim, weights);
  score_pages(bounds, kv_heads, head, q.dim, row.table + kFirstPages, candidates, weights, room, scores);
  order.resize(candidates);
  for (int64_t i = 0; i < candidates; ++i) order[i] = static_cast<int32_t>(i);
  std::nth_element(order.begin(), order.begin() + wanted, order.end(), [&](int32_t a, int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;  // of equal promises the earlier page
  });
  std::sort(order.begin(), order.begin() + wanted);
  chosen[0] = id(0);
  for (int64_t i = 0; i < wanted; ++i) chosen[1 + i] = id(kFirstPages + order[i]);
  for (int64_t i = pages - kLastPages; i < pages; ++i) chosen[i] = id(total - pages + i);
  return pages;
}

// Every (row, kv head) as a request of its own over one kv head: `rows` and `ends` of q as [T * Hkv, group, D].
struct Sparse {
  std::vector<int32_t> rows, ends, lens, tables;
  int64_t width;
};

template <typename C>
Sparse choose_pages(const std::vector<Choice>& rows, const Queries& q, const C* bounds, int64_t kv_heads,
                    int64_t block_size, int64_t pages) {
  int64_t longest = 0, promises = 0;
  for (const Choice& row : rows) {
    longest = std::max(longest, row.length);
    promises += row.length / block_size * kv_heads * 2 * q.dim;
  }
  const int64_t count = static_cast<int64_t>(rows.size()) * kv_heads;
  Sparse s;
  s.width = std::max<int64_t>(1, std::min(pages, (longest + block_size - 1) / block_size));
  s.rows.resize(count);
  s.ends.resize(count);
  s.lens.resize(count);
  s.tables.assign(count * s.width, 0);
  // A block id of the view that shows one head (see `one_head`) counts rows of D.
  const auto unit = static_cast<int32_t>(block_size * kv_heads);
  for_each_task(count, promises >= kSharedFloats, [&](int64_t i) {
    const Choice& row = rows[i / kv_heads];
    const int64_t head = i % kv_heads;
    const int64_t chosen = choose(row, bounds, q, kv_heads, head, block_size, pages, s.tables.data() + i * s.width, unit,
                                  static_cast<int32_t>(head));
    const int64_t total = (row.length + block_size - 1) / block_size;
    s.rows[i] = static_cast<int32_t>(row.row * kv_heads + head);
    s.ends[i] = s.rows[i] + 1;
    s.lens[i] = static_cast<int32_t>(row.length - (total - chosen) * block_size);
  });
  return s;
}

// The cache as seen by one head: blocks begin at every row of D, and a block's next slot is Hkv rows on.
template <typename C>
CacheView<C> one_head(CacheView<C> cache) {
  cache.num_blocks *= cache.block_size * cache.num_heads;
  cache.num_heads = 1;
  cache.block_stride = cache.head_stride;
  return cache;
}

at::Tensor sparse_attention(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                            const at::Tensor& bounds, const at::Tensor& block_tables, const at::Tensor& seq_lens,
                            const at::Tensor& cu_seqlens_q, const at::Tensor& prompt_lens, double scale, double k_scale,
                            double v_scale, int64_t pages) {
  check_caches(k_cache, v_cache);
  check_bounds(bounds, k_cache);
  const int64_t dim = k_cache.size(3), kv_heads = k_cache.size(2), requests = block_tables.size(0);
  CHECK_VALUE(k_cache.is_contiguous() && v_cache.is_contiguous(), "k_cache and v_cache must be contiguous");
  CHECK_VALUE(k_cache.size(0) * k_cache.size(1) * kv_heads <= std::numeric_limits<int32_t>::max(),
              "the cache ", k_cache.sizes(), " has more rows than int32 counts");
  CHECK_VALUE(q.scalar_type() == at::kFloat && q.dim() == 3 && q.size(2) == dim && q.size(1) % kv_heads == 0,
              "q must be float32 [T, H, ", dim, "] with H a multiple of ", kv_heads, ", not ", q.scalar_type(), " ",
              q.sizes());
  CHECK_VALUE(dim % 8 == 0, "head_dim ", dim, " must be a multiple of 8");
  CHECK_VALUE(pages > kFirstPages + kLastPages, "pages must be at least ", kFirstPages + kLastPages + 1, ", not ",
              pages);
  const at::Tensor rows = contiguous(q);
  const at::Tensor tables = as_int32(block_tables, {requests, block_tables.size(1)}, "block_tables");
  const at::Tensor lens = as_int32(seq_lens, {requests}, "seq_lens");
  const at::Tensor starts = as_int32(cu_seqlens_q, {requests + 1}, "cu_seqlens_q");
  const at::Tensor prompts = as_int32(prompt_lens, {requests}, "prompt_lens");
  at::Tensor out = at::empty(q.sizes(), q.options());
  perform([=] {
    const int64_t heads = rows.size(1), group = heads / kv_heads, size = k_cache.size(1);
    const int32_t* begin = starts.const_data_ptr<int32_t>();
    Queries dense{rows.const_data_ptr<float>(), heads * dim, dim, dim, group, begin, begin + 1,
                  lens.const_data_ptr<int32_t>(), tables.const_data_ptr<int32_t>(), tables.size(1),
                  static_cast<float>(scale * k_scale), static_cast<float>(v_scale), out.mutable_data_ptr<float>(), heads,
                  0, 0};
    check_lengths(dense, requests, rows.size(0), k_cache.size(0), size);
    std::fill(dense.out + begin[requests] * heads * dim, dense.out + out.numel(), 0.0f);
    std::vector<int32_t> dense_ends(requests), dense_lens(requests);
    std::vector<Choice> choices;
    for (int64_t b = 0; b < requests; ++b) {
      const int64_t count = dense.count(b), first = dense.position(b, 0);
      const int64_t prompt = std::clamp<int64_t>(prompts.const_data_ptr<int32_t>()[b] - first, 0, count);
      dense_ends[b] = static_cast<int32_t>(begin[b] + prompt);
      dense_lens[b] = static_cast<int32_t>(first + prompt);
      for (int64_t i = prompt; i < count; ++i) {
        choices.push_back({begin[b] + i, first + i + 1, dense.tables + b * dense.table_width});
      }
    }
    with_cache_type(k_cache, [&](auto element) {
      using C = decltype(element);
      const CacheView<C> keys(k_cache), values(v_cache);
      const Sparse s = choose_pages(choices, dense, static_cast<const C*>(bounds.const_data_ptr()), kv_heads, size, pages);
      dense.ends = dense_ends.data();
      dense.seq_lens = dense_lens.data();
      dense.scale *= kReadUnit<C>;
      dense.v_scale *= kReadUnit<C>;
      Queries sparse = dense;
      sparse.token_stride = group * dim;
      sparse.starts = s.rows.data();
      sparse.ends = s.ends.data();
      sparse.seq_lens = s.lens.data();
      sparse.tables = s.tables.data();
      sparse.table_width = s.width;
      sparse.num_heads = group;
      run(dense, requests, keys, values);
      run(sparse, static_cast<int64_t>(s.rows.size()), one_head(keys), one_head(values));
    });
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(STRATA_NAMESPACE, m) {
  m.def("page_bounds(Tensor k_cache, Tensor(a!) bounds_cache, Tensor slot_mapping) -> ()");
  m.def(
      "sparse_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor bounds_cache, Tensor block_tables, "
      "Tensor seq_lens, Tensor cu_seqlens_q, Tensor prompt_lens, float scale, float k_scale, float v_scale, int pages) "
      "-> Tensor");
}

TORCH_LIBRARY_IMPL(STRATA_NAMESPACE, CPU, m) {
  m.impl("page_bounds", &page_bounds);
  m.impl("sparse_attention", &sparse_attention);
}

}  // namespace
}  // namespace strata

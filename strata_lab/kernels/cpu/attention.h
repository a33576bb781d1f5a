// Causal attention of ragged queries over a paged KV cache, float32 arithmetic: what `paged_attention` and
// `sparse_attention` share.
//
// A task is (request, kv head, block of queries); where a request has few queries and there are few tasks, the chunks of
// its keys become tasks too, and the last to finish merges them in order. Both ways compute the same bits. The q heads
// that share a kv head are rows of one task, so K and V are read (and converted) once for all of them.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "cache.h"
#include "parallel.h"
#include "replay.h"
#include "softmax_chunk.h"

namespace strata {

constexpr int64_t kTaskRows = 64;         // query rows of a task: one conversion of K and V serves them all
constexpr int64_t kTasksPerThread = 4;    // fewer leave threads idle at the end
constexpr int64_t kSharedProducts = 65536;  // fewer multiplications are not worth a second thread

// What is seen of a chunk: its keys [0, sunk) and [begin, end), the latter empty if the former is all up to `end`.
struct Seen {
  int64_t sunk, begin, end;

  bool any() const { return sunk > 0 || begin < end; }
  bool whole() const { return sunk == end; }
};

// The queries [first, last) of one request for one kv head.
struct Unit {
  int64_t request, kv_head, first, last;
  int64_t chunks;         // of keys up to its last query, hidden ones left out
  int64_t hidden_first, hidden_last;  // chunks that none of its queries sees
  int64_t partials = -1;  // where its chunks' states begin in the shared scratch, if chunks are tasks

  // The chunk of keys behind the number of a chunk that is not hidden.
  int64_t chunk(int64_t number) const {
    return number < hidden_first ? number : number + hidden_last - hidden_first;
  }
};

struct Task {
  int64_t unit, first_chunk, last_chunk;
};

struct Queries {
  const float* data;
  int64_t token_stride, head_stride, dim, group;  // group: q heads that share a kv head
  const int32_t *starts, *ends;  // rows of q of each request
  const int32_t* seq_lens;
  const int32_t* tables;
  int64_t table_width;
  float scale, v_scale;
  float* out;
  int64_t num_heads;
  int64_t sinks, window;  // a query sees positions below `sinks` and its last `window`; window 0: all

  int64_t count(int64_t b) const { return ends[b] - starts[b]; }
  int64_t position(int64_t b, int64_t query) const { return seq_lens[b] - count(b) + query; }
  // The oldest position in the window of a query.
  int64_t window_start(int64_t b, int64_t query) const {
    return window == 0 ? 0 : std::max<int64_t>(0, position(b, query) + 1 - window);
  }
  // Keys of a chunk that the queries [first, last] see together.
  Seen seen(int64_t b, int64_t first, int64_t last, int64_t chunk) const {
    const int64_t end = std::clamp<int64_t>(position(b, last) + 1 - chunk * kChunk, 0, kChunk);
    const int64_t begin = std::clamp<int64_t>(window_start(b, first) - chunk * kChunk, 0, end);
    const int64_t sunk = window == 0 ? end : std::clamp<int64_t>(sinks - chunk * kChunk, 0, end);
    return begin <= sunk ? Seen{end, end, end} : Seen{sunk, begin, end};
  }
  // Chunks [first, second) are hidden from the queries from `query` on.
  std::pair<int64_t, int64_t> hidden_chunks(int64_t b, int64_t query) const {
    const int64_t first = window == 0 ? 0 : (sinks + kChunk - 1) / kChunk;
    return {first, std::max(first, window_start(b, query) / kChunk)};
  }
  const float* row(int64_t b, int64_t query, int64_t head) const {
    return data + (starts[b] + query) * token_stride + head * head_stride;
  }
  float* out_row(int64_t b, int64_t query, int64_t head) const {
    return out + ((starts[b] + query) * num_heads + head) * dim;
  }
};

// Grows and is kept per thread; 64-byte lines, since a load across two of them costs double.
inline float* scratch(std::vector<float>& memory, int64_t floats) {
  if (static_cast<int64_t>(memory.size()) < floats + 16) memory.resize(floats + 16);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((address + 63) & ~uintptr_t{63});
}

// Pointers to the keys (or values) [first, count) of one chunk as float32; converted into `room` unless stored so.
template <typename C>
void chunk_rows(const CacheView<C>& cache, const int32_t* table, int64_t chunk, int64_t first, int64_t count,
                int64_t head, float* room, const float** rows) {
  const int32_t* block = table + (chunk * kChunk + first) / cache.block_size;
  int64_t offset = (chunk * kChunk + first) % cache.block_size;
  for (int64_t j = first; j < count; ++block, offset = 0) {
    const C* row = cache.row(*block, offset, head);
    const int64_t end = std::min(count, j + cache.block_size - offset);
    for (; j < end; ++j, row += cache.slot_stride) rows[j] = as_float_row(row, room + j * cache.head_dim, cache.head_dim);
  }
}

// Pointers to what is seen of a chunk; of one seen from its first key on, readable up to the next multiple of 8.
template <typename C>
void load(const CacheView<C>& cache, const int32_t* table, int64_t chunk, const Seen& seen, int64_t head, float* room,
          const float** rows) {
  chunk_rows(cache, table, chunk, 0, seen.sunk, head, room, rows);
  chunk_rows(cache, table, chunk, seen.begin, seen.end, head, room, rows);
  for (int64_t j = seen.end; seen.whole() && j % 8 != 0; ++j) rows[j] = rows[seen.end - 1];
}

// What one row sees of a chunk, side by side; readable up to the next multiple of 8.
inline int64_t gather(const Seen& seen, const float* const* rows, const float** own) {
  int64_t count = std::copy(rows, rows + seen.sunk, own) - own;
  count = std::copy(rows + seen.begin, rows + seen.end, own + count) - own;
  for (int64_t j = count; j % 8 != 0; ++j) own[j] = own[count - 1];
  return count;
}

inline void finish(const Queries& q, const Unit& unit, int64_t query, int64_t head, float* state) {
  const float total = total_of(state, q.dim);
  const __m256 factor = _mm256_set1_ps(total == 0.0f ? 0.0f : q.v_scale / total);  // a query that sees nothing gets zeros
  float* out = q.out_row(unit.request, query, head);
  for (int64_t i = 0; i < q.dim; i += 8) _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(state + i), factor));
}

// Merge the states that tasks left in `partials` and write the results of a unit.
inline void merge_chunks(const Queries& q, const Unit& unit, float* partials) {
  const int64_t size = q.dim + kStateExtra, rows = (unit.last - unit.first) * q.group;
  thread_local std::vector<float> memory;
  float* state = scratch(memory, size);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t query = unit.first + r / q.group, head = unit.kv_head * q.group + r % q.group;
    clear_state(state, q.dim);
    for (int64_t number = 0; number < unit.chunks; ++number) {
      if (!q.seen(unit.request, query, query, unit.chunk(number)).any()) continue;
      merge_states(state, partials + (unit.partials + number * rows + r) * size, q.dim);
    }
    finish(q, unit, query, head, state);
  }
}

template <typename C>
void run_task(const Queries& q, const Unit& unit, const Task& task, const CacheView<C>& k_cache,
              const CacheView<C>& v_cache, float* partials) {
  const int64_t size = q.dim + kStateExtra, rows = (unit.last - unit.first) * q.group;
  const bool alone = partials == nullptr;
  thread_local std::vector<float> memory;
  float* k_room = scratch(memory, 2 * kChunk * q.dim + (rows + 1) * size);
  float* v_room = k_room + kChunk * q.dim;
  float* states = v_room + kChunk * q.dim;
  float* part = states + rows * size;
  const float *k_rows[kChunk], *v_rows[kChunk], *k_own[kChunk], *v_own[kChunk];
  const int32_t* table = q.tables + unit.request * q.table_width;
  for (int64_t r = 0; alone && r < rows; ++r) clear_state(states + r * size, q.dim);
  for (int64_t number = task.first_chunk; number < task.last_chunk; ++number) {
    const int64_t chunk = unit.chunk(number);
    const Seen all = q.seen(unit.request, unit.first, unit.last - 1, chunk);
    load(k_cache, table, chunk, all, unit.kv_head, k_room, k_rows);
    load(v_cache, table, chunk, all, unit.kv_head, v_room, v_rows);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t query = unit.first + r / q.group, head = unit.kv_head * q.group + r % q.group;
      const Seen seen = q.seen(unit.request, query, query, chunk);
      if (!seen.any()) continue;
      const bool direct = all.whole() && seen.whole();
      const int64_t count = direct ? seen.end : gather(seen, k_rows, k_own);
      if (!direct) gather(seen, v_rows, v_own);
      float* state = alone ? part : partials + (unit.partials + number * rows + r) * size;
      attend_chunk(q.row(unit.request, query, head), direct ? k_rows : k_own, direct ? v_rows : v_own, count, q.scale,
                   q.dim, state);
      if (alone) merge_states(states + r * size, state, q.dim);
    }
  }
  for (int64_t r = 0; alone && r < rows; ++r) {
    finish(q, unit, unit.first + r / q.group, unit.kv_head * q.group + r % q.group, states + r * size);
  }
}

struct Plan {
  std::vector<Unit> units;
  std::vector<Task> tasks;
  int64_t partial_states = 0;
  int64_t products = 0;  // about how many multiplications
};

inline Plan plan(const Queries& q, int64_t requests, int64_t kv_heads) {
  Plan p;
  const int64_t block = std::max<int64_t>(4, kTaskRows / q.group);
  const bool few = requests * kv_heads < kTasksPerThread * at::get_num_threads();
  for (int64_t b = 0; b < requests; ++b) {
    // the last queries see the most keys: started first, they do not end up alone
    for (int64_t last = q.count(b); last > 0; last -= block) {
      const int64_t first = std::max<int64_t>(0, last - block), rows = (last - first) * q.group;
      const auto [hidden_first, hidden_last] = q.hidden_chunks(b, first);
      const int64_t total = std::max<int64_t>(1, (q.position(b, last - 1) + kChunk) / kChunk);
      const int64_t chunks = total - (hidden_last - hidden_first);
      const bool split = few && q.count(b) <= block && chunks > 1;
      const auto unit = static_cast<int64_t>(p.units.size());
      for (int64_t h = 0; h < kv_heads; ++h) {
        p.units.push_back({b, h, first, last, chunks, hidden_first, hidden_last, split ? p.partial_states : -1});
        if (split) p.partial_states += chunks * rows;
      }
      // a chunk's heads in a row: they share cache lines and pages
      for (int64_t c = 0; c < chunks; c += split ? 1 : chunks) {
        for (int64_t h = 0; h < kv_heads; ++h) p.tasks.push_back({unit + h, c, split ? c + 1 : chunks});
      }
      p.products += kv_heads * chunks * kChunk * rows * q.dim;
    }
  }
  return p;
}

template <typename C>
void run(const Queries& q, int64_t requests, const CacheView<C>& k_cache, const CacheView<C>& v_cache) {
  const Plan p = plan(q, requests, k_cache.num_heads);
  const auto partials = std::make_unique_for_overwrite<float[]>(p.partial_states * (q.dim + kStateExtra));
  std::vector<std::atomic<int64_t>> done(p.units.size());
  for_each_task(static_cast<int64_t>(p.tasks.size()), p.products >= kSharedProducts, [&](int64_t index) {
    const Task& task = p.tasks[index];
    const Unit& unit = p.units[task.unit];
    run_task(q, unit, task, k_cache, v_cache, unit.partials < 0 ? nullptr : partials.get());
    if (unit.partials >= 0 && done[task.unit].fetch_add(1) + 1 == unit.chunks) merge_chunks(q, unit, partials.get());
  });
}

inline void check_lengths(const Queries& q, int64_t requests, int64_t tokens, int64_t num_blocks, int64_t block_size) {
  CHECK_VALUE(q.starts[0] == 0, "cu_seqlens_q must begin with 0, not ", q.starts[0]);
  for (int64_t b = 0; b < requests; ++b) {
    CHECK_VALUE(q.count(b) >= 0 && q.ends[b] <= tokens, "cu_seqlens_q must rise to at most ", tokens,
                ", the rows of q; request ", b, " ends at ", q.ends[b]);
    const int64_t blocks = (q.seq_lens[b] + block_size - 1) / block_size;
    CHECK_VALUE(blocks <= q.table_width, "request ", b, " has seq_len ", q.seq_lens[b], ", which needs ", blocks,
                " blocks of ", block_size, ", but block_tables has ", q.table_width, " columns");
    for (int64_t i = 0; i < blocks; ++i) {
      const bool hidden = q.window > 0 && i * block_size >= q.sinks && (i + 1) * block_size <= q.window_start(b, 0);
      if (hidden) continue;
      const int64_t id = q.tables[b * q.table_width + i];
      CHECK_VALUE(id >= 0 && id < num_blocks, "block ", id, " of request ", b, " lies outside the cache's ",
                  num_blocks, " blocks");
    }
  }
}

inline at::Tensor as_int32(const at::Tensor& t, at::IntArrayRef sizes, const char* name) {
  CHECK_VALUE(t.scalar_type() == at::kInt && t.sizes() == sizes, name, " must be int32 ", sizes, ", not ",
              t.scalar_type(), " ", t.sizes());
  return contiguous(t);
}

}  // namespace strata

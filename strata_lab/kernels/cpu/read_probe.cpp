// strata::read_probe: reads a tensor as fast as this machine can, the way the kernels read weights. The time it takes
// is the roofline of a product that has to read as much.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "parallel.h"
#include "refuse.h"
#include "simd.h"

namespace strata {
namespace {

constexpr int64_t kChunkBytes = 65536;  // what a thread takes at a time
constexpr int64_t kLineBytes = 64;

// The sum of all whole cache lines as 32-bit numbers, so that no read can be left out.
int64_t read_probe(const at::Tensor& data) {
  CHECK_VALUE(data.is_contiguous(), "read_probe needs a contiguous tensor");
  const auto* bytes = static_cast<const uint8_t*>(data.const_data_ptr());
  const int64_t size = data.numel() * data.element_size() / kLineBytes * kLineBytes;
  std::atomic<int64_t> total{0};
  for_each_task((size + kChunkBytes - 1) / kChunkBytes, true, [&](int64_t chunk) {
    const int64_t stop = std::min(size, (chunk + 1) * kChunkBytes);
    __m256i even = _mm256_setzero_si256(), odd = even;
    for (int64_t at = chunk * kChunkBytes; at < stop; at += kLineBytes) {
      prefetch(bytes, at + kIntAheadBytes);
      even = _mm256_add_epi32(even, load256(bytes + at));
      odd = _mm256_add_epi32(odd, load256(bytes + at + 32));
    }
    alignas(32) int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi32(even, odd));
    int64_t sum = 0;
    for (const int32_t lane : lanes) sum += lane;
    total += sum;
  });
  return total;
}

TORCH_LIBRARY_FRAGMENT(STRATA_NAMESPACE, m) { m.def("read_probe(Tensor data) -> int"); }

TORCH_LIBRARY_IMPL(STRATA_NAMESPACE, CPU, m) { m.impl("read_probe", &read_probe); }

}  // namespace
}  // namespace strata

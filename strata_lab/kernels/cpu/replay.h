// Capture and replay: what a CUDA graph is for a GPU, for the operators of this folder.
//
// An operator checks its arguments, allocates its result and hands the work to `perform`. While a capture is open on the
// thread, the work is kept as well: same functions, same addresses. Replaying calls it again, in order, with no Python,
// no dispatcher, no checks and no allocation in between; what changes from step to step is read from the inputs' memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

#include "refuse.h"

namespace strata {

// The program that a capture on this thread writes to; null when none is open.
std::vector<std::function<void()>>*& open_capture();

// `tensor` itself if it is contiguous, else a copy; a copy made while capturing would be stale at every replay.
inline at::Tensor contiguous(const at::Tensor& tensor) {
  CHECK_VALUE(!open_capture() || tensor.is_contiguous(), "a captured operator got a tensor ", tensor.sizes(),
              " with strides ", tensor.strides(), ", which it would have to copy; make it contiguous");
  return tensor.contiguous();
}

// Do `work` now, and keep it if a capture is open. It must own (by value) every tensor whose memory it uses.
template <typename Work>
void perform(Work work) {
  work();
  if (open_capture()) open_capture()->emplace_back(std::move(work));
}

}  // namespace strata

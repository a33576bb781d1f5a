// Sharing tasks between torch's own threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace strata {

// Calls run(task) once for each task in [0, tasks). Threads take the next task when they are free, so a thread that the
// system holds up delays the others little. Which thread runs a task must not change its result.
template <typename Run>
void for_each_task(int64_t tasks, bool worth_sharing, const Run& run) {
  const int64_t threads = worth_sharing && !at::in_parallel_region() ? std::min<int64_t>(at::get_num_threads(), tasks) : 1;
  if (threads <= 1) {
    for (int64_t task = 0; task < tasks; ++task) run(task);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t task = next++; task < tasks; task = next++) run(task);
  });
}

}  // namespace strata

// Sharing tasks between torch's own threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace strata {

// Calls run(task) once for each task in [0, tasks). Each thread has a range of its own, so it reads weights in one
// stream; done with it, it takes tasks from the others' ranges, so a thread that the system holds up delays them
// little. Which thread runs a task must not change its result, and none may throw: what can be wrong is checked before.
template <typename Run>
void for_each_task(int64_t tasks, bool worth_sharing, const Run& run) {
  constexpr int64_t kMaxThreads = 64;
  struct alignas(64) Range {  // a cache line each
    std::atomic<int64_t> next;
    int64_t end;
  };
  const int64_t available = std::min<int64_t>(at::get_num_threads(), kMaxThreads);
  const int64_t threads = worth_sharing && !at::in_parallel_region() ? std::min(available, tasks) : 1;
  if (threads <= 1) {
    for (int64_t task = 0; task < tasks; ++task) run(task);
    return;
  }
  Range ranges[kMaxThreads];
  for (int64_t i = 0; i < threads; ++i) {
    ranges[i].next.store(tasks * i / threads, std::memory_order_relaxed);
    ranges[i].end = tasks * (i + 1) / threads;
  }
  const auto work = [&](int64_t first_range) {
    for (int64_t i = 0; i < threads; ++i) {
      Range& range = ranges[(first_range + i) % threads];
      for (int64_t task = range.next++; task < range.end; task = range.next++) run(task);
    }
  };
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i);
  });
}

}  // namespace strata

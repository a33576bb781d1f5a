// Opens, closes, replays and frees captures (see replay.h). Handles are plain numbers so that they pass through torch.

#include "replay.h"

#include <torch/library.h>

#include <memory>
#include <mutex>
#include <unordered_map>

namespace strata {

std::vector<std::function<void()>>*& open_capture() {
  static thread_local std::vector<std::function<void()>>* program = nullptr;
  return program;
}

namespace {

using Program = std::vector<std::function<void()>>;

struct Captures {
  std::mutex lock;
  std::unordered_map<int64_t, std::shared_ptr<Program>> programs;
  int64_t last = 0;
};

Captures& captures() {
  static Captures all;
  return all;
}

std::shared_ptr<Program> program(int64_t handle) {
  const std::lock_guard<std::mutex> guard(captures().lock);
  const auto found = captures().programs.find(handle);
  CHECK_VALUE(found != captures().programs.end(), "capture ", handle, " does not exist or was freed");
  return found->second;
}

int64_t capture_begin() {
  CHECK_VALUE(!open_capture(), "a capture is open on this thread already; end it first");
  const std::lock_guard<std::mutex> guard(captures().lock);
  const int64_t handle = ++captures().last;
  open_capture() = (captures().programs[handle] = std::make_shared<Program>()).get();
  return handle;
}

int64_t capture_end() {
  CHECK_VALUE(open_capture(), "no capture is open on this thread");
  const int64_t operators = static_cast<int64_t>(open_capture()->size());
  open_capture() = nullptr;
  return operators;
}

void replay(int64_t handle) {
  for (const auto& work : *program(handle)) work();
}

void capture_free(int64_t handle) {
  const std::lock_guard<std::mutex> guard(captures().lock);
  captures().programs.erase(handle);
}

TORCH_LIBRARY_FRAGMENT(STRATA_NAMESPACE, m) {
  m.def("capture_begin() -> int", &capture_begin);
  m.def("capture_end() -> int", &capture_end);
  m.def("replay(int handle) -> ()", &replay);
  m.def("capture_free(int handle) -> ()", &capture_free);
}

}  // namespace
}  // namespace strata

// What an operator says of arguments that it cannot take: ValueError or IndexError in Python.
//
// torch's macros put a message together with streams and take a stack trace wherever they throw. An operator needs
// neither, and on one machine (another g++, torch 2.11) each of its refusals ended the process. Here a sentence is put
// together from strings and thrown by one function, from the thread that called the operator: before its work is
// shared, never within.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>

namespace strata {

[[noreturn, gnu::cold]] void refuse_value(const std::string& sentence);
[[noreturn, gnu::cold]] void refuse_index(const std::string& sentence);

inline void add_words(std::string& to, const char* words) { to += words; }
inline void add_words(std::string& to, int64_t number) { to += std::to_string(number); }
inline void add_words(std::string& to, c10::ScalarType dtype) { to += c10::toString(dtype); }

inline void add_words(std::string& to, c10::IntArrayRef sizes) {
  const char* before = "[";
  for (const int64_t size : sizes) {
    add_words(to, before);
    add_words(to, size);
    before = ", ";
  }
  to += sizes.empty() ? "[]" : "]";
}

template <typename... Parts>
std::string sentence(const Parts&... parts) {
  std::string made;
  (add_words(made, parts), ...);
  return made;
}

}  // namespace strata

// Refuse with the sentence that the other arguments make, unless the condition holds.
#define CHECK_VALUE(condition, ...)                                                            \
  do {                                                                                         \
    if (!(condition)) [[unlikely]] ::strata::refuse_value(::strata::sentence(__VA_ARGS__));    \
  } while (false)
#define CHECK_INDEX(condition, ...)                                                            \
  do {                                                                                         \
    if (!(condition)) [[unlikely]] ::strata::refuse_index(::strata::sentence(__VA_ARGS__));    \
  } while (false)

// Sanitizers make tests take 5 to 30 times as long. Loops over random cases and lengths that only add more of the same
// are shorter under them; what is asserted stays, and so does every path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace keyhole::test {

#ifdef KEYHOLE_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// GCC defines a macro for it, clang has a feature.
#if defined(__SANITIZE_THREAD__)
#define KEYHOLE_THREAD_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define KEYHOLE_THREAD_SANITIZED 1
#endif
#endif

/// Defined with ThreadSanitizer, the slowest of them.
#ifdef KEYHOLE_THREAD_SANITIZED
inline constexpr bool kThreadSanitized = true;
#else
inline constexpr bool kThreadSanitized = false;
#endif

/// Skips a test that asks how good an answer is and whose threads are those of other tests: with ThreadSanitizer it
/// takes ten times as long and tells nothing new.
#ifdef KEYHOLE_THREAD_SANITIZED
#define KEYHOLE_SKIP_WITH_TSAN() GTEST_SKIP() << "what it asks is not a matter of threads"
#else
#define KEYHOLE_SKIP_WITH_TSAN() static_cast<void>(0)
#endif

/// Skips a test that asks how good an answer is, in a program that the release build runs, too: its memory accesses
/// are those of the tests beside it.
#define KEYHOLE_SKIP_WITH_SANITIZERS()                                                           \
  do {                                                                                           \
    if (keyhole::test::kSanitized) GTEST_SKIP() << "what it asks is asked of the release build"; \
  } while (false)

/// Gives `all`, or under a sanitizer `fewer`.
constexpr uint32_t unless_sanitized(uint32_t all, uint32_t fewer) {
  return kSanitized ? fewer : all;
}

/// Gives `all`, or under a sanitizer every n-th of them.
template <class T>
std::vector<T> unless_sanitized(std::vector<T> all, size_t n) {
  if (!kSanitized) return all;
  std::vector<T> some;
  for (size_t i = 0; i < all.size(); i += n) some.push_back(all[i]);
  return some;
}

/// Gives `all`, or with ThreadSanitizer the first and every n-th after it, for kinds whose threads are those of the
/// others.
template <class T>
std::vector<T> unless_thread_sanitized(std::vector<T> all, size_t n) {
  return kThreadSanitized ? unless_sanitized(std::move(all), n) : all;
}

/// How many random cases a property test tries: under a sanitizer a quarter of n.
constexpr uint32_t cases(uint32_t n) { return unless_sanitized(n, (n + 3) / 4); }
/// How many random cases a test tries that takes a sanitizer seconds for each, or that every index type runs: an
/// eighth of n.
constexpr uint32_t few_cases(uint32_t n) { return unless_sanitized(n, (n + 7) / 8); }

}  // namespace keyhole::test

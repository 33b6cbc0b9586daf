#pragma once

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <concepts>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "longspan/core/detail/check.h"

/// Laws over many cases. A law is a function of a case that uses the EXPECT
/// and ASSERT macros; a case knows smaller cases like itself and prints
/// itself. A case that breaks the law is shrunk before it is reported, and a
/// random one comes with the seed that draws it again. A law that was asked
/// about no case at all is a failure, not a success.
namespace longspan::test {

/// Random choices; equal seeds give equal choices on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : bits_(seed) {}

  /// Both ends included.
  int64_t between(int64_t low, int64_t high) {
    const auto choices = static_cast<uint64_t>(high - low) + 1;
    return low + static_cast<int64_t>(bits_() % choices);
  }

  bool one_in(int64_t n) { return between(1, n) == 1; }

  template <class T>
  T pick(const std::vector<T>& choices) {
    const int64_t last = std::ssize(choices) - 1;
    return choices[static_cast<std::size_t>(between(0, last))];
  }

  template <class T>
  void shuffle(std::vector<T>& values) {
    for (std::size_t i = values.size(); i > 1; --i) {
      const auto other = between(0, static_cast<int64_t>(i) - 1);
      std::swap(values[i - 1], values[static_cast<std::size_t>(other)]);
    }
  }

 private:
  std::mt19937_64 bits_;
};

template <class Case>
concept Shrinkable = requires(const Case& value) {
  { value.smaller() } -> std::same_as<std::vector<Case>>;
  { value.to_string() } -> std::convertible_to<std::string>;
};

/// Whether the law in progress on this thread passed its case over.
inline thread_local bool case_is_passed_over = false;

/// For a law to call before it returns early: it says nothing of this case, so
/// the case does not count.
inline void pass_over() {
  case_is_passed_over = true;
}

/// The first failure of a law in one case, or "" where the law holds. The
/// failure is kept from GoogleTest.
template <class Case, class Law>
std::string failure_of(const Case& value, const Law& law) {
  using Reporter = ::testing::ScopedFakeTestPartResultReporter;
  ::testing::TestPartResultArray results;
  case_is_passed_over = false;
  {
    Reporter keep(Reporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
    try {
      law(value);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "the law threw: " << error.what();
    }
  }
  for (int i = 0; i < results.size(); ++i) {
    const ::testing::TestPartResult& result = results.GetTestPartResult(i);
    if (!result.failed()) continue;
    const char* file = result.file_name();
    return join(file == nullptr ? "?" : file, ":", result.line_number(), "\n",
                result.message());
  }
  return "";
}

/// A small case that still breaks the law: replaces the case by a smaller one
/// for as long as one of those breaks the law too.
template <Shrinkable Case, class Law>
Case shrunk(Case failing, const Law& law) {
  int tries = 5000;
  for (bool again = true; again;) {
    again = false;
    for (const Case& smaller : failing.smaller()) {
      if (--tries < 0) return failing;
      if (smaller.to_string() == failing.to_string()) continue;
      if (failure_of(smaller, law).empty()) continue;
      failing = smaller;
      again = true;
      break;
    }
  }
  return failing;
}

/// Whether the law holds; otherwise fails the test with a small case.
template <Shrinkable Case, class Law>
bool holds(const Case& value, const Law& law, const std::string& origin) {
  if (failure_of(value, law).empty()) return true;
  const Case small = shrunk(value, law);
  ADD_FAILURE() << origin << "\nsmallest failing case: " << small.to_string()
                << "\n"
                << failure_of(small, law);
  return false;
}

/// Fails the test where a law said nothing of any case.
inline void expect_some_counted(std::size_t counted, std::size_t cases) {
  EXPECT_GT(counted, 0U) << "the law passed over all of " << cases << " cases";
}

/// Every listed case, up to the first that breaks the law.
template <Shrinkable Case, class Law>
void for_each(const std::vector<Case>& cases, const Law& law) {
  std::size_t counted = 0;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    if (!holds(cases[i], law, join("case ", i, " of ", cases.size()))) return;
    if (!case_is_passed_over) ++counted;
  }
  expect_some_counted(counted, cases.size());
}

/// The seed of the first random case; LONGSPAN_SEED chooses another.
inline uint64_t first_seed() {
  const char* text = std::getenv("LONGSPAN_SEED");
  return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
}

/// `count` random cases, each with its own seed.
template <class Draw, class Law>
void for_all(int count, const Draw& draw, const Law& law) {
  std::size_t counted = 0;
  for (int i = 0; i < count; ++i) {
    const uint64_t seed = first_seed() + static_cast<uint64_t>(i);
    Random random(seed);
    if (!holds(draw(random), law, join("LONGSPAN_SEED=", seed))) return;
    if (!case_is_passed_over) ++counted;
  }
  expect_some_counted(counted, static_cast<std::size_t>(count));
}

}  // namespace longspan::test

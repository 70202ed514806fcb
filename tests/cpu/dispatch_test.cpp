// The choice of the level that runs: the best by default, the forced one where it is named, and clear refusals.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "cpu/kernels.h"
#include "tests/scoped_variable.h"

namespace keyhole::cpu::test {
namespace {

/// Sets KEYHOLE_CPU for a scope.
struct ForcedLevel : keyhole::test::ScopedVariable {
  explicit ForcedLevel(const char* value) : ScopedVariable("KEYHOLE_CPU", value) {}
};

TEST(Dispatch, ScalarIsAlwaysThereAndLevelsRise) {
  const auto levels = available_levels();
  ASSERT_FALSE(levels.empty());
  EXPECT_EQ(levels.front(), Level::scalar);
  for (size_t i = 1; i < levels.size(); ++i) EXPECT_LT(levels[i - 1], levels[i]);
}

// All that follows the name is pointers to functions, whose types differ and whose sizes do not.
using AnyKernel = void (*)();
constexpr size_t kFirstKernel = offsetof(Kernels, score);
static_assert(kFirstKernel == offsetof(Kernels, name) + sizeof(const char*));
static_assert(sizeof(Kernels) == kFirstKernel + 38 * sizeof(AnyKernel),
              "is a new member a kernel?");

TEST(Dispatch, EveryLevelIsCompleteAndKnowsItself) {
  for (const Level level : available_levels()) {
    const Kernels* kernels = kernels_for(level);
    ASSERT_NE(kernels, nullptr);
    EXPECT_EQ(kernels->level, level);
    EXPECT_STREQ(kernels->name, level_name(level));
    const auto* const bytes = reinterpret_cast<const std::byte*>(kernels);
    for (size_t at = kFirstKernel; at < sizeof(Kernels); at += sizeof(AnyKernel)) {
      AnyKernel kernel = nullptr;
      std::memcpy(&kernel, bytes + at, sizeof kernel);
      EXPECT_NE(kernel, nullptr) << "of " << kernels->name << ", at byte " << at;
    }
  }
}

TEST(Dispatch, TheBestLevelIsTheDefault) {
  const ForcedLevel unset(nullptr);
  EXPECT_EQ(select_kernels().level, available_levels().back());
  const ForcedLevel empty("");
  EXPECT_EQ(select_kernels().level, available_levels().back());
}

// No level shares code with scalar, so a forced level that is not really used would show in the pointers.
TEST(Dispatch, AForcedLevelIsReallyUsed) {
  for (const Level level : available_levels()) {
    const ForcedLevel forced(level_name(level));
    const Kernels& kernels = select_kernels();
    EXPECT_EQ(&kernels, kernels_for(level));
    EXPECT_EQ(&kernels, &select_kernels(level_name(level)));
    if (level == Level::scalar) continue;
    const Kernels& scalar = *kernels_for(Level::scalar);
    EXPECT_NE(kernels.score_i8, scalar.score_i8);
    for (int t = 0; t < 3; ++t) {
      EXPECT_NE(kernels.attend[t], scalar.attend[t]);
      EXPECT_NE(kernels.score[t], scalar.score[t]);
    }
  }
}

TEST(Dispatch, TheArgumentWinsOverTheEnvironment) {
  const ForcedLevel forced("no such level");
  EXPECT_EQ(select_kernels("scalar").level, Level::scalar);
}

TEST(Dispatch, UnknownNamesAreRefusedWithWhatIsAllowed) {
  for (const char* name : {"AVX2", "avx", "avx512 ", "sse", "scalar,avx2"}) {
    const ForcedLevel forced(name);
    try {
      (void)select_kernels();
      FAIL() << name << " was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), Status::invalid_argument);
      const std::string text = e.what();
      EXPECT_NE(text.find(name), std::string::npos) << text;
      for (const Level level : available_levels()) {
        EXPECT_NE(text.find(level_name(level)), std::string::npos) << text;
      }
    }
  }
}

TEST(Dispatch, LevelsThatTheMachineLacksAreRefusedAsUnsupported) {
  for (const Level level : {Level::avx2, Level::avx512, Level::avx512vnni}) {
    if (kernels_for(level) != nullptr) continue;
    try {
      (void)select_kernels(level_name(level));
      FAIL() << level_name(level) << " was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), Status::unsupported);
    }
  }
}

}  // namespace
}  // namespace keyhole::cpu::test

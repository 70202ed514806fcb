// What copies hold together: values against a model that copies at once, counts over families, threads.
#include "cpu/shared.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

#include "tests/sanitized.h"

namespace keyhole::cpu {
namespace {

using test::unless_sanitized;

/// Numbers that know how often they were copied and how many are alive.
struct Numbers {
  explicit Numbers(std::vector<int> v) : values(std::move(v)) { ++alive; }
  Numbers(const Numbers& o) : values(o.values) {
    if (fails) throw std::bad_alloc();
    ++copies;
    ++alive;
  }
  Numbers(Numbers&& o) noexcept : values(std::move(o.values)) { ++alive; }
  Numbers& operator=(const Numbers&) = delete;
  Numbers& operator=(Numbers&&) = delete;
  ~Numbers() { --alive; }
  [[nodiscard]] size_t bytes() const { return values.size() * sizeof(int); }

  std::vector<int> values;
  static inline std::atomic<int> copies{0}, alive{0};
  static inline bool fails = false;
};

// A copy may find no memory, also where it is a member's: what says that it throws nothing would end the program.
struct HoldsOne {
  Shared<Numbers> held;
};
static_assert(!std::is_nothrow_copy_assignable_v<HoldsOne>);
static_assert(std::is_nothrow_move_assignable_v<HoldsOne>);

TEST(Shared, FamiliesReadWhatEachHasWrittenAndCountItOnce) {
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    std::vector<Shared<Numbers>> family;
    std::vector<std::vector<int>> model;
    for (int i = 0; i < 60; ++i) {
      const size_t at = family.empty() ? 0 : random() % family.size();
      switch (family.empty() ? 0 : random() % 6) {
        case 0:
          model.push_back({static_cast<int>(random() % 100)});
          family.emplace_back(Numbers(model.back()));
          break;
        case 1:
        case 2: {
          Shared<Numbers> copy(family[at]);
          EXPECT_TRUE(copy.is_shared() && !copy.is_first() && copy.get() == family[at].get());
          family.push_back(std::move(copy));
          model.push_back(std::vector<int>(model[at]));
          break;
        }
        case 3: {
          const bool copies = family[at].is_shared();
          const int before = Numbers::copies;
          family[at].own().values.push_back(i);
          model[at].push_back(i);
          EXPECT_EQ(Numbers::copies - before, copies ? 1 : 0);
          EXPECT_TRUE(!family[at].is_shared() && family[at].is_first());
          break;
        }
        case 4: {
          const size_t from = random() % family.size();
          family[at] = family[from];
          model[at] = std::vector<int>(model[from]);
          break;
        }
        default:
          family.erase(family.begin() + static_cast<ptrdiff_t>(at));
          model.erase(model.begin() + static_cast<ptrdiff_t>(at));
      }
      size_t counted = 0, held = 0;
      std::vector<const Numbers*> distinct;
      for (size_t f = 0; f < family.size(); ++f) {
        ASSERT_EQ(family[f]->values, model[f]);
        counted += family[f]->bytes() - bytes_of_others(family[f]);
        if (std::find(distinct.begin(), distinct.end(), family[f].get()) != distinct.end())
          continue;
        distinct.push_back(family[f].get());
        held += family[f]->bytes();
      }
      ASSERT_EQ(counted, held);
      ASSERT_EQ(static_cast<size_t>(Numbers::alive), distinct.size());
    }
  }
  EXPECT_EQ(Numbers::alive, 0);
}

TEST(Shared, ACopyThatFailsLeavesAllAsItWas) {
  Shared<Numbers> one(Numbers({1, 2, 3}));
  Shared<Numbers> other(one);
  Numbers::fails = true;
  try {
    (void)other.own();
    ADD_FAILURE() << "there was memory";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::out_of_memory);
    EXPECT_NE(std::string(e.what()).find("shares"), std::string::npos) << e.what();
  }
  EXPECT_EQ(one.get(), other.get());
  EXPECT_TRUE(one.is_first() && !other.is_first());
  (void)Shared<Numbers>(std::move(one));  // the other one alone is left, and needs no memory
  other.own().values.push_back(4);
  Numbers::fails = false;
  EXPECT_EQ(other->values, (std::vector<int>{1, 2, 3, 4}));
  EXPECT_TRUE(other.is_first());
}

TEST(Shared, NothingIsHeldByDefault) {
  const Shared<Numbers> none;
  const Shared<Numbers> copy(none);  // NOLINT: a copy of nothing is what is tested
  EXPECT_FALSE(copy);
  EXPECT_EQ(copy.get(), nullptr);
  EXPECT_EQ(bytes_of_others(copy), 0U);
}

// Under ThreadSanitizer: what one thread has read before it let go, the other one may overwrite in place.
TEST(Shared, ThreadsChangeTheirsWhileOthersReadAndLetGo) {
  std::atomic<int> wrong{0};
  int in_place = 0;
  for (uint32_t round = 0; round < unless_sanitized(400, 100); ++round) {
    Shared<Numbers> one(Numbers(std::vector<int>(64, 7))), two(one);
    const int before = Numbers::copies;
    const auto work = [&wrong](Shared<Numbers>& mine, int number) {
      const Shared<Numbers> again(mine);
      for (const int x : again->values) wrong += x == 7 ? 0 : 1;
      Shared<Numbers> changed(std::move(mine));
      (void)Shared<Numbers>(again);
      std::fill_n(changed.own().values.begin(), 64, number);
      for (const int x : changed->values) wrong += x == number ? 0 : 1;
      for (const int x : again->values) wrong += x == 7 ? 0 : 1;
    };
    const auto last = [&wrong](Shared<Numbers>& mine, int number) {
      for (const int x : mine->values) wrong += x == 7 ? 0 : 1;
      std::fill_n(mine.own().values.begin(), 64, number);
      (void)mine.is_first();
      for (const int x : mine->values) wrong += x == number ? 0 : 1;
      mine = {};
    };
    std::thread thread([&] { round % 2 == 0 ? work(one, 1) : last(one, 1); });
    last(two, 2);
    thread.join();
    if (round % 2 != 0 && Numbers::copies - before < 2) ++in_place;
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(in_place, 0);
  EXPECT_EQ(Numbers::alive, 0);
}

}  // namespace
}  // namespace keyhole::cpu

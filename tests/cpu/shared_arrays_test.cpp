// Arrays whose first bytes copies share: every object holds what was written to it, whatever others do; every page is
// there once, counted once, and goes back when its last reader goes.
#include "cpu/shared_arrays.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/sanitized.h"

namespace keyhole::cpu::test {
namespace {

using keyhole::test::kSanitized;
using keyhole::test::unless_sanitized;

constexpr size_t kPage = 4096;

/// A figure of /proc, in bytes; 0: the system does not say.
size_t system_bytes(const char* file, const std::string& name) {
  std::ifstream in(file);
  std::string word;
  while (in >> word) {
    size_t kib = 0;
    if (word == name && in >> kib) return kib * 1024;
  }
  return 0;
}
/// What this process has, each page once however many addresses it has.
size_t physical_bytes() { return system_bytes("/proc/self/smaps_rollup", "Pss:"); }
/// Whether shared memory of the whole system comes to be less than this; other programs have some, too.
bool comes_below(size_t shared_bytes) {
  for (int i = 0; i < 50; ++i) {
    if (system_bytes("/proc/meminfo", "Shmem:") < shared_bytes) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return false;
}

/// A SharedArrays beside what must be in it.
class Member {
 public:
  Member(size_t groups, size_t arrays, size_t array_bytes)
      : arrays_(groups, arrays, array_bytes),
        groups_(groups),
        count_(arrays),
        array_bytes_(array_bytes),
        expected_(groups * arrays) {}

  [[nodiscard]] size_t held(size_t group) const { return expected_[group * count_].size(); }

  void append(size_t group, size_t n, std::mt19937_64& random) {
    const size_t from = held(group);
    n = std::min(n, array_bytes_ - from);
    arrays_.prepare(group, from, from + n);
    for (size_t a = 0; a < count_; ++a) {
      std::vector<std::byte>& expected = expected_[group * count_ + a];
      expected.resize(from + n);
      for (size_t i = 0; i < n; i += sizeof(uint64_t)) {
        const uint64_t word = random();
        std::memcpy(expected.data() + from + i, &word, std::min(sizeof word, n - i));
      }
      std::copy_n(expected.data() + from, n, arrays_.at(group, a) + from);
    }
  }
  /// Bytes from `from` on are about to be others, but stay until they are cut.
  void prepare_in_place(size_t group, size_t from, size_t n) {
    if (from >= held(group)) return;
    arrays_.prepare(group, from, std::min(from + n, array_bytes_), nullptr, held(group));
    EXPECT_FALSE(arrays_.is_shared(group, from)) << "from byte " << from;
  }
  void truncate(size_t group, size_t n) {
    arrays_.truncate(group, n);
    for (size_t a = 0; a < count_; ++a) expected_[group * count_ + a].resize(n);
  }
  [[nodiscard]] std::unique_ptr<Member> fork() const {
    auto child = std::make_unique<Member>(groups_, count_, array_bytes_);
    for (size_t g = 0; g < groups_; ++g) child->arrays_.share(g, arrays_, held(g));
    child->expected_ = expected_;
    return child;
  }
  [[nodiscard]] bool is_right() const {
    for (size_t i = 0; i < expected_.size(); ++i) {
      const std::vector<std::byte>& e = expected_[i];
      // memcmp: sanitizers check its ranges, not every byte.
      if (!e.empty() && std::memcmp(e.data(), arrays_.at(i / count_, i % count_), e.size()) != 0) {
        return false;
      }
    }
    return true;
  }
  [[nodiscard]] SharedArrays::Bytes bytes() const {
    SharedArrays::Bytes all;
    for (size_t g = 0; g < groups_; ++g) {
      const SharedArrays::Bytes b = arrays_.bytes(g, held(g));
      EXPECT_EQ(b.counted + b.counted_by_others, held(g) * count_);
      all.counted += b.counted;
      all.counted_by_others += b.counted_by_others;
    }
    return all;
  }
  [[nodiscard]] const SharedArrays& arrays() const { return arrays_; }
  /// Whether what both hold of the bytes that they have in common are the same bytes.
  [[nodiscard]] bool agrees_with(const Member& other) const {
    for (size_t i = 0; i < expected_.size(); ++i) {
      const size_t g = i / count_;
      const size_t common =
          std::min({arrays_.common_bytes(g, other.arrays_), held(g), other.held(g)});
      if (common == 0) continue;
      if (std::memcmp(expected_[i].data(), other.expected_[i].data(), common) != 0) return false;
    }
    return true;
  }

 private:
  SharedArrays arrays_;
  size_t groups_, count_, array_bytes_;
  std::vector<std::vector<std::byte>> expected_;
};

TEST(SharedArrays, EachHoldsItsOwnWhateverOthersDo) {
  size_t forked = 0, in_common = 0;  // pages
  for (uint64_t seed = 1; seed <= unless_sanitized(40, 6); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
    const size_t groups = 1 + below(2), arrays = 1 + below(3);
    // Whole huge pages, or fewer.
    const size_t array_bytes = below(8) == 0 ? size_t{4} << 20 : kPage * (2 + below(30));
    std::vector<std::unique_ptr<Member>> family;
    family.push_back(std::make_unique<Member>(groups, arrays, array_bytes));
    for (int i = 0; i < 80; ++i) {
      Member& m = *family[below(family.size())];
      const size_t g = below(groups), held = m.held(g);
      switch (below(9)) {
        case 8: m.prepare_in_place(g, below(held + 1), 1 + below(9000)); break;
        case 0:
        case 1: m.append(g, 1 + below(array_bytes / 3), random); break;
        case 2: m.append(g, 1 + below(300), random); break;
        case 3: m.truncate(g, below(held + 1)); break;
        case 4: m.truncate(g, held - std::min(held, below(6000))); break;
        case 5: m.truncate(g, held / kPage * kPage); break;
        case 6:
          if (family.size() == 6) break;
          family.push_back(m.fork());
          EXPECT_LE(m.arrays().common_bytes(g, family.back()->arrays()), held);
          forked += held / kPage;
          in_common += m.arrays().common_bytes(g, family.back()->arrays()) / kPage;
          break;
        default:
          if (family.size() > 1)
            family.erase(family.begin() + static_cast<long>(below(family.size())));
      }
      for (size_t f = 0; f < family.size(); ++f) {
        ASSERT_TRUE(family[f]->is_right()) << "member " << f << " after call " << i;
        ASSERT_TRUE(family[f]->agrees_with(*family[below(family.size())]));
        const SharedArrays::Bytes bytes = family[f]->bytes();
        if (family.size() == 1) {
          ASSERT_EQ(bytes.counted_by_others, 0U) << "there are no others";
        }
      }
    }
  }
  EXPECT_EQ(in_common, forked);  // copies share all whole pages
}

TEST(SharedArrays, HaveEachPageOnceAndCountItOnce) {
  const size_t n = size_t{24} << 20;
  const auto make = [] { return std::make_unique<SharedArrays>(1, 2, size_t{32} << 20); };
  std::unique_ptr<SharedArrays> parent = make();
  parent->prepare(0, 0, n);
  for (size_t a = 0; a < 2; ++a) std::memset(parent->at(0, a), static_cast<int>(1 + a), n);
  const size_t before = physical_bytes();
  std::vector<std::unique_ptr<SharedArrays>> copies;
  for (int i = 0; i < 4; ++i) {
    copies.push_back(make());
    copies.back()->share(0, *parent, n);
    for (size_t a = 0; a < 2; ++a) {
      ASSERT_EQ(std::memcmp(parent->at(0, a), copies.back()->at(0, a), n), 0);
    }
    EXPECT_EQ(copies.back()->bytes(0, n).counted, 0U);
    EXPECT_EQ(copies.back()->bytes(0, n).counted_by_others, 2 * n);
  }
  EXPECT_EQ(parent->bytes(0, n).counted, 2 * n);
  const bool can_measure = before != 0 && !kSanitized;
  if (can_measure) {
    EXPECT_LT(physical_bytes(), before + n / 2) << "four copies";
  }
  // The next one counts what the first has left, and a page that all have left is given back.
  parent.reset();
  EXPECT_EQ(copies[0]->bytes(0, n).counted, 2 * n);
  EXPECT_EQ(copies[1]->bytes(0, n).counted, 0U);
  for (auto& copy : copies) copy->truncate(0, kPage);
  EXPECT_EQ(copies[0]->bytes(0, kPage).counted, 2 * kPage);
  EXPECT_EQ(copies[1]->bytes(0, kPage).counted_by_others, 2 * kPage);
  EXPECT_EQ(copies[3]->at(0, 1)[kPage - 1], std::byte{2});
  if (can_measure) {
    EXPECT_LT(physical_bytes(), before - n);
  }
}

TEST(SharedArrays, GiveBackWhatOnlyTheirOwnerHad) {
  if (kSanitized) return;
  const size_t n = size_t{256} << 20;
  const size_t before = system_bytes("/proc/meminfo", "Shmem:");
  auto parent = std::make_unique<SharedArrays>(1, 1, n);
  parent->prepare(0, 0, n);
  std::fill_n(parent->at(0, 0), n, std::byte{1});
  SharedArrays child(1, 1, n);
  child.share(0, *parent, 3 * kPage);
  parent.reset();
  EXPECT_EQ(child.at(0, 0)[3 * kPage - 1], std::byte{1});
  EXPECT_TRUE(comes_below(before + n / 2));
}

TEST(SharedArrays, AreUsedByDifferentThreadsAtOnce) {
  std::mt19937_64 random(1);
  auto first = std::make_unique<Member>(2, 2, size_t{1} << 20);
  for (size_t g = 0; g < 2; ++g) first->append(g, 300'001, random);
  std::vector<std::unique_ptr<Member>> family;
  for (int i = 0; i < 4; ++i) family.push_back(first->fork());
  family.push_back(std::move(first));
  std::vector<std::thread> threads;
  for (size_t t = 0; t < family.size(); ++t) {
    threads.emplace_back([t, member = std::move(family[t])]() mutable {
      std::mt19937_64 own(t);
      for (int i = 0; i < 60; ++i) {
        const size_t g = own() % 2, held = member->held(g);
        switch (own() % 5) {
          case 0: member->truncate(g, held - std::min<size_t>(held, own() % 100'000)); break;
          case 1: member = member->fork(); break;
          default: member->append(g, own() % 40'000, own);
        }
        ASSERT_TRUE(member->is_right());
        (void)member->bytes();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// An audit or a build reads the rows of a session that is cut within a shared page and goes on: what is kept of the
// page stays readable while the page is exchanged for another.
TEST(SharedArrays, WhatIsKeptIsReadWhilePagesAreExchanged) {
  const size_t rounds = unless_sanitized(200, 50), kept = kPage / 2;
  for (size_t i = 0; i < rounds; ++i) {
    SharedArrays arrays(1, 2, 2 * kPage);
    arrays.prepare(0, 0, 2 * kPage);
    for (size_t a = 0; a < 2; ++a) std::fill_n(arrays.at(0, a), 2 * kPage, std::byte{7});
    SharedArrays copy(1, 2, 2 * kPage);
    copy.share(0, arrays, 2 * kPage);
    arrays.truncate(0, kept);
    std::atomic<bool> has_read = false, is_done = false;
    std::atomic<size_t> wrong = 0;
    std::thread reader([&] {
      while (!is_done.load()) {
        for (size_t a = 0; a < 2; ++a) {
          wrong +=
              std::count(arrays.at(0, a), arrays.at(0, a) + kept, std::byte{7}) == kept ? 0 : 1;
        }
        has_read.store(true);
      }
    });
    while (!has_read.load()) std::this_thread::yield();
    arrays.prepare(0, kept, kPage);
    for (size_t a = 0; a < 2; ++a) arrays.at(0, a)[kept] = std::byte{9};
    is_done.store(true);
    reader.join();
    ASSERT_EQ(wrong.load(), 0U) << "round " << i;
    ASSERT_EQ(copy.at(0, 1)[kept], std::byte{7});
  }
}

}  // namespace
}  // namespace keyhole::cpu::test

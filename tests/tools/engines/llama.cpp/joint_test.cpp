// Which rows of a batch attend together.
#include "tools/engines/llama.cpp/joint.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace keyhole::llama_cpp {
namespace {

using Parts = std::vector<std::vector<Part>>;

Part part(std::vector<uint32_t> rows) {
  Part p;
  p.rows = std::move(rows);
  return p;
}

std::vector<uint32_t> rows(uint32_t first, uint32_t count) {
  std::vector<uint32_t> all(count);
  std::iota(all.begin(), all.end(), first);
  return all;
}

/// "a0+1 b1+1 | a2+1": part a's row 0 and part b's row 1 together, then row 2 of a. Parts are letters, through all
/// streams.
std::string text(const Parts& parts, const std::vector<Joint>& joints, size_t of_stream) {
  std::string all;
  for (const Joint& joint : joints) {
    if (!all.empty()) all += " |";
    for (const Stretch& s : joint) {
      char name = 'a';
      for (const auto& stream : parts) {
        for (const Part& p : stream) {
          if (&p == s.part) {
            all += (all.empty() ? "" : " ") + std::string(1, name) +
                   std::to_string(s.stream * of_stream + s.first) + "+" + std::to_string(s.count);
          }
          ++name;
        }
      }
    }
  }
  return all;
}

TEST(LlamaCppJoint, ATokenOfEachSequenceIsOneJoint) {
  // Parts come in any order.
  const Parts one{{part({1}), part({0}), part({2})}};
  EXPECT_EQ(text(one, join(one, 3, 16), 3), "b0+1 a1+1 c2+1");
  const Parts streams{{part({0, 1})}, {part({0, 1})}};
  EXPECT_EQ(text(streams, join(streams, 2, 16), 2), "a0+2 b2+2");
}

TEST(LlamaCppJoint, ManyTokensOfASequenceGoAlone) {
  const Parts parts{{part(rows(0, 1)), part(rows(1, 2)), part(rows(3, 17)), part(rows(20, 1)),
                     part(rows(21, 16))}};
  EXPECT_EQ(text(parts, join(parts, 37, 16), 37), "a0+1 b1+2 | c3+17 | d20+1 e21+16");
  EXPECT_EQ(text(parts, join(parts, 37, 0), 37), "a0+1 | b1+2 | c3+17 | d20+1 | e21+16");
}

TEST(LlamaCppJoint, ASequenceIsThereOnce) {
  const Parts parts{{part({0, 2, 3}), part({1, 4})}};
  EXPECT_EQ(text(parts, join(parts, 5, 16), 5), "a0+1 b1+1 | a2+2 b4+1");
}

TEST(LlamaCppJoint, RowsThatDoNotGoOnAreApart) {
  const Parts parts{{part({0, 1, 2}), part({3})}, {part({0, 1, 2, 3})}};
  const auto all_but = [](size_t cut) { return [=](size_t row) { return row != cut; }; };
  EXPECT_EQ(text(parts, join(parts, 4, 16, all_but(3)), 4), "a0+3 b3+1 | c4+4");
  EXPECT_EQ(text(parts, join(parts, 4, 16, all_but(1)), 4), "a0+2 | a2+1 b3+1 c4+4");
  EXPECT_EQ(text(parts, join(parts, 4, 16, all_but(2)), 4), "a0+3 | b3+1 c4+4");
}

}  // namespace
}  // namespace keyhole::llama_cpp

// RoPE applied in double precision, as its definition has it, and taken back by the index.
#include "index/partitions/rope_undo.h"

#include <sstream>

#include "tests/index/keys.h"

namespace keyhole::index::test {
namespace {

// Pair (i, i + r/2), or (2i, 2i + 1), turns by position * theta^(-2i/r) * scale[i].
std::vector<float> rotated(const std::vector<float>& rows, uint32_t dim, const RopeParams& rope,
                           const std::vector<uint32_t>& positions) {
  const uint32_t r = rope.rotary_dim == 0 ? dim : rope.rotary_dim;
  std::vector<float> out = rows;
  for (size_t row = 0; row < positions.size(); ++row) {
    for (uint32_t i = 0; i < r / 2; ++i) {
      const double scale = rope.inv_freq_scale.empty() ? 1.0 : double{rope.inv_freq_scale[i]};
      const double angle = positions[row] * std::pow(double{rope.theta}, -2.0 * i / r) * scale;
      const size_t low = row * dim + (rope.interleaved ? 2 * i : i);
      const size_t high = rope.interleaved ? low + 1 : low + r / 2;
      const double a = rows[low], b = rows[high];
      out[low] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
      out[high] = static_cast<float>(b * std::cos(angle) + a * std::sin(angle));
    }
  }
  return out;
}

RopeParams random_rope(uint32_t dim, std::mt19937& random) {
  RopeParams rope;
  rope.theta = random() % 2 == 0 ? 10000.0F : 500000.0F;
  rope.rotary_dim = random() % 3 == 0 ? dim / 2 : (random() % 2 == 0 ? dim : 0);
  rope.interleaved = random() % 2 == 0;
  if (random() % 2 == 0) {
    const uint32_t pairs = (rope.rotary_dim == 0 ? dim : rope.rotary_dim) / 2;
    for (uint32_t i = 0; i < pairs; ++i) {
      rope.inv_freq_scale.push_back(0.1F + 0.001F * static_cast<float>(random() % 900));
    }
  }
  return rope;
}

TEST(RopeUndo, GivesBackWhatWasTurned) {
  for (uint32_t seed = 0; seed < cases(40); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const uint32_t dim = head_dims()[random() % head_dims().size()];
    const RopeParams rope = random_rope(dim, random);
    const size_t n = 1 + random() % 20;
    const uint32_t first_position = random() % (seed % 2 == 0 ? 1000 : 1000000);
    const size_t first_row = random() % 100;
    std::vector<uint32_t> positions(n);
    for (size_t i = 0; i < n; ++i) {
      positions[i] = first_position + static_cast<uint32_t>(first_row + i);
    }
    const auto plain = gaussian(n, dim, random);
    auto rows = rotated(plain, dim, rope, positions);
    const RopeUndo undo(&rope, dim, first_position);
    undo.rows(rows.data(), first_row, n);
    for (size_t i = 0; i < rows.size(); ++i) ASSERT_NEAR(rows[i], plain[i], 2e-6) << i;
  }
}

TEST(RopeUndo, QueriesAreOfOnePosition) {
  std::mt19937 random(41);
  const RopeParams rope = {10000.0F, 0, {}};
  const RopeUndo undo(&rope, 64, 7);
  const auto plain = gaussian(3, 64, random);
  for (const uint32_t position : {0U, 500U, kUnknownPosition}) {
    // Unknown: the token after the last of 100 rows.
    const uint32_t actual = position == kUnknownPosition ? 107 : position;
    const auto turned = rotated(plain, 64, rope, {actual, actual, actual});
    std::vector<float> undone(3 * 64);
    const float* out = undo.queries({.queries = turned.data(), .group = 3, .position = position},
                                    100, undone.data());
    EXPECT_EQ(out, undone.data());
    for (size_t i = 0; i < undone.size(); ++i) ASSERT_NEAR(out[i], plain[i], 2e-6);
  }
}

TEST(RopeUndo, WithoutRopeNothingChanges) {
  std::mt19937 random(42);
  const RopeParams none;
  for (const RopeUndo& undo : {RopeUndo(), RopeUndo(nullptr, 64, 9), RopeUndo(&none, 64, 9)}) {
    auto rows = gaussian(2, 64, random);
    const auto before = rows;
    undo.rows(rows.data(), 3, 2);
    EXPECT_EQ(rows, before);
    EXPECT_EQ(undo.queries({.queries = rows.data(), .group = 2}, 5, nullptr), rows.data());
    EXPECT_FALSE(undo.changes());
  }
}

TEST(RopeUndo, RefusesParametersThatDoNotFit) {
  for (const RopeParams& rope :
       {RopeParams{-1.0F, 0, {}}, RopeParams{NAN, 0, {}}, RopeParams{1e4F, 63, {}},
        RopeParams{1e4F, 66, {}}, RopeParams{1e4F, 64, std::vector<float>(31)}}) {
    EXPECT_THROW(RopeUndo(&rope, 64, 0), Error);
  }
}

TEST(RopeUndo, PartnersAreTurnedIntoEachOther) {
  for (const bool interleaved : {false, true}) {
    const RopeParams rope = {10000.0F, 48, {}, interleaved};
    const RopeUndo undo(&rope, 64, 0);
    for (uint32_t channel = 0; channel < 64; ++channel) {
      std::vector<float> row(64, 0.0F);
      row[channel] = 1.0F;
      undo.rows(row.data(), 1, 1);
      for (uint32_t j = 0; j < 64; ++j) {
        EXPECT_EQ(row[j] != 0.0F, j == channel || j == undo.partner(channel)) << channel;
      }
    }
  }
}

class RopeUndoSaved : public ::testing::TestWithParam<bool> {};

TEST_P(RopeUndoSaved, IsLoaded) {
  std::mt19937 random(43);
  RopeParams rope = random_rope(128, random);
  rope.interleaved = GetParam();
  const RopeUndo undo(&rope, 128, 123);
  std::stringstream bytes;
  Writer writer(bytes);
  undo.save(writer);
  const std::string text = bytes.str();
  Reader reader(bytes);
  const RopeUndo loaded = RopeUndo::load(reader, 128);
  auto a = gaussian(4, 128, random);
  auto b = a;
  undo.rows(a.data(), 10, 4);
  loaded.rows(b.data(), 10, 4);
  EXPECT_EQ(a, b);
  std::stringstream again(text);
  Reader smaller(again);
  if (rope.rotary_dim != 64) {
    EXPECT_THROW(static_cast<void>(RopeUndo::load(smaller, 80)), Error);
  }
}

INSTANTIATE_TEST_SUITE_P(Pairs, RopeUndoSaved, ::testing::Bool());

}  // namespace
}  // namespace keyhole::index::test

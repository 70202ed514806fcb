// Outlier channels of keys whose RoPE is undone. What the model compares has channels many times as wide as the others,
// or with a large constant; no inner product shows the one, no softmax the other, and partitions do not, either.
#include "index/partitions/undone_scale.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "index/scan/balance.h"
#include "index/types/factory.h"
#include "tests/index/disguise.h"

namespace keyhole::index::test {
namespace {

constexpr uint32_t kUndoneNearest = 50;

/// Rotate-half, in place.
void turn(float* row, size_t position) {
  for (uint32_t i = 0; i < kHeadDim / 2; ++i) {
    const double angle = static_cast<double>(position) * std::pow(1e4, -2.0 * i / kHeadDim);
    const double a = row[i], b = row[i + kHeadDim / 2];
    row[i] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
    row[i + kHeadDim / 2] = static_cast<float>(b * std::cos(angle) + a * std::sin(angle));
  }
}

/// Its channels wear the disguise after RoPE.
struct TurnedHead {
  explicit TurnedHead(const Disguise& d) : keys(kHeadRows, kHeadDim, DType::f32) {
    std::mt19937 random(5);
    std::vector<float> k = attention_keys(kHeadRows, kHeadDim, random);
    const auto row = [&](size_t i, float* out) { std::copy_n(&k[i * kHeadDim], kHeadDim, out); };
    training = attention_queries(kHeadTraining, kHeadDim, kHeadRows, row, random);
    asked = attention_queries(kHeadGroups * kHeadGroup, kHeadDim, kHeadRows, row, random);
    for (size_t i = 0; i < kHeadRows; ++i) turn(&k[i * kHeadDim], i);
    for (size_t i = 0; i < kHeadTraining; ++i) {
      positions.push_back(static_cast<uint32_t>(i * kHeadRows / kHeadTraining));
      turn(&training[i * kHeadDim], positions[i]);
    }
    for (size_t i = 0; i < kHeadGroups * kHeadGroup; ++i) turn(&asked[i * kHeadDim], kHeadRows);
    std::vector<uint32_t> channels(kHeadDim);
    for (uint32_t j = 0; j < kHeadDim; ++j) channels[j] = j;
    std::shuffle(channels.begin(), channels.end(), random);
    d.put_on(channels, k, {&training, &asked});
    keys.put(0, k);
  }
  [[nodiscard]] BuildInput input() const {
    BuildInput in;
    in.keys = keys.view();
    in.queries.rows = dense_rows(training.data(), kHeadTraining, kHeadDim, DType::f32);
    in.queries.positions = positions.data();
    in.rope = &kRope;
    return in;
  }
  Keys keys;
  std::vector<float> training, asked;
  std::vector<uint32_t> positions;
};

double undone_recall(const std::string& spec, const TurnedHead& head) {
  const auto index = make_index(spec, kHeadDim, DType::f32, context());
  index->build(head.input(), {});
  // As it is after a load.
  std::stringstream file;
  index->save(file);
  const auto loaded = make_index(spec, kHeadDim, DType::f32, context());
  loaded->load(file, head.keys.view());
  double sum = 0.0;
  for (size_t g = 0; g < kHeadGroups; ++g) {
    const std::vector<float> group(&head.asked[g * kHeadGroup * kHeadDim],
                                   &head.asked[g * kHeadGroup * kHeadDim] + kHeadGroup * kHeadDim);
    const Answer answer = search(*loaded, group, kHeadDim, kUndoneNearest);
    EXPECT_EQ(answer.heads, search(*index, group, kHeadDim, kUndoneNearest).heads);
    for (size_t h = 0; h < kHeadGroup; ++h) {
      sum += recall(answer.heads[h], head.keys, group.data() + h * kHeadDim, kUndoneNearest);
    }
  }
  return sum / (kHeadGroups * kHeadGroup);
}

class UndoneScale : public ::testing::TestWithParam<const char*> {};

TEST_P(UndoneScale, FindsAsMuchWhateverTheChannels) {
  const double plain = undone_recall(GetParam(), TurnedHead({1.0F, 0.0F}));
  EXPECT_GT(plain, 0.15);
  EXPECT_LT(plain, 0.95);
  for (const Disguise& d : {Disguise{4.0F, 0.0F}, Disguise{16.0F, 0.0F}, Disguise{64.0F, 0.0F},
                            Disguise{1.0F, 300.0F}, Disguise{16.0F, 300.0F}}) {
    EXPECT_NEAR(undone_recall(GetParam(), TurnedHead(d)), plain, 0.1 * plain)
        << "times " << d.factor << " plus " << d.offset;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, UndoneScale,
                         ::testing::Values("saap:C=64,probe=6",
                                           "ivf:rope=undo,C=64,train=global,probe=6"),
                         [](const auto& p) {
                           return std::string(p.param).substr(0, 3) == "ivf" ? "ivf" : "saap";
                         });

/// The widest channel of the keys turned back, in standard deviations of a Gaussian key.
double widest(const std::vector<float>& rows, const BuildInput& input) {
  const RopeUndo undo = balanced_undo(*context().kernels, input, kHeadDim);
  std::vector<float> turned = rows;
  undo.rows(turned.data(), 0, kHeadRows);
  double most = 0.0;
  for (uint32_t j = 0; j < kHeadDim; ++j) {
    double mean = 0.0, square = 0.0;
    for (size_t i = j; i < turned.size(); i += kHeadDim) {
      mean += double{turned[i]} / kHeadRows;
      square += double{turned[i]} * turned[i] / kHeadRows;
    }
    most = std::max(most, std::sqrt(square - mean * mean));
  }
  return most;
}

TEST(UndoneScale, ConstantsGoWhicheverSideOfRopeTheyAreOf) {
  std::mt19937 random(7);
  const Balance none = {.key_scale = std::vector<float>(kHeadDim, 1.0F)};
  for (const bool before : {false, true}) {
    for (const uint32_t channel : {0U, 9U, 31U, 63U}) {
      std::vector<float> rows = gaussian(kHeadRows, kHeadDim, random);
      for (size_t i = 0; i < kHeadRows; ++i) {
        if (before) rows[i * kHeadDim + channel] += 50.0F;
        turn(&rows[i * kHeadDim], i);
        if (!before) rows[i * kHeadDim + channel] += 50.0F;
      }
      Keys keys(kHeadRows, kHeadDim, DType::f32);
      keys.put(0, rows);
      BuildInput input;
      input.keys = keys.view();
      input.rope = &kRope;
      input.balance = &none;
      EXPECT_LT(widest(rows, input), 1.2) << (before ? "before " : "after ") << channel;
    }
  }
}

// A head whose channels stand in another order is the same head: pairs that lie side by side are balanced, and lose
// their constants, as those that lie half a head apart.
TEST(UndoneScale, PairsSideBySideAreThoseHalfAHeadApart) {
  const TurnedHead head({16.0F, 300.0F});
  const auto place = [](uint32_t j) {
    return j < kHeadDim / 2 ? 2 * j : 2 * (j - kHeadDim / 2) + 1;
  };
  const auto moved = [&](const std::vector<float>& rows) {
    std::vector<float> out(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      out[i / kHeadDim * kHeadDim + place(static_cast<uint32_t>(i % kHeadDim))] = rows[i];
    }
    return out;
  };
  std::vector<float> apart(size_t{kHeadRows} * kHeadDim);
  for (size_t i = 0; i < kHeadRows; ++i) {
    std::memcpy(&apart[i * kHeadDim], head.keys.view().row(i), kHeadDim * sizeof(float));
  }
  std::vector<float> beside = moved(apart);
  const std::vector<float> training = moved(head.training);
  Keys keys(kHeadRows, kHeadDim, DType::f32);
  keys.put(0, beside);
  RopeParams interleaved = kRope;
  interleaved.interleaved = true;
  BuildInput input = head.input();
  input.keys = keys.view();
  input.queries.rows = dense_rows(training.data(), kHeadTraining, kHeadDim, DType::f32);
  input.rope = &interleaved;
  balanced_undo(*context().kernels, head.input(), kHeadDim).rows(apart.data(), 0, kHeadRows);
  balanced_undo(*context().kernels, input, kHeadDim).rows(beside.data(), 0, kHeadRows);
  const std::vector<float> expected = moved(apart);
  for (size_t i = 0; i < beside.size(); ++i) {
    ASSERT_NEAR(expected[i], beside[i], 1e-3F * (1.0F + std::abs(expected[i]))) << i;
  }
}

}  // namespace
}  // namespace keyhole::index::test

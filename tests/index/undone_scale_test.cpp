// Outlier channels of keys whose RoPE is undone. What the model compares has channels many times as wide as the others, or
// with a large constant; no inner product shows the one, no softmax the other, and partitions do not, either.
#include "index/partitions/undone_scale.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "index/scan/balance.h"
#include "index/types/factory.h"
#include "tests/index/keys.h"

namespace keyhole::index::test {
namespace {

constexpr uint32_t kDim = 64, kGroup = 2, kNearest = 50;
constexpr size_t kRows = 3300, kTraining = 512, kGroups = 12;
const RopeParams kRope = {10000.0F, 0, {}};

/// Rotate-half, in place.
void turn(float* row, size_t position) {
  for (uint32_t i = 0; i < kDim / 2; ++i) {
    const double angle = static_cast<double>(position) * std::pow(1e4, -2.0 * i / kDim);
    const double a = row[i], b = row[i + kDim / 2];
    row[i] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
    row[i + kDim / 2] = static_cast<float>(b * std::cos(angle) + a * std::sin(angle));
  }
}

struct Disguise {
  float factor,
      offset;  ///< of 6 channels after RoPE, whose queries are divided by the factor; of 3 channels
};

struct Head {
  explicit Head(const Disguise& d) : keys(kRows, kDim, DType::f32) {
    std::mt19937 random(5);
    std::vector<float> k = attention_keys(kRows, kDim, random);
    const auto row = [&](size_t i, float* out) { std::copy_n(&k[i * kDim], kDim, out); };
    training = attention_queries(kTraining, kDim, kRows, row, random);
    asked = attention_queries(kGroups * kGroup, kDim, kRows, row, random);
    for (size_t i = 0; i < kRows; ++i) turn(&k[i * kDim], i);
    for (size_t i = 0; i < kTraining; ++i) {
      positions.push_back(static_cast<uint32_t>(i * kRows / kTraining));
      turn(&training[i * kDim], positions[i]);
    }
    for (size_t i = 0; i < kGroups * kGroup; ++i) turn(&asked[i * kDim], kRows);
    std::vector<uint32_t> channels(kDim);
    for (uint32_t j = 0; j < kDim; ++j) channels[j] = j;
    std::shuffle(channels.begin(), channels.end(), random);
    for (size_t c = 0; c < 6; ++c) {
      for (size_t i = channels[c]; i < k.size(); i += kDim) k[i] *= d.factor;
      for (size_t i = channels[c]; i < training.size(); i += kDim) training[i] /= d.factor;
      for (size_t i = channels[c]; i < asked.size(); i += kDim) asked[i] /= d.factor;
    }
    for (size_t c = 5; c < 8; ++c) {
      for (size_t i = channels[c]; i < k.size(); i += kDim) k[i] += d.offset;
    }
    keys.put(0, k);
  }
  [[nodiscard]] BuildInput input() const {
    BuildInput in;
    in.keys = keys.view();
    in.queries.rows = {reinterpret_cast<const std::byte*>(training.data()), kDim * sizeof(float),
                       kTraining, kDim, DType::f32};
    in.queries.positions = positions.data();
    in.rope = &kRope;
    return in;
  }
  Keys keys;
  std::vector<float> training, asked;
  std::vector<uint32_t> positions;
};

double recall_of(const std::string& spec, const Head& head) {
  const auto index = make_index(spec, kDim, DType::f32, context());
  index->build(head.input(), {});
  // As it is after a load.
  std::stringstream file;
  index->save(file);
  const auto loaded = make_index(spec, kDim, DType::f32, context());
  loaded->load(file, head.keys.view());
  double sum = 0.0;
  for (size_t g = 0; g < kGroups; ++g) {
    const std::vector<float> group(&head.asked[g * kGroup * kDim],
                                   &head.asked[g * kGroup * kDim] + kGroup * kDim);
    const Answer answer = search(*loaded, group, kDim, kNearest);
    EXPECT_EQ(answer.heads, search(*index, group, kDim, kNearest).heads);
    for (size_t h = 0; h < kGroup; ++h) {
      sum += recall(answer.heads[h], head.keys, group.data() + h * kDim, kNearest);
    }
  }
  return sum / (kGroups * kGroup);
}

class UndoneScale : public ::testing::TestWithParam<const char*> {};

TEST_P(UndoneScale, FindsAsMuchWhateverTheChannels) {
  const double plain = recall_of(GetParam(), Head({1.0F, 0.0F}));
  EXPECT_GT(plain, 0.15);
  EXPECT_LT(plain, 0.95);
  for (const Disguise& d : {Disguise{4.0F, 0.0F}, Disguise{16.0F, 0.0F}, Disguise{64.0F, 0.0F},
                            Disguise{1.0F, 300.0F}, Disguise{16.0F, 300.0F}}) {
    EXPECT_NEAR(recall_of(GetParam(), Head(d)), plain, 0.1 * plain)
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
  const RopeUndo undo = balanced_undo(*context().kernels, input, kDim);
  std::vector<float> turned = rows;
  undo.rows(turned.data(), 0, kRows);
  double most = 0.0;
  for (uint32_t j = 0; j < kDim; ++j) {
    double mean = 0.0, square = 0.0;
    for (size_t i = j; i < turned.size(); i += kDim) {
      mean += double{turned[i]} / kRows;
      square += double{turned[i]} * turned[i] / kRows;
    }
    most = std::max(most, std::sqrt(square - mean * mean));
  }
  return most;
}

TEST(UndoneScale, ConstantsGoWhicheverSideOfRopeTheyAreOf) {
  std::mt19937 random(7);
  const Balance none = {.key_scale = std::vector<float>(kDim, 1.0F)};
  for (const bool before : {false, true}) {
    for (const uint32_t channel : {0U, 9U, 31U, 63U}) {
      std::vector<float> rows = gaussian(kRows, kDim, random);
      for (size_t i = 0; i < kRows; ++i) {
        if (before) rows[i * kDim + channel] += 50.0F;
        turn(&rows[i * kDim], i);
        if (!before) rows[i * kDim + channel] += 50.0F;
      }
      Keys keys(kRows, kDim, DType::f32);
      keys.put(0, rows);
      BuildInput input;
      input.keys = keys.view();
      input.rope = &kRope;
      input.balance = &none;
      EXPECT_LT(widest(rows, input), 1.2) << (before ? "before " : "after ") << channel;
    }
  }
}

}  // namespace
}  // namespace keyhole::index::test

// Training on prompts whose queries live elsewhere than their keys: a query looks along a direction in which
// the keys of its topic spread to both sides, so that their mean says nothing.
#include "tools/saap/train_head.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "runtime/files/safetensors.h"
#include "tests/temporary_folder.h"
#include "tests/tools/saap/gaussian.h"
#include "tools/saap/classifier_writer.h"

namespace keyhole::tools {
namespace {

constexpr uint32_t kDim = 64, kTokens = 1400, kTopics = 12, kGroup = 2;

// RoPE by definition, in double.
void rotate(float* row, uint32_t position) {
  for (uint32_t i = 0; i < kDim / 2; ++i) {
    const double angle = position * std::pow(10000.0, -2.0 * i / kDim);
    const double a = row[i];
    const double b = row[i + kDim / 2];
    row[i] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
    row[i + kDim / 2] = static_cast<float>(b * std::cos(angle) + a * std::sin(angle));
  }
}

/// Topics, shared by all prompts, in the slow pairs, which RoPE hardly turns.
struct World {
  explicit World(std::mt19937& random)
      : keys(slow(gaussian(kTopics * kDim, 2.5F, random))),
        spread(slow(gaussian(kTopics * kDim, 1.5F, random))) {}
  static std::vector<float> slow(std::vector<float> rows) {
    for (size_t i = 0; i < rows.size(); ++i) {
      if (i % (kDim / 2) < kDim / 4) rows[i] = 0.0F;
    }
    return rows;
  }
  std::vector<float> keys;    ///< what all keys of a topic have
  std::vector<float> spread;  ///< what they have with either sign
};

Trace make_trace(const std::filesystem::path& path, const World& world, uint32_t seed) {
  std::mt19937 random(seed);
  TraceInfo info;
  info.q_heads = kGroup;
  info.kv_heads = 1;
  info.head_dim = kDim;
  info.scale = 0.25F;
  info.rope.theta = 10000;
  info.layers = {3};
  info.tokens = kTokens;
  info.model = "synthetic";
  info.task = "test";
  TraceWriter::Options options;
  options.kv_type = ElementType::f32;
  for (uint32_t i = 0; i < 100; ++i) options.query_positions.push_back(kTokens - 100 + i);
  for (uint32_t p = 400; p < kTokens - 100; p += 3) options.training_positions.push_back(p);

  auto keys = gaussian(kTokens * kDim, 0.6F, random);
  for (uint32_t t = 0; t < kTokens; ++t) {
    const size_t topic = random() % kTopics;
    const float sign = random() % 2 == 0 ? 1.0F : -1.0F;
    for (uint32_t j = 0; j < kDim; ++j) {
      keys[t * kDim + j] += world.keys[topic * kDim + j] + sign * world.spread[topic * kDim + j];
    }
    rotate(keys.data() + t * kDim, t);
  }
  const auto make_queries = [&](const std::vector<uint32_t>& positions) {
    auto rows = gaussian(positions.size() * kGroup * kDim, 0.3F, random);
    for (size_t i = 0; i < rows.size() / kDim; ++i) {
      const size_t topic = random() % kTopics;
      for (uint32_t j = 0; j < kDim; ++j) {
        rows[i * kDim + j] += 0.4F * world.spread[topic * kDim + j];
      }
      rotate(rows.data() + i * kDim, positions[i / kGroup]);
    }
    return rows;
  };
  const auto queries = make_queries(options.query_positions);
  const auto training = make_queries(options.training_positions);
  TraceWriter writer(path, info, options);
  writer.write_head({keys.data(), kTokens, kDim}, {keys.data(), kTokens, kDim},
                    {queries.data(), options.query_positions.size(), kGroup * kDim},
                    {training.data(), options.training_positions.size(), kGroup * kDim});
  writer.finish();
  return Trace::open(path);
}

class TrainHead : public ::testing::Test {
 protected:
  TrainHead() {
    std::mt19937 random(1);
    const World world(random);
    for (uint32_t i = 0; i < 4; ++i) {
      train_.push_back(make_trace(folder_ / std::to_string(i), world, 10 + i));
    }
    validate_.push_back(make_trace(folder_ / "v", world, 20));
    training_.partitions.partitions = 16;
    training_.range = {16, 64};
    training_.hidden = 64;
    training_.batch = 128;
    training_.epochs = 12;
  }
  TemporaryFolder folder_;
  std::vector<Trace> train_, validate_;
  SaapTraining training_;
};

TEST_F(TrainHead, BeatsTheCentroidsOnPromptsItHasNotSeen) {
  double last = 0;
  const SaapHead head = train_head(train_, validate_, 0, training_, [&](double done) {
    EXPECT_GE(done, last);
    last = done;
    return true;
  });
  EXPECT_EQ(last, 1);
  EXPECT_EQ(head.layer, 3U);
  EXPECT_GT(head.epochs, 0U);
  EXPECT_LT(head.loss, 0.7 * head.prior_loss);
  EXPECT_LT(head.loss, head.start_loss);
  double gain = 0;
  for (const ProbeFigures& f : head.figures) {
    EXPECT_LE(f.classifier, f.best + 1e-9) << "nothing beats hindsight";
    EXPECT_LE(f.centroids, f.best + 1e-9);
    gain += f.classifier - f.centroids;
  }
  EXPECT_GT(gain / static_cast<double>(head.figures.size()), 0.02);
}

TEST_F(TrainHead, IsRepeatable) {
  training_.epochs = 2;
  const SaapHead a = train_head(train_, validate_, 0, training_, {});
  const SaapHead b = train_head(train_, validate_, 0, training_, {});
  EXPECT_EQ(a.mlp.w2, b.mlp.w2);
  EXPECT_EQ(a.partitions.centroids, b.partitions.centroids);
}

TEST_F(TrainHead, StopsWhenAskedTo) {
  int calls = 0;
  const SaapHead head =
      train_head(train_, validate_, 0, training_, [&](double) { return ++calls < 5; });
  EXPECT_EQ(calls, 5);
  EXPECT_EQ(head.seconds, 0);
}

TEST_F(TrainHead, TargetsAreTheAttentionOfTheDistantKeys) {
  const auto keys = unroped_keys(train_[0].info(), train_[0].heads()[0], 0, kTokens);
  const Partitions partitions = train_partitions(keys.data(), kTokens, kDim, {.partitions = 10});
  const PromptHead p =
      attend_by_partition(train_[0], train_[0].heads()[0], partitions, training_.range);
  const auto labels = partition_of(partitions, keys.data(), kTokens);
  const auto roped = train_[0].heads()[0].keys.to_f32();
  const auto queries = train_[0].heads()[0].training_queries->to_f32();
  for (size_t row = 0; row < 40; ++row) {
    const uint32_t position = train_[0].training_positions()[row / kGroup];
    std::vector<double> by_partition(10);
    double middle = 0;
    double all = 0;
    for (uint32_t t = 0; t <= position; ++t) {
      double dot = 0;
      for (uint32_t j = 0; j < kDim; ++j)
        dot += double{queries[row * kDim + j]} * roped[t * kDim + j];
      const double weight = std::exp(0.25 * dot);
      all += weight;
      if (t < 16 || t + 64 > position) continue;
      middle += weight;
      by_partition[labels[t]] += weight;
    }
    EXPECT_NEAR(p.mass[row], middle / all, 1e-3);
    for (size_t c = 0; c < 10; ++c) {
      EXPECT_NEAR(p.targets[row * 10 + c], by_partition[c] / middle, 2e-3);
    }
  }
}

TEST_F(TrainHead, IsWrittenAsAFile) {
  training_.epochs = 1;
  SaapHead head = train_head(train_, validate_, 0, training_, {});
  const auto path = folder_ / "out";
  write_classifiers(path, train_[0].info(), {head});
  const SafetensorsFile file(path);
  EXPECT_EQ(file.metadata().at("keyhole_classifiers"), "1");
  EXPECT_EQ(file.metadata().at("partitions"), "16");
  EXPECT_EQ(file.metadata().at("rope_theta"), "10000");
  EXPECT_EQ(file.tensor("layer.3.kv.0.w1").shape, (std::vector<size_t>{64, kDim}));
  EXPECT_EQ(file.tensor("layer.3.kv.0.centroids").to_f32(), head.partitions.centroids);
  EXPECT_EQ(file.tensors().size(), 7U);
  head.mlp.w2[0] = NAN;
  EXPECT_THROW(write_classifiers(path, train_[0].info(), {head}), std::runtime_error);
}

}  // namespace
}  // namespace keyhole::tools

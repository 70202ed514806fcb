#include "index/types/saap.h"

#include <sstream>

#include "tests/index/classifiers.h"
#include "tests/sanitized.h"

namespace keyhole::index::test {
namespace {

constexpr uint32_t kDim = 64;

// Partitions of the given rows, and a network that has been told nothing: small random weights.
ClassifierWeights weights_over(const std::vector<float>& rows, size_t count, std::mt19937& random) {
  ClassifierWeights w = random_weights(kDim, 64, count, random);
  for (size_t c = 0; c < count; ++c) {
    const float* row = rows.data() + (c * 7919 % (rows.size() / kDim)) * kDim;
    double squares = 0;
    for (uint32_t j = 0; j < kDim; ++j) squares += double{row[j]} * row[j];
    for (uint32_t j = 0; j < kDim; ++j) {
      w.partitions.centroids[c * kDim + j] = row[j] / static_cast<float>(std::sqrt(squares));
    }
  }
  return w;
}

Context with(const QueryClassifier& classifier, cpu::Pool* pool = nullptr) {
  return {&cpu::select_kernels(), pool, &classifier};
}

std::unique_ptr<Index> built_with(const std::string& spec, const Context& ctx, const RowsView& keys,
                                  uint32_t first_position = 0, const RopeParams* rope = &kRope) {
  auto index = make_index(spec, kDim, DType::f16, ctx);
  BuildInput input;
  input.keys = keys;
  input.first_position = first_position;
  input.rope = rope;
  index->build(input, {});
  return index;
}

class SaapTest : public ::testing::Test {
 protected:
  SaapTest() : random_(91), keys_(2000, kDim, DType::f16) {
    rows_ = attention_keys(2000, kDim, random_);
    keys_.put(0, rows_);
    weights_ = weights_over(rows_, 40, random_);
    classifier_ = std::make_unique<QueryClassifier>(*context().kernels, weights_);
  }

  // The partition of each row by definition, in double, RoPE undone.
  [[nodiscard]] std::vector<size_t> expected_labels(uint32_t first_position) const {
    std::vector<size_t> labels;
    for (size_t i = 0; i < keys_.count(); ++i) {
      float row[kDim];
      context().kernels->to_f32[1](keys_.view().row(i), row, kDim);
      double plain[kDim];
      for (uint32_t j = 0; j < kDim / 2; ++j) {
        const double angle =
            -(first_position + static_cast<double>(i)) * std::pow(1e4, -2.0 * j / kDim);
        plain[j] = row[j] * std::cos(angle) - row[j + kDim / 2] * std::sin(angle);
        plain[j + kDim / 2] = row[j + kDim / 2] * std::cos(angle) + row[j] * std::sin(angle);
      }
      size_t best = 0;
      double most = -1e300;
      for (size_t c = 0; c < 40; ++c) {
        double score = weights_.partitions.bonuses[c];
        for (uint32_t j = 0; j < kDim; ++j)
          score += plain[j] * weights_.partitions.centroids[c * kDim + j];
        if (score > most) {
          most = score;
          best = c;
        }
      }
      labels.push_back(best);
    }
    return labels;
  }

  std::mt19937 random_;
  Keys keys_;
  std::vector<float> rows_;
  ClassifierWeights weights_;
  std::unique_ptr<QueryClassifier> classifier_;
};

TEST_F(SaapTest, ScansThePartitionsOfLargestPredictedDensity) {
  const uint32_t first_position = 500;
  const auto index =
      built_with("saap:probe=3,codec=none", with(*classifier_), keys_.view(), first_position);
  const auto labels = expected_labels(first_position);
  std::vector<double> sizes(40, 0.0);
  for (const size_t l : labels) ++sizes[l];
  std::vector<float> log_sizes(40);
  for (size_t c = 0; c < 40; ++c) log_sizes[c] = static_cast<float>(std::log(sizes[c]));
  const auto scratch = index->make_scratch(4, 10);
  for (int round = 0; round < 10; ++round) {
    // Position 0: RoPE turns nothing, so the network sees the queries as they are.
    const auto queries = gaussian(4, kDim, random_);
    Scored scored;
    index->explore({.queries = queries.data(), .group = 4, .k = 10, .position = 0}, *scratch,
                   scored);
    auto density = densities(weights_, queries, log_sizes);
    std::vector<size_t> order;
    for (size_t c = 0; c < 40; ++c) {
      if (sizes[c] > 0) order.push_back(c);
    }
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return density[a] > density[b]; });
    if (density[order[2]] < 1.01 * density[order[3]]) continue;  // too close to call
    std::vector<uint32_t> expected;
    for (uint32_t i = 0; i < labels.size(); ++i) {
      if (std::find(order.begin(), order.begin() + 3, labels[i]) != order.begin() + 3)
        expected.push_back(i);
    }
    std::vector<uint32_t> seen(scored.rows.begin(), scored.rows.end());
    std::sort(seen.begin(), seen.end());
    // Rows on the border of two partitions may fall to either.
    std::vector<uint32_t> different;
    std::set_symmetric_difference(seen.begin(), seen.end(), expected.begin(), expected.end(),
                                  std::back_inserter(different));
    EXPECT_LE(different.size(), 2U);
    EXPECT_EQ(scored.keys_scored, 4 * scored.rows.size());
    EXPECT_EQ(scored.bytes_read, classifier_->network_bytes() + scored.rows.size() * kDim * 2);
  }
}

TEST_F(SaapTest, AppendedRowsAreFoundAsBuiltOnes) {
  const auto whole = built_with("saap:probe=5", with(*classifier_), keys_.view(), 128);
  const auto grown = built_with("saap:probe=5", with(*classifier_), keys_.view(300), 128);
  for (const size_t count : {301, 500, 900, 1900, 2000}) grown->append(keys_.view(count), {});
  EXPECT_GT(diagnostic(*grown, "parts"), 1.0);
  EXPECT_GT(diagnostic(*grown, "tail_rows"), 0.0);
  EXPECT_EQ(diagnostic(*grown, "trained_partitions"), 1.0);
  for (int round = 0; round < 10; ++round) {
    const auto queries = attention_queries(3, kDim, keys_, random_);
    EXPECT_EQ(search(*whole, queries, kDim, 30).heads, search(*grown, queries, kDim, 30).heads);
  }
  grown->truncate(700);
  const auto shorter = built_with("saap:probe=5", with(*classifier_), keys_.view(700), 128);
  for (int round = 0; round < 10; ++round) {
    const auto queries = attention_queries(3, kDim, keys_, random_);
    EXPECT_EQ(search(*shorter, queries, kDim, 30).heads, search(*grown, queries, kDim, 30).heads);
  }
}

TEST_F(SaapTest, AllProbesAreExact) {
  for (const char* spec :
       {"saap:probe=40", "saap:probe=40,classifier=off", "saap:C=20,probe=20,partitions=own"}) {
    SCOPED_TRACE(spec);
    const auto index = built_with(spec, with(*classifier_), keys_.view(1000), 9);
    index->append(keys_.view(1100), {});
    const auto queries = attention_queries(2, kDim, keys_, random_);
    Keys some(2000, kDim, DType::f16);
    some.put(0, std::vector<float>(rows_.begin(), rows_.begin() + 1100 * kDim));
    const Answer answer = search(*index, queries, kDim, 50);
    for (uint32_t h = 0; h < 2; ++h) {
      expect_exact(answer.heads[h], some, queries.data() + size_t{h} * kDim, 50);
    }
  }
}

TEST_F(SaapTest, SavedIsLoadedWithTheSameClassifierOnly) {
  for (const char* spec :
       {"saap:probe=4", "saap:probe=4,classifier=off", "saap:C=30,probe=4,partitions=own"}) {
    SCOPED_TRACE(spec);
    const auto index = built_with(spec, with(*classifier_), keys_.view(1000), 77);
    index->append(keys_.view(1300), {});
    std::stringstream bytes;
    index->save(bytes);
    const auto loaded = make_index(spec, kDim, DType::f16, with(*classifier_));
    loaded->load(bytes, keys_.view());
    index->append(keys_.view(), {});
    loaded->append(keys_.view(), {});
    const auto queries = attention_queries(3, kDim, keys_, random_);
    const auto a = search(*index, queries, kDim, 20);
    EXPECT_EQ(a.heads, search(*loaded, queries, kDim, 20).heads);

    ClassifierWeights other = weights_;
    other.b1[0] += 1.0F;
    const QueryClassifier another(*context().kernels, other);
    const bool own = std::string(spec).find("own") != std::string::npos;
    for (const Context& ctx : {with(another), context()}) {
      bytes.clear();
      bytes.seekg(0);
      const auto foreign = make_index(spec, kDim, DType::f16, ctx);
      if (own) {
        EXPECT_NO_THROW(foreign->load(bytes, keys_.view()));
      } else {
        EXPECT_THROW(foreign->load(bytes, keys_.view()), Error);
      }
    }
  }
}

TEST_F(SaapTest, EmptiedItTakesPartitionsOfItsNewRows) {
  for (const char* spec : {"saap:probe=1024", "saap:probe=1024,classifier=off"}) {
    const auto index = built_with(spec, with(*classifier_), keys_.view(500));
    index->truncate(0);
    std::stringstream bytes;
    index->save(bytes);
    index->load(bytes, keys_.view());
    EXPECT_EQ(index->count(), 0U);
    index->append(keys_.view(600), {});
    const auto queries = attention_queries(1, kDim, keys_, random_);
    EXPECT_EQ(search(*index, queries, kDim, 600).heads[0].ids.size(), 600U);
  }
}

// Rows all alike, rows of zeros, one row, fewer rows than partitions.
TEST_F(SaapTest, OddRows) {
  std::vector<std::vector<float>> cases = {std::vector<float>(300 * kDim, 1.0F),
                                           std::vector<float>(300 * kDim, 0.0F),
                                           gaussian(1, kDim, random_), gaussian(7, kDim, random_)};
  for (const auto& values : cases) {
    const size_t n = values.size() / kDim;
    Keys keys(n, kDim, DType::f16);
    keys.put(0, values);
    for (const char* spec :
         {"saap:probe=40", "saap:probe=40,classifier=off", "saap:partitions=own,C=500,probe=500"}) {
      for (const RopeParams* rope : {&kRope, static_cast<const RopeParams*>(nullptr)}) {
        SCOPED_TRACE(spec);
        const auto index = built_with(spec, with(*classifier_), keys.view(), 3, rope);
        const auto queries = gaussian(2, kDim, random_);
        const Answer answer = search(*index, queries, kDim, 20);
        for (uint32_t h = 0; h < 2; ++h) {
          expect_exact(answer.heads[h], keys, queries.data() + size_t{h} * kDim, 20);
        }
      }
    }
  }
}

TEST_F(SaapTest, DoesNotDependOnThreads) {
  cpu::Pool four({.threads = 4});
  for (const char* spec : {"saap:probe=4", "saap:probe=4,classifier=off", "saap:partitions=own"}) {
    const auto one = built_with(spec, with(*classifier_), keys_.view(), 5);
    const auto many = built_with(spec, with(*classifier_, &four), keys_.view(), 5);
    const auto queries = attention_queries(3, kDim, keys_, random_);
    EXPECT_EQ(search(*one, queries, kDim, 20).heads, search(*many, queries, kDim, 20).heads);
  }
}

TEST_F(SaapTest, RefusesAClassifierOfAnotherHeadDimension) {
  EXPECT_THROW(static_cast<void>(make_index("saap", 128, DType::f16, with(*classifier_))), Error);
  EXPECT_NO_THROW(static_cast<void>(make_index("ivf", 128, DType::f16, with(*classifier_))));
}

// Topics that come back anywhere in the text: with RoPE undone, a topic is a partition.
TEST(RopeUndoProbing, FindsTopicsWhereverTheyStand) {
  KEYHOLE_SKIP_WITH_TSAN();
  std::mt19937 random(92);
  constexpr size_t kRows = 4000;
  const auto topics = gaussian(40, kDim, random);
  auto rows = gaussian(kRows, kDim, random);
  for (size_t i = 0; i < kRows; ++i) {
    const size_t topic = random() % 40;
    for (uint32_t j = 0; j < kDim; ++j)
      rows[i * kDim + j] = 3 * topics[topic * kDim + j] + 0.3F * rows[i * kDim + j];
  }
  // As the model turns them.
  std::vector<float> turned = rows;
  for (size_t i = 0; i < kRows; ++i) {
    for (uint32_t j = 0; j < kDim / 2; ++j) {
      const double angle = static_cast<double>(i) * std::pow(1e4, -2.0 * j / kDim);
      const double a = rows[i * kDim + j];
      const double b = rows[i * kDim + j + kDim / 2];
      turned[i * kDim + j] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
      turned[i * kDim + j + kDim / 2] =
          static_cast<float>(b * std::cos(angle) + a * std::sin(angle));
    }
  }
  Keys keys(kRows, kDim, DType::f16);
  keys.put(0, turned);
  // Queries for a topic, from position 2000: the share of the topic's rows among the scored ones.
  const auto share = [&](const std::string& spec) {
    const auto index = built_with(spec, context(), keys.view());
    const auto scratch = index->make_scratch(1, 10);
    double scored_rows = 0;
    for (int t = 0; t < 40; ++t) {
      std::vector<float> query(kDim);
      for (uint32_t j = 0; j < kDim / 2; ++j) {
        const double angle = 2000 * std::pow(1e4, -2.0 * j / kDim);
        const double a = topics[static_cast<size_t>(t) * kDim + j];
        const double b = topics[static_cast<size_t>(t) * kDim + j + kDim / 2];
        query[j] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
        query[j + kDim / 2] = static_cast<float>(b * std::cos(angle) + a * std::sin(angle));
      }
      Scored scored;
      index->explore({.queries = query.data(), .group = 1, .k = 10, .position = 2000}, *scratch,
                     scored);
      size_t good = 0;
      for (const uint32_t row : scored.rows) {
        double best = 1e300;
        int nearest = -1;
        for (int c = 0; c < 40; ++c) {
          double d = 0;
          for (uint32_t j = 0; j < kDim; ++j) {
            const double x = rows[row * kDim + j] - 3 * topics[static_cast<size_t>(c) * kDim + j];
            d += x * x;
          }
          if (d < best) best = d, nearest = c;
        }
        good += nearest == t ? 1 : 0;
      }
      scored_rows += scored.rows.empty()
                         ? 0
                         : static_cast<double>(good) / static_cast<double>(scored.rows.size());
    }
    return scored_rows / 40;
  };
  const double undone = share("ivf:rope=undo,C=40,train=global,probe=1");
  const double kept = share("ivf:rope=keep,C=40,train=global,probe=1");
  EXPECT_GT(undone, 0.6);
  EXPECT_GT(undone, kept + 0.2);
  EXPECT_GT(share("saap:C=40,probe=1"), kept + 0.2);
}

}  // namespace
}  // namespace keyhole::index::test

#include "tests/index/keys.h"

#include "index/partitions/ivf_train.h"
#include "index/partitions/list_ranking.h"

namespace keyhole::index::test {
namespace {

const Progress kNoProgress;
const RopeUndo kKeepRope;

// Points around `clusters` far centres, in turn.
std::vector<float> clustered(size_t n, size_t clusters, uint32_t dim, std::mt19937& random) {
  std::vector<float> centres = gaussian(clusters, dim, random);
  std::vector<float> values = gaussian(n, dim, random);
  for (size_t i = 0; i < n; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      values[i * dim + j] = 50.0F * centres[(i % clusters) * dim + j] + 0.1F * values[i * dim + j];
    }
  }
  return values;
}

TEST(NearestCentroid, EqualsDoublePrecision) {
  std::mt19937 random(31);
  for (const uint32_t dim : head_dims()) {
    const size_t centroids = 1 + random() % 1200;
    const size_t n = 1 + random() % 100;
    const auto c = gaussian(centroids, dim, random);
    const auto x = gaussian(n, dim, random);
    for (const Nearness nearness : {Nearness::l2, Nearness::inner_product}) {
      NearestCentroid nearest(*context().kernels, nearness, dim);
      nearest.set(c.data(), centroids);
      std::vector<uint32_t> labels(n, 0xFFFF);
      nearest.assign(x.data(), n, labels.data());
      const auto cost = [&](size_t i, size_t l) {
        double sum = 0.0;
        for (uint32_t j = 0; j < dim; ++j) {
          const double a = x[i * dim + j];
          const double b = c[l * dim + j];
          sum += nearness == Nearness::l2 ? (a - b) * (a - b) : -a * b;
        }
        return sum;
      };
      for (size_t i = 0; i < n; ++i) {
        ASSERT_LT(labels[i], centroids);
        for (size_t l = 0; l < centroids; ++l) {
          ASSERT_LE(cost(i, labels[i]), cost(i, l) + 1e-3) << "point " << i << " list " << l;
        }
      }
    }
  }
}

TEST(NearestCentroid, EqualCentroidsGoToTheFirst) {
  const std::vector<float> c(3 * 64, 1.0F);
  const std::vector<float> x(20 * 64, 0.5F);
  NearestCentroid nearest(*context().kernels, Nearness::l2, 64);
  nearest.set(c.data(), 3);
  std::vector<uint32_t> labels(20, 9);
  nearest.assign(x.data(), 20, labels.data());
  EXPECT_EQ(labels, std::vector<uint32_t>(20, 0));
}

TEST(KMeans, FindsWellSeparatedClusters) {
  std::mt19937 random(32);
  const auto points = clustered(600, 6, 64, random);
  for (const Nearness nearness : {Nearness::l2, Nearness::inner_product}) {
    // More centroids than clusters, so that a poor start cannot merge two.
    const KMeansConfig config = {.clusters = 24, .iterations = 10, .nearness = nearness, .seed = 1};
    ProgressMeter meter(kNoProgress, 1.0);
    const auto centroids =
        train_kmeans(*context().kernels, nullptr, points.data(), 600, 64, config, meter);
    ASSERT_EQ(centroids.size(), 24U * 64U);
    NearestCentroid nearest(*context().kernels, nearness, 64);
    nearest.set(centroids.data(), 24);
    std::vector<uint32_t> labels(600);
    nearest.assign(points.data(), 600, labels.data());
    for (size_t a = 0; a < 60; ++a) {
      for (size_t b = 0; b < 60; ++b) {
        EXPECT_TRUE(a % 6 == b % 6 || labels[a] != labels[b]) << a << " and " << b;
      }
    }
    for (size_t c = 0; nearness == Nearness::inner_product && c < 24; ++c) {
      double norm = 0.0;
      for (size_t j = 0; j < 64; ++j) norm += double{centroids[c * 64 + j]} * centroids[c * 64 + j];
      EXPECT_NEAR(norm, 1.0, 1e-4) << "spherical centroids have length 1";
    }
  }
}

TEST(TrainPart, ListsArePartitionWithTheirMeans) {
  std::mt19937 random(33);
  Keys keys(500, 64, DType::f32);
  keys.put(0, attention_keys(500, 64, random));
  std::uniform_real_distribution<float> unit(0.1F, 5.0F);
  for (const bool center : {false, true}) {
    for (const Nearness nearness : {Nearness::l2, Nearness::inner_product}) {
      std::vector<float> scale(center ? 64 : 0);
      for (float& s : scale) s = unit(random);
      const PartConfig config = {.iterations = 3,
                                 .nearness = nearness,
                                 .center = center,
                                 .seed = 1,
                                 .rope = &kKeepRope,
                                 .scale = scale,
                                 .dtype = keys.view().dtype};
      ProgressMeter meter(kNoProgress, 1.0);
      const Part part = train_part(context(), keys.view(), 100, 450, 20, config, meter);
      std::vector<int> seen(500, 0);
      ASSERT_EQ(part.centroids.size(), part.lists.count() * 64);
      for (size_t l = 0; l < part.lists.count(); ++l) {
        const KeyList list = part.lists.list(l);
        ASSERT_GT(list.size, 0U);
        std::vector<double> mean(64, 0.0);
        for (uint32_t i = 0; i < list.size; ++i) {
          ++seen[list.rows[i]];
          EXPECT_TRUE(i == 0 || list.rows[i - 1] < list.rows[i]);
          EXPECT_EQ(std::memcmp(list.keys + i * 256, keys.view().row(list.rows[i]), 256), 0);
          std::vector<float> row(64);
          std::memcpy(row.data(), list.keys + i * 256, 256);
          for (size_t j = 0; j < 64; ++j) mean[j] += double{row[j]} / list.size;
        }
        for (size_t j = 0; j < 64; ++j) EXPECT_NEAR(part.centroids[l * 64 + j], mean[j], 1e-4);
      }
      for (size_t i = 0; i < 500; ++i) EXPECT_EQ(seen[i], i >= 100 && i < 450 ? 1 : 0);
    }
  }
}

TEST(ListRanking, OneHeadAloneRanksByScore) {
  std::mt19937 random(34);
  ListRanking ranking;
  for (const size_t lists : {1, 2, 17, 400}) {
    ranking.reserve(1, lists);
    std::vector<float> scores = gaussian(lists, 1, random);
    std::copy(scores.begin(), scores.end(), ranking.scores());
    const auto best = ranking.best(1, lists, lists, [](size_t) { return false; });
    ASSERT_EQ(best.size(), lists);
    for (size_t i = 1; i < lists; ++i) EXPECT_GE(scores[best[i - 1]], scores[best[i]]);
  }
}

TEST(ListRanking, EveryHeadHasTheSameWeight) {
  // Head 1 has scores a thousand times larger; the first choice of head 0 must still be among the best.
  std::mt19937 random(35);
  ListRanking ranking;
  ranking.reserve(2, 200);
  for (size_t l = 0; l < 200; ++l) {
    ranking.scores()[l] = 0.001F * static_cast<float>(random() % 100);
    ranking.scores()[ranking.stride() + l] = static_cast<float>(random() % 100000);
  }
  ranking.scores()[123] = 1.0F;
  const auto best = ranking.best(2, 200, 3, [](size_t) { return false; });
  EXPECT_NE(std::find(best.begin(), best.end(), 123U), best.end());
}

TEST(ListRanking, EmptyListsComeLastAndEqualScoresKeepTheOrder) {
  ListRanking ranking;
  ranking.reserve(3, 10);
  std::fill_n(ranking.scores(), 3 * ranking.stride(), 7.5F);
  const auto best = ranking.best(3, 10, 4, [](size_t l) { return l < 6; });
  EXPECT_EQ(std::vector<uint32_t>(best.begin(), best.end()), (std::vector<uint32_t>{6, 7, 8, 9}));
}

TEST(Ivf, FewProbesFindFarMoreThanTheirShare) {
  std::mt19937 random(36);
  Keys keys(4000, 64, DType::f16);
  keys.put(0, attention_keys(4000, 64, random));
  for (const char* spec :
       {"ivf:probe=8,segment=1000", "ivf:probe=8,train=global", "ivf:probe=8,metric=ip"}) {
    SCOPED_TRACE(spec);
    const auto index = built(spec, keys);
    const auto q = attention_queries(2, 64, keys, random);
    const double share = static_cast<double>(search(*index, q, 64, 10).keys_scored) / (2 * 4000);
    EXPECT_GT(share, 0.0);
    EXPECT_LT(share, 0.25);
    std::mt19937 queries(37);
    EXPECT_GT(mean_recall(*index, keys, 10, 10, queries), 2.5 * share);
  }
}

TEST(Ivf, RecallGrowsWithProbes) {
  std::mt19937 random(38);
  Keys keys(3000, 64, DType::f16);
  keys.put(0, attention_keys(3000, 64, random));
  double last = -1.0;
  for (const char* probe : {"1", "4", "16", "47"}) {
    const auto index = built(std::string("ivf:C=47,segment=1000,probe=") + probe, keys);
    std::mt19937 queries(39);
    const double now = mean_recall(*index, keys, 20, 10, queries);
    EXPECT_GE(now, last);
    last = now;
  }
  EXPECT_EQ(last, 1.0);
}

TEST(Ivf, CountsWhatItReads) {
  std::mt19937 random(40);
  Keys keys(1000, 128, DType::f16);
  keys.put(0, gaussian(1000, 128, random));
  const auto index = built("ivf:C=10,probe=10,codec=none", keys);
  const auto queries = gaussian(4, 128, random);
  const Answer answer = search(*index, queries, 128, 5);
  const auto lists = static_cast<uint64_t>(diagnostic(*index, "lists"));
  EXPECT_EQ(answer.keys_scored, 4U * 1000U);
  EXPECT_EQ(answer.bytes_read, (1000 + lists) * 256);
}

TEST(Ivf, AppendedRowsAreClusteredOnceASegmentHasComeIn) {
  std::mt19937 random(41);
  Keys keys(1000, 64, DType::f16);
  keys.put(0, attention_keys(1000, 64, random));
  const auto index = make_index("ivf:segment=300", 64, DType::f16, context());
  BuildInput input;
  input.keys = keys.view(400);
  index->build(input, {});
  EXPECT_EQ(diagnostic(*index, "parts"), 1.0);
  EXPECT_EQ(diagnostic(*index, "tail_rows"), 0.0);
  index->append(keys.view(500), {});
  index->append(keys.view(699), {});
  EXPECT_EQ(diagnostic(*index, "parts"), 1.0);
  EXPECT_EQ(diagnostic(*index, "tail_rows"), 299.0);
  index->append(keys.view(700), {});
  EXPECT_EQ(diagnostic(*index, "parts"), 2.0);
  EXPECT_EQ(diagnostic(*index, "tail_rows"), 0.0);
  index->truncate(650);
  index->append(keys.view(1000), {});
  EXPECT_EQ(diagnostic(*index, "parts"), 3.0);
}

TEST(Ivf, AnExplicitNumberOfListsIsKeptByTheBuild) {
  std::mt19937 random(42);
  Keys keys(1000, 64, DType::f16);
  keys.put(0, gaussian(1000, 64, random));
  for (const char* spec : {"ivf:C=37,segment=128", "ivf:C=37,train=global"}) {
    // Gaussian rows: k-means leaves no list empty.
    EXPECT_EQ(diagnostic(*built(spec, keys), "lists"), 37.0) << spec;
  }
  EXPECT_LE(diagnostic(*built("ivf:C=5000", keys), "lists"), 1000.0);
}

TEST(Ivf, DiagnosticsDescribeTheLists) {
  std::mt19937 random(43);
  Keys keys(640, 64, DType::f16);
  keys.put(0, clustered(640, 4, 64, random));
  const auto index = built("ivf:C=16,train=global", keys);
  EXPECT_GE(diagnostic(*index, "list_size_min"), 1.0);
  EXPECT_LE(diagnostic(*index, "list_size_max"), 160.0);
  EXPECT_EQ(diagnostic(*index, "list_size_mean"), 640.0 / diagnostic(*index, "lists"));
  EXPECT_GE(diagnostic(*index, "imbalance"), 1.0);
}

}  // namespace
}  // namespace keyhole::index::test

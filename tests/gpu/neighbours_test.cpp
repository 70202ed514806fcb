// The neighbour search against a brute-force one in double precision.
#include "gpu/neighbours.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "cpu/half.h"
#include "cpu/kernels.h"
#include "gpu/device.h"
#include "tests/gpu/cuda_parts.h"
#include "tests/gpu/device_copy.h"
#include "tests/normal.h"

namespace keyhole::gpu {
namespace {

/// Rows of a dtype, some bytes apart, and the numbers that they hold after rounding to it.
struct Rows {
  std::vector<std::byte> bytes;
  std::vector<float> numbers;  // [count, dim]
  RowsView view;

  Rows(const std::vector<float>& from, size_t count, uint32_t dim, DType dtype, size_t gap = 0)
      : numbers(from) {
    const size_t row = dim * dtype_size(dtype);
    bytes.assign(count * (row + gap) + 16, std::byte{0x7B});
    const cpu::Kernels& kernels = cpu::select_kernels("scalar");
    for (size_t i = 0; i < count; ++i) {
      std::byte* at = bytes.data() + i * (row + gap);
      kernels.from_f32[static_cast<size_t>(dtype)](from.data() + i * dim, at, dim);
      kernels.to_f32[static_cast<size_t>(dtype)](at, numbers.data() + i * dim, dim);
    }
    view = dense_rows(bytes.data(), count, dim, dtype);
    view.token_stride += static_cast<ptrdiff_t>(gap / dtype_size(dtype));
  }
};

std::vector<float> gaussian_rows(std::mt19937& random, size_t n, float scale = 1.0F) {
  keyhole::test::Normal<float> normal(0.0F, scale);
  std::vector<float> out(n);
  for (float& x : out) x = normal(random);
  return out;
}
/// Whole numbers: their inner products are exact in fp32, and tie often.
std::vector<float> whole(std::mt19937& random, size_t n, int largest) {
  std::uniform_int_distribution<int> pick(-largest, largest);
  std::vector<float> out(n);
  for (float& x : out) x = static_cast<float>(pick(random));
  return out;
}

struct Case {
  Rows keys, queries;
  std::vector<float> key_extra, query_extra;  // empty: none
  std::vector<uint32_t> limits;               // empty: none
  uint32_t most = 0;
  double tolerance = 0.0;  // of scores; 0: they and all ids must be exact

  [[nodiscard]] NeighbourTask task() const {
    NeighbourTask t;
    t.keys = keys.view;
    t.queries = queries.view;
    if (!key_extra.empty()) {
      t.key_extra = key_extra.data();
      t.query_extra = query_extra.data();
    }
    if (!limits.empty()) t.limits = limits.data();
    t.most = most;
    return t;
  }
};

struct Answer {
  std::vector<uint32_t> ids, counts;
  std::vector<float> scores;
  Answer(size_t queries, uint32_t most)
      : ids(queries * most, 0xDEADBEEF), counts(queries, 77777), scores(queries * most, 1e30F) {}
  NeighbourLists lists() { return {ids.data(), scores.data(), counts.data(), Memory::host}; }
};

/// Numbers of a query after the rounding that NeighbourTask promises.
std::vector<double> query_numbers(const Case& c, size_t q) {
  const uint32_t dim = c.keys.view.dim;
  std::vector<double> out(dim);
  const float* from = c.queries.numbers.data() + q * dim;
  const DType type = c.keys.view.dtype;
  float largest = 0.0F;
  for (uint32_t j = 0; j < dim; ++j) largest = std::max(largest, std::fabs(from[j]));
  const bool rounds = type != DType::f32 && c.queries.view.dtype != type;
  const int exponent = rounds && largest > 0.0F ? std::ilogb(largest) + 1 : 0;
  const cpu::Kernels& kernels = cpu::select_kernels("scalar");
  for (uint32_t j = 0; j < dim; ++j) {
    float x = from[j];
    if (rounds) {
      std::byte rounded[4];
      x = std::ldexp(x, -exponent);
      kernels.from_f32[static_cast<size_t>(type)](&x, rounded, 1);
      kernels.to_f32[static_cast<size_t>(type)](rounded, &x, 1);
    }
    out[j] = std::ldexp(double{x}, exponent);
  }
  return out;
}

void expect_right(const Case& c, const Answer& answer) {
  const size_t n = c.keys.view.tokens;
  const uint32_t dim = c.keys.view.dim;
  std::vector<double> scores(n);
  std::vector<uint32_t> order(n);
  for (size_t q = 0; q < c.queries.view.tokens; ++q) {
    const size_t sees = c.limits.empty() ? n : std::min<size_t>(n, c.limits[q]);
    const std::vector<double> query = query_numbers(c, q);
    for (size_t i = 0; i < sees; ++i) {
      double sum = 0.0;
      for (uint32_t j = 0; j < dim; ++j) sum += query[j] * c.keys.numbers[i * dim + j];
      if (!c.key_extra.empty()) sum += double{c.query_extra[q]} * c.key_extra[i];
      scores[i] = sum;
    }
    const size_t expected = std::min<size_t>(c.most, sees);
    ASSERT_EQ(answer.counts[q], expected) << "query " << q << ", sees " << sees;
    if (expected == 0) continue;
    order.resize(sees);
    std::iota(order.begin(), order.end(), 0U);
    const auto better = [&](uint32_t a, uint32_t b) {
      return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    };
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(expected),
                      order.end(), better);
    const double last = scores[order[expected - 1]];
    const uint32_t* ids = answer.ids.data() + q * c.most;
    const float* found = answer.scores.data() + q * c.most;
    std::vector<uint32_t> sorted(ids, ids + expected);
    std::sort(sorted.begin(), sorted.end());
    ASSERT_EQ(std::unique(sorted.begin(), sorted.end()), sorted.end()) << "query " << q;
    ASSERT_LT(sorted.back(), sees) << "query " << q;
    for (size_t i = 0; i < expected; ++i) {
      if (c.tolerance == 0.0) {
        ASSERT_EQ(ids[i], order[i]) << "query " << q << ", place " << i << " of " << expected;
      }
      ASSERT_NEAR(found[i], scores[ids[i]], c.tolerance) << "query " << q << ", place " << i;
      // As good as the true one of this place, up to rounding.
      ASSERT_GE(scores[ids[i]], scores[order[i]] - 2 * c.tolerance) << "query " << q << ", " << i;
      ASSERT_GE(scores[ids[i]], last - 2 * c.tolerance);
      if (i == 0) continue;
      ASSERT_TRUE(found[i - 1] > found[i] || (found[i - 1] == found[i] && ids[i - 1] < ids[i]))
          << "order, query " << q << ", place " << i;
    }
    for (size_t i = expected; i < c.most; ++i) {
      ASSERT_TRUE(answer.ids[q * c.most + i] == 0xDEADBEEF || answer.ids[q * c.most + i] == 0);
    }
  }
}

class Neighbours : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << cuda_status();
    search_ = make_cuda_neighbours({});
  }
  void run(const Case& c, NeighbourSearch& search) {
    Answer answer(c.queries.view.tokens, c.most);
    search.run(c.task(), answer.lists());
    expect_right(c, answer);
  }
  void run(const Case& c) { run(c, *search_); }
  std::unique_ptr<NeighbourSearch> search_;
};

Case random_case(std::mt19937& random, size_t m, size_t n, uint32_t dim, uint32_t most, DType keys,
                 DType queries, bool limited, bool extra, bool exact) {
  const auto numbers = [&](size_t count) {
    return exact ? whole(random, count, 3) : gaussian_rows(random, count);
  };
  const size_t gap = random() % 2 * 16 * (1 + random() % 3);
  Case c{Rows(numbers(n * dim), n, dim, keys, gap),
         Rows(numbers(m * dim), m, dim, queries, random() % 2 * 4),
         {},
         {},
         {},
         most,
         exact ? 0.0 : 2e-6 * dim + 1e-5};
  if (extra) {
    c.key_extra = numbers(n);
    c.query_extra = numbers(m);
  }
  if (limited) {
    for (size_t i = 0; i < m; ++i) c.limits.push_back(static_cast<uint32_t>(random() % (n + 3)));
    if (random() % 2) std::sort(c.limits.begin(), c.limits.end());
  }
  return c;
}

TEST_F(Neighbours, RandomShapes) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  constexpr uint32_t kDims[] = {64, 80, 96, 128, 256};
  constexpr DType kTypes[] = {DType::f16, DType::bf16, DType::f32};
  for (int i = 0; i < 90; ++i) {
    const size_t m = 1 + random() % (i % 3 == 0 ? 700 : 40);
    const size_t n = 1 + random() % (i % 4 == 0 ? 6000 : 300);
    const uint32_t dim = kDims[i % 5];
    const DType keys = kTypes[i % 3];
    const DType queries = random() % 2 ? keys : kTypes[random() % 3];
    const uint32_t most = 1 + random() % (i % 2 ? 128 : 10);
    const bool limited = random() % 2;
    const bool extra = random() % 2;
    const bool exact = random() % 2;
    SCOPED_TRACE(std::to_string(m) + " queries of " + dtype_name(queries) + ", " +
                 std::to_string(n) + " keys of " + dtype_name(keys) + ", dim " +
                 std::to_string(dim) + ", most " + std::to_string(most) +
                 (limited ? ", limited" : "") + (extra ? ", extra" : "") +
                 (exact ? ", exact" : ""));
    run(random_case(random, m, n, dim, most, keys, queries, limited, extra, exact));
    if (HasFatalFailure()) return;
  }
}

TEST_F(Neighbours, ManyKeysAreSampledFirst) {
  std::mt19937 random(7);
  for (const uint32_t most : {1U, 100U, 128U}) {
    for (const DType type : {DType::f16, DType::bf16, DType::f32}) {
      for (const bool limited : {false, true}) {
        SCOPED_TRACE(std::to_string(most) + " " + dtype_name(type));
        run(random_case(random, 300, 40000, 64, most, type, type, limited, limited, limited));
        if (HasFatalFailure()) return;
        // Lists hold a small multiple of what is wanted: the estimate works.
        EXPECT_LT(search_->figures().passed, 300U * 16U * (most + 60)) << most;
      }
    }
  }
}

TEST_F(Neighbours, SeveralBlocksOfKeys) {
  std::mt19937 random(8);
  const auto search = make_cuda_neighbours({.block_keys = 4096});
  for (const DType type : {DType::f16, DType::f32}) {
    for (const bool limited : {false, true}) {
      const Case c =
          random_case(random, 270, 19000, 128, 100, type, DType::f32, limited, true, false);
      run(c, *search);
      EXPECT_EQ(search->figures().blocks, 5U);
      run(random_case(random, 100, 9000, 64, 50, type, type, limited, false, true), *search);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(Neighbours, LittleMemoryMeansMoreRounds) {
  std::mt19937 random(9);
  const auto search = make_cuda_neighbours({.memory_limit = size_t{300} << 20U});
  const Case c = random_case(random, 9000, 3000, 64, 20, DType::f16, DType::f16, true, false, true);
  run(c, *search);
  EXPECT_LE(search->bytes(), size_t{300} << 20U);
  const auto tiny = make_cuda_neighbours({.memory_limit = 100000});
  Answer answer(c.queries.view.tokens, c.most);
  EXPECT_THROW(tiny->run(c.task(), answer.lists()), Error);
}

TEST_F(Neighbours, EqualKeysComeByNumber) {
  // Every score ties: thresholds must not let through, or keep out, more than they should.
  std::vector<float> keys(20000 * 64, 1.0F);
  std::mt19937 random(10);
  Case c{Rows(keys, 20000, 64, DType::f16),
         Rows(whole(random, 40 * 64, 2), 40, 64, DType::f16),
         {},
         {},
         {},
         100,
         0.0};
  run(c);
  c.limits.assign(40, 20000);
  for (uint32_t i = 0; i < 40; ++i) c.limits[i] = i * 5;
  run(c);
}

TEST_F(Neighbours, SortedKeys) {
  // Ascending scores: every key is better than all before it.
  constexpr size_t kKeys = 30000;
  std::vector<float> keys(kKeys * 64, 0.0F);
  for (size_t i = 0; i < kKeys; ++i) {
    keys[i * 64] = static_cast<float>(i / 64);
    keys[i * 64 + 1] = static_cast<float>(i % 64);
  }
  std::vector<float> queries(2 * 64, 0.0F);
  queries[0] = 64.0F;
  queries[1] = 1.0F;
  queries[64] = -64.0F;
  queries[65] = -1.0F;
  run({Rows(keys, kKeys, 64, DType::f16), Rows(queries, 2, 64, DType::f16), {}, {}, {}, 128, 0.0});
}

TEST_F(Neighbours, EstimateThatIsTooHighIsRepeated) {
  // 60 sampled keys are good and no others: enough to set a threshold (the 22nd best of the sample), too few to be
  // the 100 that are wanted. For the third query they are bad, and nothing is wrong.
  constexpr size_t kKeys = 16384;
  constexpr uint32_t kDim = 64;
  std::vector<float> keys(kKeys * kDim, 0.0F);
  for (size_t i = 0; i < kKeys; ++i) {
    const size_t turn = i / 16;
    const bool sampled = i % 16 == ((static_cast<uint32_t>(turn) * 0x9E3779B9U) >> 28U);
    keys[i * kDim] = !sampled         ? static_cast<float>(i % 997) - 500.0F
                     : turn % 17 == 3 ? 1000.0F + static_cast<float>(i % 512)
                                      : -900.0F;
  }
  std::vector<float> queries(3 * kDim, 0.0F);
  queries[0] = 1.0F;
  queries[kDim] = 0.5F;
  queries[2 * kDim] = -1.0F;
  const Case c{Rows(keys, kKeys, kDim, DType::f16),
               Rows(queries, 3, kDim, DType::f16),
               {},
               {},
               {},
               100,
               0.0};
  run(c);
  EXPECT_EQ(search_->figures().repeated, 2U);
}

TEST_F(Neighbours, ThinnedListsAreEdgesOfANeighbourhoodGraph) {
  std::mt19937 random(14);
  constexpr uint32_t kDims[] = {64, 80, 96, 128, 256};
  const auto blocks = make_cuda_neighbours({.block_keys = 1024});
  for (int i = 0; i < 15; ++i) {
    const uint32_t dim = kDims[i % 5];
    const size_t n = i == 6 ? 2500 : 2 + random() % (i % 3 == 0 ? 1200 : 200);
    const uint32_t most = 1 + random() % 128;
    const uint32_t thin = 1 + random() % most;
    const DType type = i % 2 ? DType::f16 : DType::bf16;
    SCOPED_TRACE(std::to_string(n) + " keys, dim " + std::to_string(dim) + ", most " +
                 std::to_string(most) + ", thin " + std::to_string(thin));
    Case c = random_case(random, n, n, dim, most, type, type, false, true, true);
    c.queries = c.keys;
    c.queries.view.data = c.queries.bytes.data();
    c.query_extra = c.key_extra;
    NeighbourTask task = c.task();
    task.thin = thin;
    std::vector<uint32_t> ids(n * thin, 0xDEADBEEF);
    std::vector<uint32_t> counts(n, 77777);
    (i % 3 == 0 ? blocks : search_)->run(task, {.ids = ids.data(), .counts = counts.data()});
    const auto similar = [&](size_t a, size_t b) {
      double sum = double{c.key_extra[a]} * c.key_extra[b];
      for (uint32_t j = 0; j < dim; ++j) {
        sum += double{c.keys.numbers[a * dim + j]} * c.keys.numbers[b * dim + j];
      }
      return sum;
    };
    for (size_t q = 0; q < n; ++q) {
      std::vector<std::pair<double, uint32_t>> order;
      for (uint32_t k = 0; k < n; ++k) order.emplace_back(-similar(q, k), k);
      std::sort(order.begin(), order.end());
      order.resize(std::min<size_t>(order.size(), most));
      std::vector<uint32_t> expected;
      for (const auto& [score, k] : order) {
        if (k == q || expected.size() == thin) continue;
        bool hidden = false;
        for (const uint32_t e : expected) hidden = hidden || similar(e, k) > -score;
        if (!hidden) expected.push_back(k);
      }
      ASSERT_EQ(counts[q], expected.size()) << "key " << q;
      for (size_t e = 0; e < expected.size(); ++e) {
        ASSERT_EQ(ids[q * thin + e], expected[e]) << "key " << q << ", edge " << e;
      }
    }
  }
  // fp32: the best ones as they are.
  Case c = random_case(random, 300, 300, 64, 20, DType::f32, DType::f32, false, true, true);
  Answer whole(300, 20);
  search_->run(c.task(), whole.lists());
  NeighbourTask task = c.task();
  task.thin = 7;
  std::vector<uint32_t> ids(300 * 7, 0xDEADBEEF);
  std::vector<uint32_t> counts(300, 77777);
  search_->run(task, {.ids = ids.data(), .counts = counts.data()});
  for (size_t q = 0; q < 300; ++q) {
    ASSERT_EQ(counts[q], 7U);
    for (size_t i = 0; i < 7; ++i) ASSERT_EQ(ids[q * 7 + i], whole.ids[q * 20 + i]);
  }
  task.thin = 21;
  EXPECT_THROW(search_->run(task, {.ids = ids.data(), .counts = counts.data()}), Error);
  task.thin = 7;
  EXPECT_THROW(search_->run(task, whole.lists()), Error);
}

TEST_F(Neighbours, Refusals) {
  std::mt19937 random(12);
  const Case c = random_case(random, 3, 20, 64, 5, DType::f16, DType::f16, false, false, true);
  Answer answer(3, 5);
  const auto status = [&](NeighbourTask task, NeighbourLists lists) {
    try {
      search_->run(task, lists);
    } catch (const Error& error) {
      return error.status();
    }
    return Status::ok;
  };
  NeighbourTask task = c.task();
  task.most = 0;
  EXPECT_EQ(status(task, answer.lists()), Status::invalid_argument);
  task.most = 129;
  EXPECT_EQ(status(task, answer.lists()), Status::invalid_argument);
  task = c.task();
  task.queries.dim = 80;
  EXPECT_EQ(status(task, answer.lists()), Status::invalid_argument);
  task = c.task();
  float extra[20] = {};
  task.key_extra = extra;
  EXPECT_EQ(status(task, answer.lists()), Status::invalid_argument);
  NeighbourLists none = answer.lists();
  none.ids = nullptr;
  EXPECT_EQ(status(c.task(), none), Status::invalid_argument);
  task = c.task();
  task.keys.tokens = 0;
  EXPECT_EQ(status(task, answer.lists()), Status::ok);
  EXPECT_EQ(answer.counts, std::vector<uint32_t>(3, 0));
  run(c);  // and it still works
}

TEST(NeighboursWithout, ADeviceThatIsNotThere) {
  try {
    (void)make_cuda_neighbours({}, 4711);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::unsupported) << error.what();
  }
}

#ifdef KEYHOLE_TEST_CUDA
TEST_F(Neighbours, DeviceMemoryAndRepetition) {
  std::mt19937 random(13);
  for (const DType type : {DType::f16, DType::bf16, DType::f32}) {
    for (const bool extra : {false, true}) {
      const Case c = random_case(random, 600, 9000, 96, 64, type, type, true, extra, false);
      Answer host(600, 64);
      search_->run(c.task(), host.lists());
      const DeviceCopy keys(c.keys.bytes);
      const DeviceCopy queries(c.queries.bytes);
      const DeviceCopy limits(c.limits);
      const DeviceCopy key_extra(c.key_extra);
      const DeviceCopy query_extra(c.query_extra);
      Answer device(600, 64);
      const DeviceCopy ids(device.ids);
      const DeviceCopy counts(device.counts);
      const DeviceCopy scores(device.scores);
      NeighbourTask task = c.task();
      task.keys.data = keys.data();
      task.queries.data = queries.data();
      task.limits = limits.data();
      if (extra) {
        task.key_extra = key_extra.data();
        task.query_extra = query_extra.data();
      }
      task.keys.memory = task.queries.memory = Memory::device;
      for (int i = 0; i < 3; ++i) {
        search_->run(task, {ids.data(), scores.data(), counts.data(), Memory::device});
        device.ids = ids.read();
        device.counts = counts.read();
        device.scores = scores.read();
        expect_right(c, device);
        ASSERT_EQ(device.counts, host.counts);
        for (size_t q = 0; q < 600; ++q) {
          for (size_t k = 0; k < device.counts[q]; ++k) {
            ASSERT_EQ(device.ids[q * 64 + k], host.ids[q * 64 + k]);
            ASSERT_EQ(device.scores[q * 64 + k], host.scores[q * 64 + k]);
          }
        }
      }
    }
  }
}
#endif

}  // namespace
}  // namespace keyhole::gpu

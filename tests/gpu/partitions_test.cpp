// Partitions on the device against double precision on the host: what is chosen, what the others add.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/partitions/cuda_partitions.h"
#include "gpu/cuda/partitions/kernels.h"
#include "gpu/device.h"
#include "tests/normal.h"

namespace keyhole::gpu {
namespace {

uint16_t to_half(float x) {
  // Values of the tests are normal numbers of fp16 or zero.
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000U;
  const int exponent = static_cast<int>(bits >> 23 & 255U) - 127;
  if (exponent < -14) return static_cast<uint16_t>(sign);
  return static_cast<uint16_t>(sign | static_cast<uint32_t>(exponent + 15) << 10 |
                               (bits >> 13 & 1023U));
}

double from_half(uint16_t h) {
  const int exponent = h >> 10 & 31;
  if (exponent == 0) return 0.0;
  const double value = std::ldexp(1024.0 + (h & 1023), exponent - 25);
  return (h & 0x8000) != 0 ? -value : value;
}

/// Elements of a dtype: what is stored, and what it means.
struct Elements {
  std::vector<std::byte> bytes;
  std::vector<double> exact;

  Elements(DType dtype, const std::vector<float>& x) : bytes(x.size() * dtype_size(dtype)) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (dtype == DType::f32) {
        std::memcpy(bytes.data() + 4 * i, &x[i], 4);
        exact.push_back(double{x[i]});
        continue;
      }
      uint32_t bits = 0;
      std::memcpy(&bits, &x[i], 4);
      const auto stored = dtype == DType::f16 ? to_half(x[i]) : static_cast<uint16_t>(bits >> 16);
      std::memcpy(bytes.data() + 2 * i, &stored, 2);
      if (dtype == DType::f16) {
        exact.push_back(from_half(stored));
      } else {
        bits = uint32_t{stored} << 16;
        float value = 0.0F;
        std::memcpy(&value, &bits, 4);
        exact.push_back(double{value});
      }
    }
  }
};

/// Partitions of one KV head, as the host holds them.
struct HostPartitions {
  uint32_t count = 0;
  uint32_t dim = 0;
  std::vector<int8_t> keys;
  std::vector<float> scales, center, sizes, query_scales, variances;
  std::vector<std::byte> values;
  std::vector<double> exact_values;

  HostPartitions(std::mt19937& random, uint32_t n, uint32_t d, DType dtype)
      : count(n),
        dim(d),
        keys(size_t{n} * d),
        scales(d),
        center(d),
        sizes(n),
        query_scales(d),
        variances(n) {
    std::uniform_int_distribution<int> code(-127, 127);
    std::uniform_real_distribution<float> unit(0.0F, 1.0F);
    keyhole::test::Normal<float> normal;
    for (auto& k : keys) k = static_cast<int8_t>(code(random));
    for (auto& s : scales) s = (0.2F + unit(random)) / 64.0F;
    for (auto& c : center) c = normal(random);
    for (auto& s : query_scales) s = 0.2F + 1.2F * unit(random);
    for (auto& s : sizes) s = 1.0F + static_cast<float>(random() % 30);
    for (auto& v : variances) v = 0.03F * unit(random) * unit(random);
    std::vector<float> x(size_t{n} * d);
    for (auto& v : x) v = normal(random);
    Elements e(dtype, x);
    values = std::move(e.bytes);
    exact_values = std::move(e.exact);
  }

  [[nodiscard]] PartitionRows rows() const { return rows(0, count); }
  [[nodiscard]] PartitionRows rows(uint32_t first, uint32_t n) const {
    return {.count = n,
            .keys = keys.data() + size_t{first} * dim,
            .scales = scales.data(),
            .center = center.data(),
            .sizes = sizes.data() + first,
            .query_scales = query_scales.data(),
            .variances = variances.data() + first,
            .values = values.data() + size_t{first} * (count == 0 ? 0 : values.size() / count)};
  }
};

/// What a step of one KV head ought to give, given what was chosen.
struct Expected {
  std::vector<std::vector<double>> shares;  // [group][count]
  std::vector<double> log_sums;             // [group]
  std::vector<double> merits;               // [count]
};

Expected weigh(const HostPartitions& p, const std::vector<double>& q, uint32_t group,
               const LogitParams& logits, PartitionsTail tail) {
  Expected e;
  e.merits.assign(p.count, 0.0);
  for (uint32_t h = 0; h < group; ++h) {
    const double* query = q.data() + size_t{h} * p.dim;
    double square = 0.0;
    for (uint32_t j = 0; j < p.dim; ++j) {
      square += query[j] * p.query_scales[j] * query[j] * p.query_scales[j];
    }
    std::vector<double> logs(p.count);
    double largest = -std::numeric_limits<double>::infinity();
    for (uint32_t i = 0; i < p.count; ++i) {
      double mean = 0.0;
      for (uint32_t j = 0; j < p.dim; ++j) {
        mean +=
            query[j] * (double{p.center[j]} + double{p.scales[j]} * p.keys[size_t{i} * p.dim + j]);
      }
      mean *= double{logits.scale};
      double slope = double{logits.scale};
      if (logits.softcap > 0.0F) {
        const double share = std::tanh(mean / double{logits.softcap});
        mean = double{logits.softcap} * share;
        slope *= 1.0 - share * share;
      }
      const double keys = std::log(double{p.sizes[i]});
      const double t = slope * slope * square * double{p.variances[i]};
      double expected = t <= 2.0 * keys ? 0.5 * t : std::sqrt(2.0 * t * keys) - keys;
      if (tail == PartitionsTail::centroid) expected = 0.0;
      logs[i] = mean + expected + keys;
      largest = std::max(largest, logs[i]);
    }
    double sum = 0.0;
    for (const double l : logs) sum += std::exp(l - largest);
    e.log_sums.push_back(p.count == 0 ? -std::numeric_limits<double>::infinity()
                                      : largest + std::log(sum));
    std::vector<double> shares(p.count);
    for (uint32_t i = 0; i < p.count; ++i) {
      shares[i] = std::exp(logs[i] - e.log_sums.back());
      e.merits[i] += shares[i];
    }
    e.shares.push_back(std::move(shares));
  }
  return e;
}

struct HeadState {
  std::vector<double> o;
  double lse = -std::numeric_limits<double>::infinity();
  double doubtful = 0.0;  // share of the tail that may be read or not
};

HeadState tail_of(const HostPartitions& p, const Expected& e, uint32_t h,
                  const std::vector<bool>& chosen) {
  HeadState state;
  state.o.assign(p.dim, 0.0);
  const auto group = static_cast<uint32_t>(e.shares.size());
  std::vector<double> least(group, 0.0);
  const auto others = static_cast<double>(std::count(chosen.begin(), chosen.end(), false));
  double left = 0.0;
  for (uint32_t g = 0; g < group; ++g) {
    double sum = 0.0;
    for (uint32_t i = 0; i < p.count; ++i) sum += chosen[i] ? 0.0 : e.shares[g][i];
    if (sum > 1e-4) least[g] = double{kLeastOfMean} * sum / others;
    if (g == h) left = sum;
  }
  if (left <= 1e-30) return state;
  state.lse = e.log_sums[h] + std::log(left);
  double read = 0.0;
  for (uint32_t i = 0; i < p.count; ++i) {
    if (chosen[i]) continue;
    double closest = 0.0;  // share / least of the head that has the most to say
    for (uint32_t g = h / 4 * 4; g < std::min(h / 4 * 4 + 4, group); ++g) {  // they read together
      closest = std::max(closest, least[g] > 0.0 ? e.shares[g][i] / least[g] : 1e30);
    }
    if (std::abs(closest - 1.0) < 0.01) state.doubtful += e.shares[h][i] / left;
    if (closest <= 1.0) continue;
    read += e.shares[h][i];
    for (uint32_t j = 0; j < p.dim; ++j) {
      state.o[j] += e.shares[h][i] * p.exact_values[size_t{i} * p.dim + j];
    }
  }
  for (double& x : state.o) x /= read > 0.0 ? read : 1.0;
  return state;
}

/// Once with clusters of blocks where the GPU has them, and once without.
class PartitionsTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << "no GPU: " << cuda_status();
    std::random_device device;
    seed_ = device();
    random_.seed(seed_);
    RecordProperty("seed", std::to_string(seed_));
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    sequence_ = DeviceBuffer(sizeof(uint32_t));
    sequence_.clear();
  }
  void TearDown() override {
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
    if (HasFailure()) std::printf("seed %u\n", seed_);
  }

  /// Queries of all heads, in device memory, rows `dim + 8` elements apart.
  struct Queries {
    DeviceBuffer memory;
    DeviceRows rows;
    std::vector<double> exact;  // [q_heads, dim]
  };
  Queries queries(uint32_t heads, uint32_t dim, DType dtype, float norm = 1.0F) {
    keyhole::test::Normal<float> normal(0.0F, norm);
    const size_t stride = dim + 8;
    std::vector<float> x(heads * stride);
    for (auto& v : x) v = normal(random_);
    return queries_of(heads, dim, dtype, x);
  }
  static Queries queries_of(uint32_t heads, uint32_t dim, DType dtype,
                            const std::vector<float>& x) {
    const size_t stride = dim + 8;
    const Elements e(dtype, x);
    Queries q;
    q.memory = DeviceBuffer(e.bytes.size());
    check(cudaMemcpy(q.memory.data(), e.bytes.data(), e.bytes.size(), cudaMemcpyHostToDevice), "q");
    check(cudaDeviceSynchronize(), "q");
    q.rows = {q.memory.data(), stride, dtype};
    for (uint32_t h = 0; h < heads; ++h) {
      for (uint32_t j = 0; j < dim; ++j) q.exact.push_back(e.exact[h * stride + j]);
    }
    return q;
  }

  void poison(const CudaPartitions& partitions, const PartitionsShape& shape) {
    check(cudaMemset(const_cast<float*>(partitions.tail_o()), 0xff,
                     size_t{shape.q_heads} * shape.head_dim * sizeof(float)),
          "poison");
    check(
        cudaMemset(const_cast<float*>(partitions.tail_lse()), 0xff, shape.q_heads * sizeof(float)),
        "poison");
    check(cudaDeviceSynchronize(), "poison");
  }

  struct Result {
    std::vector<std::vector<uint32_t>> ids;  // of each KV head
    std::vector<float> o, lse;
  };
  Result result(CudaPartitions& partitions, const PartitionsShape& shape, uint32_t layer) {
    Result r;
    const std::atomic<bool> stop{false};
    for (uint32_t k = 0; k < shape.kv_heads; ++k) {
      Chosen c;
      EXPECT_TRUE(partitions.await(layer, k, steps_ + 1, 10'000'000, stop, c));
      r.ids.emplace_back(c.ids, c.ids + c.count);
    }
    check(cudaStreamSynchronize(stream_), "step");
    r.o.resize(size_t{shape.q_heads} * shape.head_dim);
    r.lse.resize(shape.q_heads);
    check(cudaMemcpy(r.o.data(), partitions.tail_o(), r.o.size() * 4, cudaMemcpyDeviceToHost), "o");
    check(cudaMemcpy(r.lse.data(), partitions.tail_lse(), r.lse.size() * 4, cudaMemcpyDeviceToHost),
          "lse");
    ++steps_;
    check(cudaMemcpy(sequence_.data(), &steps_, 4, cudaMemcpyHostToDevice), "sequence");
    check(cudaDeviceSynchronize(), "sequence");
    return r;
  }
  Result step(CudaPartitions& partitions, const PartitionsShape& shape, uint32_t layer,
              const Queries& q) {
    poison(partitions, shape);
    partitions.choose(layer, q.rows, sequence_.as<uint32_t>(), stream_);
    partitions.attend(layer, stream_);
    return result(partitions, shape, layer);
  }

  /// tolerance: relative error of a weight.
  void expect_right(const PartitionsShape& shape, const HostPartitions& p, uint32_t kv_head,
                    uint32_t wanted, PartitionsTail tail, const std::vector<double>& q,
                    const Result& r, double tolerance = 1e-3) {
    const uint32_t group = shape.q_heads / shape.kv_heads;
    const std::vector<double> mine(
        q.begin() + static_cast<ptrdiff_t>(size_t{kv_head} * group * p.dim),
        q.begin() + static_cast<ptrdiff_t>(size_t{kv_head + 1} * group * p.dim));
    const Expected e = weigh(p, mine, group, shape.logits, tail);
    const auto& ids = r.ids[kv_head];
    ASSERT_EQ(ids.size(), std::min(wanted, p.count));
    std::vector<bool> chosen(p.count);
    double least = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < ids.size(); ++i) {
      ASSERT_LT(ids[i], p.count);
      if (i > 0) {
        ASSERT_LT(ids[i - 1], ids[i]);
      }
      chosen[ids[i]] = true;
      least = std::min(least, e.merits[ids[i]]);
    }
    for (uint32_t i = 0; i < p.count && !ids.empty(); ++i) {
      if (!chosen[i]) {
        ASSERT_LE(e.merits[i], least * (1.0 + 2.0 * tolerance) + 1e-8) << i;
      }
    }
    for (uint32_t h = 0; h < group; ++h) {
      const float* o = r.o.data() + size_t{kv_head * group + h} * p.dim;
      const float lse = r.lse[kv_head * group + h];
      HeadState want = tail_of(p, e, h, chosen);
      if (tail == PartitionsTail::none) {
        want.lse = -std::numeric_limits<double>::infinity();
        want.o.assign(p.dim, 0.0);
      }
      if (want.lse < -1e300) {
        EXPECT_EQ(lse, kMinusInf);
      } else {
        ASSERT_NEAR(lse, want.lse, tolerance * (1.0 + 1e-3 * std::abs(want.lse)));
      }
      double error = 0.0;
      for (uint32_t j = 0; j < p.dim; ++j) {
        ASSERT_TRUE(std::isfinite(o[j]));
        error = std::max(error, std::abs(double{o[j]} - want.o[j]));
      }
      // Values are of size 1 to 4; a doubtful one moves the mean by its share of that.
      EXPECT_LE(error, 4.0 * tolerance + 8.0 * want.doubtful) << "head " << h;
    }
  }

  uint32_t seed_ = 0;
  uint32_t steps_ = 0;
  std::mt19937 random_;
  cudaStream_t stream_ = nullptr;
  DeviceBuffer sequence_;
};

PartitionsShape shape_of(uint32_t kv_heads, uint32_t group, uint32_t dim, DType dtype,
                         uint32_t partitions, uint32_t most_chosen) {
  PartitionsShape s;
  s.layers = 2;
  s.q_heads = kv_heads * group;
  s.kv_heads = kv_heads;
  s.head_dim = dim;
  s.dtype = dtype;
  s.partitions = partitions;
  s.most_chosen = most_chosen;
  s.logits.scale = 1.0F / std::sqrt(static_cast<float>(dim));
  return s;
}

TEST_P(PartitionsTest, EveryShape) {
  const uint32_t counts[] = {1, 2, 31, 33, 257, 511, 512, 513, 1000, 2049};
  const uint32_t chosen[] = {0, 1, 7, 64, 1024};
  const DType dtypes[] = {DType::f32, DType::f16, DType::bf16};
  for (const uint32_t dim : {64U, 80U, 96U, 128U, 256U}) {
    for (uint32_t group = 1; group <= kMaxDeviceGroup; ++group) {
      const DType dtype = dtypes[random_() % 3];
      const uint32_t capacity = counts[random_() % 10];
      PartitionsShape shape = shape_of(1 + random_() % 3, group, dim, dtype, capacity, 1024);
      if (random_() % 4 == 0) shape.logits.softcap = 3.0F;
      SCOPED_TRACE("dim " + std::to_string(dim) + " group " + std::to_string(group) + " dtype " +
                   dtype_name(dtype) + " capacity " + std::to_string(capacity) + " kv_heads " +
                   std::to_string(shape.kv_heads));
      CudaPartitions partitions(shape, 0, GetParam());
      EXPECT_EQ(partitions.bytes(), partitions_bytes(shape));
      std::vector<HostPartitions> heads;
      std::vector<uint32_t> wanted;
      std::vector<PartitionsTail> tails;
      const uint32_t layer = random_() % 2;
      for (uint32_t k = 0; k < shape.kv_heads; ++k) {
        heads.emplace_back(random_, random_() % 3 == 0 ? random_() % (capacity + 1) : capacity, dim,
                           dtype);
        wanted.push_back(chosen[random_() % 5]);
        tails.push_back(static_cast<PartitionsTail>(random_() % 3));
        partitions.upload(layer, k, 0, heads[k].rows());
        partitions.set(layer, k, wanted[k], tails[k]);
        EXPECT_EQ(partitions.count(layer, k), heads[k].count);
        EXPECT_EQ(partitions.count(1 - layer, k), 0U);
      }
      const Queries q = queries(shape.q_heads, dim, dtypes[random_() % 3], 1.5F);
      const Result r = step(partitions, shape, layer, q);
      for (uint32_t k = 0; k < shape.kv_heads; ++k) {
        SCOPED_TRACE("KV head " + std::to_string(k) + ": " + std::to_string(heads[k].count) +
                     " partitions, " + std::to_string(wanted[k]) + " chosen, tail " +
                     std::to_string(static_cast<int>(tails[k])));
        expect_right(shape, heads[k], k, wanted[k], tails[k], q.exact, r);
      }
    }
  }
}

TEST_P(PartitionsTest, ManyPartitions) {
  // 128k keys, what no longer fits into shared memory, and more than 64 tiles.
  for (const uint32_t count : {8192U, 8705U, 40000U}) {
    const uint32_t group = count == 8192 ? 4 : 1 + random_() % kMaxDeviceGroup;
    SCOPED_TRACE(std::to_string(count) + " partitions, group " + std::to_string(group));
    const PartitionsShape shape = shape_of(1, group, 64, DType::f16, count + 100, 512);
    CudaPartitions partitions(shape, 0, GetParam());
    const HostPartitions p(random_, count, 64, DType::f16);
    partitions.upload(1, 0, 0, p.rows());
    partitions.set(1, 0, 64, PartitionsTail::second);
    const Queries q = queries(group, 64, DType::f32, 2.0F);
    expect_right(shape, p, 0, 64, PartitionsTail::second, q.exact, step(partitions, shape, 1, q));
  }
}

TEST_P(PartitionsTest, NoPartitions) {
  for (const uint32_t capacity : {0U, 700U}) {
    const PartitionsShape shape = shape_of(2, 3, 96, DType::bf16, capacity, 8);
    CudaPartitions partitions(shape, 0, GetParam());
    const HostPartitions none(random_, 0, 96, DType::bf16);
    partitions.set(0, 0, 8, PartitionsTail::second);
    const Queries q = queries(6, 96, DType::f16);
    const Result r = step(partitions, shape, 0, q);
    for (uint32_t k = 0; k < 2; ++k) {
      expect_right(shape, none, k, 8, PartitionsTail::second, q.exact, r);
    }
  }
}

// What kernels read of a head is spoilt behind the object's back: only a copy from the host can mend it.
TEST_P(PartitionsTest, WhatAHeadIsAlreadyIsNotCopied) {
  const PartitionsShape shape = shape_of(2, 1, 64, DType::f16, 600, 16);
  CudaPartitions partitions(shape, 0, GetParam());
  const PartitionsLayout layout(shape);
  std::byte* memory = reinterpret_cast<std::byte*>(const_cast<float*>(partitions.tail_o())) -
                      static_cast<ptrdiff_t>(layout.tail_o);
  const auto is_copied = [&](uint32_t kv_head, uint32_t chosen, PartitionsTail tail) {
    std::byte* head = memory + layout.heads + kv_head * sizeof(PartitionsHead);
    PartitionsHead before;
    check(cudaMemcpy(&before, head, sizeof before, cudaMemcpyDeviceToHost), "a head");
    check(cudaMemset(head, 0xff, sizeof before), "a spoilt head");
    check(cudaDeviceSynchronize(), "a spoilt head");
    partitions.set(0, kv_head, chosen, tail);
    PartitionsHead after;
    check(cudaMemcpy(&after, head, sizeof after, cudaMemcpyDeviceToHost), "a head");
    if (after.count != 0xffffffffU) {
      EXPECT_EQ(after.count, before.count);
      EXPECT_EQ(after.chosen, chosen);
      EXPECT_EQ(after.tail, static_cast<uint32_t>(tail));
      return true;
    }
    check(cudaMemcpy(head, &before, sizeof before, cudaMemcpyHostToDevice), "a head");
    check(cudaDeviceSynchronize(), "a head");
    return false;
  };
  EXPECT_FALSE(is_copied(0, 0, PartitionsTail::none));  // as all heads begin
  EXPECT_TRUE(is_copied(0, 8, PartitionsTail::none));
  EXPECT_FALSE(is_copied(0, 8, PartitionsTail::none));
  EXPECT_TRUE(is_copied(0, 8, PartitionsTail::second));
  EXPECT_FALSE(is_copied(1, 0, PartitionsTail::none));
  const HostPartitions p(random_, 100, 64, DType::f16);
  partitions.upload(0, 0, 0, p.rows());
  EXPECT_FALSE(is_copied(0, 8, PartitionsTail::second));
  EXPECT_TRUE(is_copied(0, 9, PartitionsTail::second));
}

TEST_P(PartitionsTest, AllPartitionsChosen) {
  const PartitionsShape shape = shape_of(1, 2, 128, DType::f16, 600, 1024);
  CudaPartitions partitions(shape, 0, GetParam());
  const HostPartitions p(random_, 600, 128, DType::f16);
  partitions.upload(0, 0, 0, p.rows());
  partitions.set(0, 0, 600, PartitionsTail::second);
  const Queries q = queries(2, 128, DType::bf16);
  const Result r = step(partitions, shape, 0, q);
  expect_right(shape, p, 0, 600, PartitionsTail::second, q.exact, r);
  EXPECT_EQ(r.lse[0], kMinusInf);
}

TEST_P(PartitionsTest, OfEqualOnesTheFirst) {
  for (const uint32_t count : {100U, 5000U, 20000U}) {
    const PartitionsShape shape = shape_of(1, 4, 128, DType::f16, count, 256);
    CudaPartitions partitions(shape, 0, GetParam());
    HostPartitions p(random_, count, 128, DType::f16);
    for (uint32_t i = 1; i < count; ++i) std::copy_n(p.keys.data(), 128, &p.keys[size_t{i} * 128]);
    std::fill(p.sizes.begin(), p.sizes.end(), 16.0F);
    std::fill(p.variances.begin(), p.variances.end(), 0.0F);
    p.sizes[count - 3] = 30.0F;  // one that is better, and one that is worse
    p.sizes[5] = 2.0F;
    partitions.upload(0, 0, 0, p.rows());
    partitions.set(0, 0, 50, PartitionsTail::second);
    const Queries q = queries(4, 128, DType::f32);
    const Result r = step(partitions, shape, 0, q);
    std::vector<uint32_t> want;
    for (uint32_t i = 0; i < 50; ++i) {
      if (i != 5) want.push_back(i);
    }
    want.push_back(count - 3);
    EXPECT_EQ(r.ids[0], want) << count;
  }
}

TEST_P(PartitionsTest, WeightsTooSmallToCompare) {
  // One partition outweighs all others by e^200: they are alike, and the first ones are taken.
  const uint32_t count = 3000;
  const PartitionsShape shape = shape_of(1, 1, 64, DType::f32, count, 16);
  CudaPartitions partitions(shape, 0, GetParam());
  HostPartitions p(random_, count, 64, DType::f32);
  std::fill(p.keys.begin(), p.keys.end(), int8_t{0});
  std::fill(p.variances.begin(), p.variances.end(), 0.0F);
  std::fill_n(p.keys.begin() + 777 * 64, 64, int8_t{100});
  std::fill(p.scales.begin(), p.scales.end(), 0.5F);
  partitions.upload(0, 0, 0, p.rows());
  partitions.set(0, 0, 4, PartitionsTail::second);
  const Queries q = queries_of(1, 64, DType::f32, std::vector<float>(72, 1.0F));
  const Result r = step(partitions, shape, 0, q);
  EXPECT_EQ(r.ids[0], (std::vector<uint32_t>{0, 1, 2, 777}));
  for (const float x : r.o) EXPECT_TRUE(std::isfinite(x));
}

TEST_P(PartitionsTest, HugeNorms) {
  for (const float norm : {1e3F, 1e6F, 1e15F}) {
    const PartitionsShape shape = shape_of(1, 4, 128, DType::f32, 1500, 64);
    CudaPartitions partitions(shape, 0, GetParam());
    const HostPartitions p(random_, 1500, 128, DType::f32);
    partitions.upload(0, 0, 0, p.rows());
    partitions.set(0, 0, 32, PartitionsTail::centroid);
    const Queries q = queries(4, 128, DType::f32, norm);
    const Result r = step(partitions, shape, 0, q);
    ASSERT_EQ(r.ids[0].size(), 32U);
    for (const float x : r.o) EXPECT_TRUE(std::isfinite(x));
    for (const float x : r.lse) EXPECT_FALSE(std::isnan(x));
    // The best partition of each head stands out by far, and is among the chosen.
    const Expected e = weigh(p, q.exact, 4, shape.logits, PartitionsTail::centroid);
    for (const auto& shares : e.shares) {
      const auto best = std::max_element(shares.begin(), shares.end());
      if (*best < 0.99) continue;
      const auto id = static_cast<uint32_t>(best - shares.begin());
      EXPECT_TRUE(std::binary_search(r.ids[0].begin(), r.ids[0].end(), id)) << norm;
    }
  }
}

TEST_P(PartitionsTest, UploadsInParts) {
  const PartitionsShape shape = shape_of(2, 4, 128, DType::f16, 1200, 64);
  CudaPartitions partitions(shape, 0, GetParam());
  const HostPartitions p(random_, 1200, 128, DType::f16);
  const HostPartitions other(random_, 1200, 128, DType::f16);
  partitions.upload(1, 1, 0, other.rows(0, 700));
  partitions.upload(1, 1, 0, p.rows(0, 300));  // shorter: what was there is gone
  EXPECT_EQ(partitions.count(1, 1), 300U);
  partitions.upload(1, 1, 300, p.rows(300, 500));
  partitions.upload(1, 1, 500, p.rows(500, 700));
  EXPECT_EQ(partitions.count(1, 1), 1200U);
  partitions.upload(1, 0, 0, other.rows());
  partitions.set(1, 1, 20, PartitionsTail::second);
  partitions.set(1, 0, 3, PartitionsTail::second);
  const Queries q = queries(8, 128, DType::f16);
  const Result r = step(partitions, shape, 1, q);
  expect_right(shape, other, 0, 3, PartitionsTail::second, q.exact, r);
  expect_right(shape, p, 1, 20, PartitionsTail::second, q.exact, r);
  partitions.upload(1, 1, 40, p.rows(0, 0));
  EXPECT_EQ(partitions.count(1, 1), 40U);
}

TEST_P(PartitionsTest, RefusesWhatDoesNotFit) {
  const PartitionsShape shape = shape_of(1, 1, 64, DType::f32, 100, 10);
  CudaPartitions partitions(shape, 0, GetParam());
  const HostPartitions p(random_, 101, 64, DType::f32);
  EXPECT_THROW(partitions.upload(0, 0, 0, p.rows()), Error);
  EXPECT_THROW(partitions.upload(0, 0, 1, p.rows(0, 10)), Error);  // a gap
  EXPECT_THROW(partitions.upload(2, 0, 0, p.rows(0, 10)), Error);
  EXPECT_THROW(partitions.upload(0, 1, 0, p.rows(0, 10)), Error);
  EXPECT_THROW(partitions.set(0, 0, 11, PartitionsTail::none), Error);
  HostPartitions empty(random_, 4, 64, DType::f32);
  empty.sizes[2] = 0.0F;
  EXPECT_THROW(partitions.upload(0, 0, 0, empty.rows()), Error);
  EXPECT_EQ(partitions.count(0, 0), 0U);
  PartitionsShape large = shape;
  large.layers = 1000;
  large.partitions = 1U << 26;
  try {
    const CudaPartitions none(large, 0, GetParam());
    FAIL() << "a Partitions of " << partitions_bytes(large) << " bytes";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::out_of_device_memory);
  }
}

TEST_P(PartitionsTest, ReplaysOfAGraph) {
  const PartitionsShape shape = shape_of(2, 4, 128, DType::f16, 3000, 64);
  CudaPartitions partitions(shape, 0, GetParam());
  std::vector<HostPartitions> heads;
  for (uint32_t k = 0; k < 2; ++k) {
    heads.emplace_back(random_, 3000, 128, DType::f16);
    partitions.upload(0, k, 0, heads[k].rows(0, 1000));
    partitions.set(0, k, 48, PartitionsTail::second);
  }
  Queries q = queries(8, 128, DType::f16);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "capture");
  partitions.choose(0, q.rows, sequence_.as<uint32_t>(), stream_);
  partitions.attend(0, stream_);
  check(cudaStreamEndCapture(stream_, &graph), "capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "graph");
  for (uint32_t replay = 0; replay < 5; ++replay) {
    SCOPED_TRACE(replay);
    const uint32_t count = std::min(1000 + 700 * replay, 3000U);
    for (uint32_t k = 0; k < 2; ++k) {
      const uint32_t before = partitions.count(0, k);
      partitions.upload(0, k, before, heads[k].rows(before, count - before));
    }
    const Queries next = queries(8, 128, DType::f16);
    check(cudaMemcpy(q.memory.data(), next.memory.data(), next.memory.bytes(),
                     cudaMemcpyDeviceToDevice),
          "q");
    poison(partitions, shape);
    check(cudaGraphLaunch(exec, stream_), "launch");
    const Result r = result(partitions, shape, 0);
    for (uint32_t k = 0; k < 2; ++k) {
      HostPartitions p = heads[k];
      p.count = count;
      p.exact_values.resize(size_t{count} * 128);
      expect_right(shape, p, k, 48, PartitionsTail::second, next.exact, r);
    }
  }
  (void)cudaGraphExecDestroy(exec);
  (void)cudaGraphDestroy(graph);
}

TEST_P(PartitionsTest, SameBitsEachTime) {
  const PartitionsShape shape = shape_of(3, 5, 80, DType::bf16, 2500, 64);
  CudaPartitions partitions(shape, 0, GetParam());
  for (uint32_t k = 0; k < 3; ++k) {
    partitions.upload(0, k, 0, HostPartitions(random_, 2500, 80, DType::bf16).rows());
    partitions.set(0, k, 64, PartitionsTail::second);
  }
  const Queries q = queries(15, 80, DType::f16);
  const Result first = step(partitions, shape, 0, q);
  for (int i = 0; i < 20; ++i) {
    const Result again = step(partitions, shape, 0, q);
    EXPECT_EQ(first.ids, again.ids);
    EXPECT_EQ(std::memcmp(first.o.data(), again.o.data(), first.o.size() * 4), 0);
    EXPECT_EQ(std::memcmp(first.lse.data(), again.lse.data(), first.lse.size() * 4), 0);
  }
}

TEST_P(PartitionsTest, Waits) {
  const PartitionsShape shape = shape_of(1, 1, 64, DType::f32, 64, 4);
  CudaPartitions partitions(shape, 0, GetParam());
  const HostPartitions p(random_, 64, 64, DType::f32);
  partitions.upload(0, 0, 0, p.rows());
  partitions.set(0, 0, 4, PartitionsTail::none);
  std::atomic<bool> stop{false};
  Chosen c;
  EXPECT_FALSE(partitions.await(0, 0, 1, 1000, stop, c));
  const Queries q = queries(1, 64, DType::f32);
  (void)step(partitions, shape, 0, q);
  EXPECT_TRUE(partitions.await(0, 0, 1, 0, stop, c));
  EXPECT_TRUE(partitions.await(0, 0, 0xfffffff0U, 0, stop, c));  // long ago
  EXPECT_EQ(c.count, 4U);
  EXPECT_FALSE(partitions.await(0, 0, 2, 0, stop, c));
  stop = true;
  EXPECT_FALSE(partitions.await(0, 0, 2, ~uint64_t{0}, stop, c));
}

INSTANTIATE_TEST_SUITE_P(InClusters, PartitionsTest, ::testing::Bool());

}  // namespace
}  // namespace keyhole::gpu

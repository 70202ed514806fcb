// Partitions of a tail: every row in exactly one, means and variances those of the rows held, through
// appends and truncations, for any number of threads, and from no bytes that save() cannot have written.
#include "tests/index/tails.h"

namespace keyhole::index::test {
namespace {

/// One partition's means and variance against those of its rows.
void expect_means(const TailTree& tree, const TailLevel& level, const CodeScales& scales, size_t i,
                  const std::vector<uint32_t>& rows, const KvView& kv) {
  const uint32_t dim = tree.dim();
  const auto n = static_cast<double>(rows.size());
  ASSERT_EQ(level.sizes[i], static_cast<float>(rows.size()));
  std::vector<double> key(dim, 0.0);
  std::vector<double> value(dim, 0.0);
  std::vector<double> magnitude(dim, 0.0);
  std::vector<std::vector<double>> all;
  for (const uint32_t row : rows) {
    all.push_back(decoded(kv.keys, row));
    const auto v = decoded(kv.values, row);
    for (uint32_t j = 0; j < dim; ++j) {
      key[j] += all.back()[j] / n;
      value[j] += v[j] / n;
      magnitude[j] += std::fabs(v[j]) / n;
    }
  }
  const auto got_value = decoded(packed_rows(level.values, dim, tree.dtype()), i);
  const double rounding = rounding_of(tree.dtype()) * 1.001 + 0x1p-24;
  for (uint32_t j = 0; j < dim; ++j) {
    ASSERT_NEAR(got_value[j], value[j],
                rounding * std::fabs(value[j]) + smallest_step(tree.dtype()) + 1e-14 * magnitude[j])
        << "partition " << i << ", element " << j;
  }
  for (uint32_t j = 0; j < dim; ++j) {
    const double step = scales.scales[j];
    const double center = scales.center[j];
    const int code = level.keys[i * dim + j];
    ASSERT_GE(code, -127);
    const double off = 0.5001 * step + 3e-7 * (std::fabs(key[j]) + std::fabs(center));
    if (std::fabs(key[j] - center) > 127.0 * step) {  // appended beyond what was learned
      ASSERT_NEAR(code, key[j] > center ? 127.0 : -127.0, 1.0 + 1e-3);
    } else {
      ASSERT_NEAR(center + step * code, key[j], off) << "partition " << i << ", element " << j;
    }
  }
  double variance = 0.0;
  double widest = 0.0;  // what a sum of squares around the first row cancels from
  for (uint32_t j = 0; j < dim; ++j) {
    const double scale = double{tree.key_scale()[j]} * tree.key_scale()[j];
    double mean = 0.0;  // less the first row, so that equal rows have no variance at all
    for (const auto& k : all) mean += (k[j] - all[0][j]) / n;
    for (const auto& k : all) {
      const double x = k[j] - all[0][j];
      variance += scale * (x - mean) * (x - mean) / n / dim;
      widest += scale * x * x / n / dim;
    }
  }
  variance = std::min(variance, 1e30);
  ASSERT_GE(level.variances[i], 0.0F);
  ASSERT_NEAR(level.variances[i], variance, 1e-6 * variance + 1e-12 * widest + 1e-38)
      << "partition " << i << " of " << rows.size();
}

/// All that a tree promises about the rows of `kv`.
void expect_sound_tree(const TailTree& tree, const KvView& kv) {
  const uint32_t dim = tree.dim();
  const size_t n = kv.keys.tokens;
  ASSERT_EQ(tree.count(), n);
  const size_t coarse = tree.coarse().count();
  const size_t fine = tree.fine().count();
  ASSERT_EQ(tree.fine().keys.size(), fine * dim);
  ASSERT_EQ(tree.coarse().keys.size(), coarse * dim);
  ASSERT_EQ(tree.coarse().variances.size(), coarse);
  ASSERT_EQ(tree.fine().variances.size(), fine);
  ASSERT_EQ(tree.fine_begin(0), 0U);
  ASSERT_EQ(tree.fine_begin(coarse), fine);
  std::vector<int> seen(n, 0);
  for (size_t c = 0; c < coarse; ++c) {
    ASSERT_LT(tree.fine_begin(c), tree.fine_begin(c + 1)) << "an empty coarse partition";
    for (uint32_t f = tree.fine_begin(c); f < tree.fine_begin(c + 1); ++f) {
      ASSERT_EQ(tree.parent(f), c);
      ASSERT_FALSE(tree.rows_of(f).empty());
      uint32_t before = 0;
      for (const uint32_t row : tree.rows_of(f)) {
        ASSERT_LT(row, n);
        ASSERT_EQ(tree.fine_of(row), f);
        ASSERT_TRUE(seen[row] == 0) << "row " << row << " twice";
        ASSERT_GE(row, before);
        before = row;
        seen[row] = 1;
      }
    }
  }
  for (size_t row = 0; row < n; ++row) ASSERT_EQ(seen[row], 1) << "row " << row << " is missing";
  ASSERT_EQ(tree.mean_value().size(), dim);
  if (n == 0) return;

  const CodeScales scales = scales_of(tree);
  for (size_t f = 0; f < fine; ++f) {
    const auto rows = tree.rows_of(f);
    expect_means(tree, tree.fine(), scales, f, {rows.begin(), rows.end()}, kv);
    if (testing::Test::HasFatalFailure()) return;
  }
  for (size_t c = 0; c < coarse; ++c) {
    expect_means(tree, tree.coarse(), scales, c, rows_of_coarse(tree, c), kv);
    if (testing::Test::HasFatalFailure()) return;
  }
  std::vector<double> mean(dim, 0.0);
  std::vector<double> magnitude(dim, 0.0);
  double squares = 0.0;
  for (size_t row = 0; row < n; ++row) {
    const auto v = decoded(kv.values, row);
    for (uint32_t j = 0; j < dim; ++j) {
      mean[j] += v[j] / static_cast<double>(n);
      magnitude[j] += std::fabs(v[j]) / static_cast<double>(n);
      squares += v[j] * v[j] / static_cast<double>(n);
    }
  }
  double spread = squares;
  const double rounding = rounding_of(tree.dtype()) * 1.01 + 0x1p-24;
  for (uint32_t j = 0; j < dim; ++j) {
    spread -= mean[j] * mean[j];
    ASSERT_NEAR(tree.mean_value()[j], mean[j],
                rounding * magnitude[j] + smallest_step(tree.dtype()));
  }
  ASSERT_TRUE(std::isfinite(tree.value_spread()));
  ASSERT_GE(tree.value_spread(), 0.0F);
  ASSERT_NEAR(tree.value_spread(), std::min(spread, 1e30),
              std::min((2.5 * rounding + 1e-6) * squares, 1e30));
  EXPECT_GT(tree.bytes(), n * 2 * sizeof(uint32_t));
}

TailTree built_tree(const KvRows& kv, const TailParams& params, cpu::Pool* pool = nullptr) {
  TailTree tree(context(pool), kv.dim(), kv.keys.dtype(), params);
  tree.build(kv.view(), {});
  return tree;
}

KvRows random_rows(size_t n, uint32_t dim, DType dtype, std::mt19937& random) {
  KvRows kv(n, dim, dtype);
  kv.add(attention_keys(n, dim, random), gaussian(n, dim, random));
  return kv;
}

TEST(TailTree, EveryShapeAndDType) {
  std::mt19937 random(101);
  for (const DType dtype : key_dtypes()) {
    for (const uint32_t dim : head_dims()) {
      const size_t n = 1 + random() % 700;
      SCOPED_TRACE(testing::Message() << dtype_name(dtype) << " dim " << dim << " rows " << n);
      const KvRows kv = random_rows(n, dim, dtype, random);
      expect_sound_tree(built_tree(kv, {}), kv.view());
      if (HasFatalFailure()) return;
    }
  }
}

TEST(TailTree, EverySizeOfPartitions) {
  std::mt19937 random(102);
  const KvRows kv = random_rows(3000, 64, DType::f16, random);
  for (const uint32_t per : {4U, 5U, 16U, 33U, 100U, 512U, 1024U}) {
    SCOPED_TRACE(per);
    const TailTree tree = built_tree(kv, {per});
    expect_sound_tree(tree, kv.view());
    if (HasFatalFailure()) return;
    // About as many as asked for: k-means leaves few empty.
    const double wanted = 3000.0 / per;
    EXPECT_LE(static_cast<double>(tree.fine().count()), 1.5 * wanted + 1.0);
    EXPECT_GE(static_cast<double>(tree.fine().count()), 0.5 * wanted - 1.0);
    EXPECT_GE(tree.fine().count(), tree.coarse().count());
  }
}

TEST(TailTree, FewRows) {
  std::mt19937 random(103);
  for (size_t n = 0; n < 40; ++n) {
    SCOPED_TRACE(n);
    KvRows kv(n, 80, DType::bf16);
    kv.add(gaussian(n, 80, random), gaussian(n, 80, random));
    for (const uint32_t per : {4U, 16U, 1024U}) {
      expect_sound_tree(built_tree(kv, {per}), kv.view());
      if (HasFatalFailure()) return;
    }
  }
}

TEST(TailTree, SeveralSegments) {
  std::mt19937 random(104);
  const KvRows kv = random_rows(20001, 64, DType::f16, random);
  expect_sound_tree(built_tree(kv, {64}), kv.view());
}

TEST(TailTree, EqualRowsHaveNoVariance) {
  std::mt19937 random(105);
  for (const DType dtype : key_dtypes()) {
    KvRows kv(600, 64, dtype);
    const auto key = gaussian(1, 64, random);
    std::vector<float> k;
    for (int i = 0; i < 600; ++i) k.insert(k.end(), key.begin(), key.end());
    kv.add(k, gaussian(600, 64, random));
    const TailTree tree = built_tree(kv, {});
    expect_sound_tree(tree, kv.view());
    for (const float v : tree.fine().variances) EXPECT_EQ(v, 0.0F);
    for (const float v : tree.coarse().variances) EXPECT_EQ(v, 0.0F);
  }
}

// Norms as of the keys that attention heads use as sinks, and far beyond.
TEST(TailTree, OutlierNorms) {
  std::mt19937 random(106);
  for (const DType dtype : key_dtypes()) {
    for (const float huge : {1e4F, 1e15F, 1e30F, 3e38F}) {
      if (dtype == DType::f16 && huge > 1e4F) continue;
      SCOPED_TRACE(testing::Message() << dtype_name(dtype) << " " << huge);
      auto k = gaussian(900, 64, random);
      auto v = gaussian(900, 64, random);
      for (size_t i = 0; i < k.size(); ++i) {
        const bool outlier = i / 64 % 97 == 3 || i / 64 > 880;
        if (outlier) k[i] = std::clamp(k[i], -1.0F, 1.0F) * huge;
        if (outlier && i % 3 == 0) v[i] = std::clamp(v[i], -1.0F, 1.0F) * huge;
      }
      KvRows kv(900, 64, dtype);
      kv.add(k, v);
      const TailTree tree = built_tree(kv, {8});
      expect_sound_tree(tree, kv.view());
      if (HasFatalFailure()) return;
    }
  }
}

// build, then appends and truncations in any order: always a tree of the rows held.
TEST(TailTree, AnySequenceOfAppendsAndTruncations) {
  for (uint32_t seed = 0; seed < cases(24); ++seed) {
    std::mt19937 random(seed);
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const uint32_t dim = head_dims()[random() % head_dims().size()];
    const DType dtype = key_dtypes()[random() % 3];
    const TailParams params{4 + static_cast<uint32_t>(random() % 30)};
    const size_t capacity = 2500;
    KvRows kv(capacity, dim, dtype);
    const size_t first = 1 + random() % 800;
    kv.add(attention_keys(first, dim, random), gaussian(first, dim, random));
    kv.cut(first);
    TailTree tree = built_tree(kv, params);
    for (int step = 0; step < 12; ++step) {
      const size_t n = kv.count();
      switch (random() % 3) {
        case 0: {
          const size_t more =
              std::min<size_t>(random() % 3 == 0 ? 1 : random() % 400, capacity - n);
          kv.add(attention_keys(more, dim, random), gaussian(more, dim, random));
          const std::string before = saved_bytes(tree);
          const auto segment = tree.prepare_append(kv.view(), {});
          ASSERT_EQ(saved_bytes(tree), before) << "prepare_append changed the tree";
          tree.commit_append(*segment);
          break;
        }
        case 1: {
          const size_t left = random() % 8 == 0 ? 0 : n - std::min<size_t>(n, random() % 300);
          tree.truncate(left, kv.view());
          kv.cut(left);
          break;
        }
        default: {
          std::stringstream stream;
          Writer out(stream);
          tree.save(out);
          out.finish();
          Reader in(stream);
          TailTree loaded(context(), dim, dtype, {});
          loaded.load(in, n);
          in.finish();
          ASSERT_EQ(saved_bytes(loaded), saved_bytes(tree));
          ASSERT_EQ(loaded.params().keys_per_partition, params.keys_per_partition);
          tree = std::move(loaded);
          break;
        }
      }
      expect_sound_tree(tree, kv.view());
      if (HasFatalFailure()) return;
    }
  }
}

TEST(TailTree, ATruncatedTreeIsThatOfTheRowsLeft) {
  std::mt19937 random(107);
  KvRows kv = random_rows(2000, 96, DType::f16, random);
  TailTree tree = built_tree(kv, {});
  for (const size_t left : {2000, 1999, 1500, 7, 1, 0, 0}) {
    tree.truncate(left + 5, kv.view());  // no more than there are: nothing
    tree.truncate(left, kv.view());
    kv.cut(left);
    expect_sound_tree(tree, kv.view());
    if (HasFatalFailure()) return;
  }
}

// A tree that began with no rows, or lost all, serves those that come later as well as one built with them.
TEST(TailTree, GrowsFromNothing) {
  std::mt19937 random(108);
  for (const int way : {0, 1, 2, 3}) {
    SCOPED_TRACE(way);
    KvRows kv(500, 64, DType::f16);
    TailTree tree(context(), 64, DType::f16, {});
    if (way == 1) tree.build(kv.view(), {});
    if (way == 2) {
      const std::string bytes = saved_bytes(tree);
      std::istringstream stream(bytes);
      Reader in(stream);
      tree.load(in, 0);
    }
    if (way == 3) {
      kv.add(std::vector<float>(64, 1e4F), std::vector<float>(64, 1.0F));
      tree.build(kv.view(), {});
      tree.truncate(0, kv.view());
      kv.cut(0);
    }
    kv.add(attention_keys(500, 64, random), gaussian(500, 64, random));
    tree.commit_append(*tree.prepare_append(kv.view(), {}));
    expect_sound_tree(tree, kv.view());
    if (HasFatalFailure()) return;
    EXPECT_EQ(saved_bytes(tree), saved_bytes(built_tree(kv, {})));
  }
}

TEST(TailTree, SameBitsForAnyNumberOfThreads) {
  std::mt19937 random(109);
  KvRows kv = random_rows(19000, 64, DType::bf16, random);
  const std::string alone = saved_bytes(built_tree(kv, {32}));
  for (const uint32_t threads : {1U, 2U, 8U}) {
    cpu::Pool pool({.threads = threads});
    TailTree tree = built_tree(kv, {32}, &pool);
    ASSERT_EQ(saved_bytes(tree), alone) << threads << " threads";
  }
}

TEST(TailTree, CancellationChangesNothing) {
  std::mt19937 random(110);
  const KvRows kv = random_rows(17000, 64, DType::f16, random);
  KvRows few(300, 64, DType::f16);
  few.add(attention_keys(300, 64, random), gaussian(300, 64, random));
  for (const uint32_t threads : {0U, 2U}) {
    std::unique_ptr<cpu::Pool> pool;
    if (threads != 0) pool = std::make_unique<cpu::Pool>(cpu::PoolConfig{threads, false, 0});
    TailTree tree = built_tree(few, {}, pool.get());
    const std::string before = saved_bytes(tree);
    for (const int calls : {0, 1}) {
      int left = calls;
      double last = 0.0;
      const Progress stop = [&](double share) {
        EXPECT_GE(share, last);
        EXPECT_LE(share, 1.0);
        last = share;
        return left-- > 0;
      };
      try {
        tree.build(kv.view(), stop);
        FAIL() << "not cancelled";
      } catch (const Error& e) {
        EXPECT_EQ(e.status(), Status::cancelled);
      }
      EXPECT_EQ(saved_bytes(tree), before);
    }
    try {
      static_cast<void>(tree.prepare_append(kv.view(), [](double) { return false; }));
      FAIL() << "not cancelled";
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), Status::cancelled);
    }
    EXPECT_EQ(saved_bytes(tree), before);
  }
}

// ---- Bytes ---------------------------------------------------------------------------------------

class SavedTail : public ::testing::Test {
 protected:
  SavedTail() : kv_(420, 64, DType::f16) {
    std::mt19937 random(111);
    kv_.add(attention_keys(300, 64, random), gaussian(300, 64, random));
    TailTree tree = built_tree(kv_, {8});
    kv_.add(attention_keys(120, 64, random), gaussian(120, 64, random));
    tree.commit_append(*tree.prepare_append(kv_.view(), {}));
    tree.truncate(kRows, kv_.view());
    kv_.cut(kRows);
    bytes_ = saved_bytes(tree);
  }

  [[nodiscard]] static Status load(TailTree& tree, const std::string& bytes, size_t rows,
                                   bool finish = false) {
    std::istringstream stream(bytes);
    Reader in(stream);
    try {
      tree.load(in, rows);
      if (finish) in.finish();
    } catch (const Error& e) {
      return e.status();
    }
    return Status::ok;
  }
  [[nodiscard]] static TailTree fresh() { return {context(), 64, DType::f16, {}}; }

  static constexpr size_t kRows = 390;
  KvRows kv_;
  std::string bytes_;
};

TEST_F(SavedTail, IsTheSameTree) {
  TailTree tree = fresh();
  ASSERT_EQ(load(tree, bytes_, kRows), Status::ok);
  expect_sound_tree(tree, kv_.view());
  EXPECT_EQ(saved_bytes(tree), bytes_);
}

TEST_F(SavedTail, TheNumberOfRowsMustFit) {
  for (const size_t rows : {0, 1, 300, 389, 391, 100000}) {
    TailTree tree = fresh();
    EXPECT_EQ(load(tree, bytes_, rows, true), Status::corrupt) << rows;
  }
}

TEST_F(SavedTail, EveryTruncationIsRefusedAndChangesNothing) {
  TailTree tree = fresh();
  ASSERT_EQ(load(tree, bytes_, kRows), Status::ok);
  const size_t end = bytes_.size() - sizeof(uint64_t);  // the checksum is finish()'s affair
  for (size_t size = 0; size < end; size += size < 800 ? 1 : 1 + end / cases(2000)) {
    ASSERT_EQ(load(tree, bytes_.substr(0, size), kRows), Status::corrupt) << size << " bytes";
  }
  EXPECT_EQ(saved_bytes(tree), bytes_);
}

/// That a tree, whatever bytes it came from, can be used: sizes and numbers that agree, everything finite.
void expect_usable(TailTree& tree, KvRows& kv) {
  const size_t n = tree.count();
  ASSERT_EQ(n, kv.count());
  std::vector<int> seen(n, 0);
  for (size_t c = 0; c < tree.coarse().count(); ++c) {
    ASSERT_LT(tree.fine_begin(c), tree.fine_begin(c + 1));
    float size = 0.0F;
    for (uint32_t f = tree.fine_begin(c); f < tree.fine_begin(c + 1); ++f) {
      ASSERT_EQ(tree.parent(f), c);
      ASSERT_EQ(tree.fine().sizes[f], static_cast<float>(tree.rows_of(f).size()));
      size += tree.fine().sizes[f];
      for (const uint32_t row : tree.rows_of(f)) {
        ASSERT_LT(row, n);
        ASSERT_EQ(tree.fine_of(row), f);
        ASSERT_EQ(seen[row]++, 0);
      }
    }
    ASSERT_EQ(tree.coarse().sizes[c], size);
  }
  ASSERT_EQ(std::count(seen.begin(), seen.end(), 1), static_cast<ptrdiff_t>(n));
  for (const TailLevel* level : {&tree.coarse(), &tree.fine()}) {
    for (const float v : level->variances) ASSERT_TRUE(std::isfinite(v) && v >= 0.0F);
    for (const int8_t k : level->keys) ASSERT_GE(k, -127) << "outside the kernels' contract";
    for (size_t i = 0; i < level->count(); ++i) {
      for (const double v : decoded(packed_rows(level->values, 64, DType::f16), i)) {
        ASSERT_TRUE(std::isfinite(v));
      }
    }
  }
  for (const float v : tree.mean_value()) ASSERT_TRUE(std::isfinite(v));
  ASSERT_TRUE(std::isfinite(tree.value_spread()) && tree.value_spread() >= 0.0F);
  // And goes on: cut, and grown again.
  tree.truncate(n / 2, kv.view());
  tree.commit_append(*tree.prepare_append(kv.view(), {}));
  ASSERT_EQ(tree.count(), n);
}

TEST_F(SavedTail, MutationsAreRefusedOrHarmless) {
  int taken = 0;
  int refused = 0;
  for (uint32_t seed = 0; seed < cases(3000); ++seed) {
    std::mt19937 random(seed);
    std::string bytes = bytes_;
    const size_t changes = 1 + random() % 3;
    for (size_t i = 0; i < changes; ++i) {
      // Half of them where the lengths are: before the codes' scales, and after them.
      const size_t places[] = {random() % bytes.size(), random() % 16, 524 + random() % 100,
                               bytes.size() - 1 - random() % 2000};
      const size_t at = std::min(places[random() % 4], bytes.size() - 1);
      switch (random() % 5) {
        case 0: bytes[at] = static_cast<char>(random()); break;
        case 1: bytes[at] = static_cast<char>(0xFF); break;
        case 2: bytes[at] = static_cast<char>(0x80); break;
        case 3: bytes.erase(at, 1 + random() % 8); break;
        default: bytes.insert(at, 1 + random() % 8, static_cast<char>(random())); break;
      }
    }
    TailTree tree = fresh();
    SCOPED_TRACE(seed);
    const Status status = load(tree, bytes, kRows);
    if (status != Status::ok) {
      ASSERT_EQ(status, Status::corrupt);
      ASSERT_EQ(tree.count(), 0U);
      ++refused;
      continue;
    }
    ++taken;
    expect_usable(tree, kv_);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(taken, 0) << "no mutation got past the checks";
  EXPECT_GT(refused, 0);
}

TEST_F(SavedTail, AbsurdLengthsCostNoMemory) {
  for (size_t at = 0; at + 16 < bytes_.size(); at += at < 700 ? unless_sanitized(1, 7) : 997) {
    for (const uint64_t value :
         {~uint64_t{0}, uint64_t{1} << 62, uint64_t{1} << 31, uint64_t{1} << 24}) {
      std::string bytes = bytes_;
      std::memcpy(bytes.data() + at, &value, 8);
      TailTree tree = fresh();
      static_cast<void>(load(tree, bytes, kRows));
      // Where the caller's number of rows is forged alike.
      TailTree other = fresh();
      static_cast<void>(load(other, bytes, size_t{1} << 31));
    }
  }
}

}  // namespace
}  // namespace keyhole::index::test

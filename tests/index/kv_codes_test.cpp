// Codes of keys and values against plain arithmetic in double precision: the layout against the tensor cores' tables,
// the codes against the distortion that theory gives, states against exact attention.
#include "index/scan/kv_codes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <span>

#include "cpu/attention.h"
#include "tests/normal.h"
#include "tests/relative_error.h"
#include "tests/sanitized.h"
#include "tests/shapes.h"

namespace keyhole::index {
namespace {

using keyhole::test::relative_error;

const cpu::Kernels& kernels() { return *cpu::kernels_for(cpu::Level::scalar); }

/// The value of a row by its code.
std::vector<float> decoded_value(const KvCodes& codes, size_t row) {
  const CodeShape& shape = codes.shape();
  std::vector<float> value(shape.dim);
  CodeRunReader(shape, codes.run(row / kCodeBlock))
      .rotated_value(static_cast<uint32_t>(row % kCodeBlock), value.data());
  for (float& x : value) x *= codes.balance().value_scale;
  rotate_codes_back(value.data(), shape.dim);
  return value;
}

/// fp32 rows of one head, with queries that prefer some channels as real ones do.
struct CodedHead {
  CodedHead(uint32_t d, size_t n, uint64_t seed) : dim(d), rng(seed) {
    keyhole::test::Normal<float> normal;
    keys.resize(n * d);
    values.resize(n * d);
    queries.resize(64 * d);
    std::vector<float> key_width(d), query_width(d), offset(d);
    for (uint32_t j = 0; j < d; ++j) {
      key_width[j] = std::exp(0.5F * normal(rng));
      query_width[j] = std::exp(0.5F * normal(rng));
      offset[j] = normal(rng);
    }
    for (size_t i = 0; i < n; ++i) {
      for (uint32_t j = 0; j < d; ++j) {
        keys[i * d + j] = offset[j] + key_width[j] * normal(rng);
        values[i * d + j] = 0.5F * offset[j] + normal(rng);
      }
    }
    for (size_t i = 0; i < 64; ++i) {
      for (uint32_t j = 0; j < d; ++j) queries[i * d + j] = query_width[j] * normal(rng);
    }
  }
  [[nodiscard]] static RowsView view(const std::vector<float>& x, uint32_t d) {
    return dense_rows(x.data(), x.size() / d, d, DType::f32);
  }
  [[nodiscard]] KvView kv() const { return {view(keys, dim), view(values, dim)}; }
  [[nodiscard]] KvView kv(size_t n) const {
    return {kv().keys.slice(0, n), kv().values.slice(0, n)};
  }
  [[nodiscard]] Balance balance() const {
    return learn_balance(kernels(), kv(), view(queries, dim));
  }
  [[nodiscard]] KvCodes codes(uint32_t key_bits, uint32_t value_bits) const {
    KvCodes out({dim, key_bits, value_bits}, balance());
    out.extend(kernels(), kv());
    return out;
  }

  uint32_t dim;
  std::mt19937_64 rng;
  std::vector<float> keys, values, queries;
};

struct ExactState {
  std::vector<double> o;
  double lse = -INFINITY;
};

/// Exact attention of one query over `rows`, in double.
ExactState exact(const CodedHead& head, const float* q, double scale,
                 const std::vector<uint32_t>& rows) {
  std::vector<double> logits;
  for (const uint32_t i : rows) {
    double dot = 0.0;
    for (uint32_t j = 0; j < head.dim; ++j) dot += double{q[j]} * head.keys[i * head.dim + j];
    logits.push_back(scale * dot);
  }
  ExactState out{std::vector<double>(head.dim, 0.0)};
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (size_t r = 0; r < rows.size(); ++r) {
    const double w = std::exp(logits[r] - top);
    sum += w;
    for (uint32_t j = 0; j < head.dim; ++j) out.o[j] += w * head.values[rows[r] * head.dim + j];
  }
  for (double& x : out.o) x /= sum;
  out.lse = top + std::log(sum);
  return out;
}

std::vector<uint32_t> all_rows(size_t n) {
  std::vector<uint32_t> rows(n);
  std::iota(rows.begin(), rows.end(), 0U);
  return rows;
}

constexpr uint32_t kBits[] = {1, 2, 4};

TEST(CodeLayout, EveryCodeHasItsOwnBits) {
  for (const uint32_t dim : keyhole::test::kHeadDims) {
    for (const uint32_t bits : kBits) {
      const CodeShape shape{dim, bits, bits};
      std::set<std::pair<uint32_t, uint32_t>> keys, values;
      for (uint32_t row = 0; row < kCodeTile; ++row) {
        for (uint32_t j = 0; j < dim; ++j) {
          const CodePlace k = shape.key_place(row, j);
          ASSERT_LT(k.word, kCodeLanes * shape.key_words());
          ASSERT_LE(k.shift + bits, 32U);
          ASSERT_EQ(k.shift % bits, 0U);
          keys.insert({k.word, k.shift});
          const CodePlace v = shape.value_place(row, j);
          ASSERT_LT(v.word, kCodeLanes * shape.value_words());
          ASSERT_LE(v.shift + bits, 32U);
          values.insert({v.word, v.shift});
        }
      }
      EXPECT_EQ(keys.size(), kCodeTile * dim) << dim << " x " << bits;
      EXPECT_EQ(values.size(), kCodeTile * dim) << dim << " x " << bits;
    }
  }
}

TEST(CodeLayout, IsTheTensorCoresOrder) {
  // PTX ISA, "Matrix fragments for mma.m16n8k32": .u8 A: row = lane/4 (+ 8 for a1, a3), column = 4 (lane mod 4) + i mod
  // 4 (+ 16 for a2, a3). "... for mma.m16n8k16": .f16 A likewise with 2 (lane mod 4) + i mod 2 (+ 8).
  const CodeShape shape{128, 2, 2};
  for (uint32_t lane = 0; lane < 32; ++lane) {
    for (uint32_t step = 0; step < 8;
         ++step) {  // half the columns of a product: a0 and a1, or a2 and a3
      for (uint32_t r = 0; r < 2; ++r) {
        for (uint32_t byte = 0; byte < 4; ++byte) {
          const CodePlace p = shape.key_place(
              lane / 4 + 8 * r, 32 * (step / 2) + lane % 4 * 4 + byte + step % 2 * 16);
          EXPECT_EQ(p.word, lane * 4 + step / 4 * 2 + r);
          EXPECT_EQ(p.shift, 8 * byte + 2 * (step % 4));
        }
      }
    }
    for (uint32_t m = 0; m < 8; ++m) {
      for (uint32_t a = 0; a < 4; ++a) {
        for (uint32_t half = 0; half < 2; ++half) {
          // Transposed: the matrix's rows are components, its columns are rows of the tile.
          const CodePlace p =
              shape.value_place(lane % 4 * 2 + half + a / 2 * 8, 16 * m + lane / 4 + a % 2 * 8);
          EXPECT_EQ(p.word, lane * 4 + m / 2);
          EXPECT_EQ(p.shift, 16 * half + 2 * (m % 2 * 4 + a));
        }
      }
    }
  }
}

TEST(CodeLayout, ABlockOfAnEightBillionModelTakesSeventyBytesARow) {
  EXPECT_EQ((CodeShape{128, 2, 2}.block_bytes()), 18048U);  // 70.5 bytes: 64 of codes, 4 of factors
  EXPECT_EQ((CodeShape{128, 4, 4}.block_bytes()), 34432U);
}

TEST(KvCodes, ARunThatHoldsANumberThatNoKeysGiveIsNotSound) {
  const CodedHead head(64, kCodeBlock, 5);
  const KvCodes codes = head.codes(2, 2);
  const CodeShape& shape = codes.shape();
  ASSERT_TRUE(is_sound_run(shape, codes.run(0)));
  const auto sound_with = [&](size_t at, uint16_t half) {
    std::vector<std::byte> block(codes.block(0), codes.block(0) + shape.block_bytes());
    std::memcpy(block.data() + at, &half, sizeof half);
    const KvCodes forged(shape, codes.balance(), block);
    return is_sound_run(shape, forged.run(0));
  };
  constexpr uint16_t kInfinity = 0x7C00, kNan = 0xFE01, kMinusOne = 0xBC00, kOne = 0x3C00;
  for (const size_t row : {0, 17, 255}) {
    const size_t factors = shape.factors_at() + row * 4;
    for (const size_t at : {factors, factors + 2}) {
      EXPECT_TRUE(sound_with(at, kOne));
      EXPECT_FALSE(sound_with(at, kInfinity));
      EXPECT_FALSE(sound_with(at, kNan));
    }
    EXPECT_FALSE(sound_with(factors, kMinusOne)) << "a key factor is the size of a key";
  }
  for (const size_t at : {shape.key_mean_at(), shape.value_mean_at() + 2 * 63}) {
    EXPECT_TRUE(sound_with(at, kMinusOne));
    EXPECT_FALSE(sound_with(at, kInfinity));
    EXPECT_FALSE(sound_with(at, kNan));
  }
  // The upper half of the noise.
  EXPECT_FALSE(sound_with(shape.noise_at() + 2, 0x7F80)) << "infinity";
  EXPECT_FALSE(sound_with(shape.noise_at() + 2, 0xBF80)) << "-1";
}

TEST(CodeRotation, KeepsInnerProductsAndComesBack) {
  std::mt19937 rng(3);
  keyhole::test::Normal<float> normal;
  for (const uint32_t dim : keyhole::test::kHeadDims) {
    std::vector<float> a(dim), b(dim);
    for (float& x : a) x = normal(rng);
    for (float& x : b) x = normal(rng);
    const double before = std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
    std::vector<float> ra = a, rb = b;
    rotate_codes(ra.data(), dim);
    rotate_codes(rb.data(), dim);
    EXPECT_NEAR(std::inner_product(ra.begin(), ra.end(), rb.begin(), 0.0), before, 1e-4) << dim;
    rotate_codes_back(ra.data(), dim);
    for (uint32_t j = 0; j < dim; ++j) EXPECT_NEAR(ra[j], a[j], 1e-5) << dim;
    // One wide channel is spread over all that share a transform with it.
    std::vector<float> one(dim, 0.0F);
    one[dim - 1] = 1.0F;
    rotate_codes(one.data(), dim);
    for (const float x : one)
      EXPECT_LE(std::abs(x), std::has_single_bit(dim) ? 0.1251F : 0.45F) << dim;
  }
}

TEST(KvCodes, DistortionIsThatOfAUniformQuantiserOfNormals) {
  KEYHOLE_SKIP_WITH_SANITIZERS();
  // Max 1960, table II: mean squared error of the best uniform quantiser of a unit normal.
  const double theory[] = {0, 0.3634, 0.1188, 0, 0.01154};
  for (const uint32_t dim : keyhole::test::kHeadDims) {
    CodedHead head(dim, 512, 7 + dim);
    for (const uint32_t bits : kBits) {
      const KvCodes codes = head.codes(bits, bits);
      double lost = 0.0, all = 0.0;
      std::vector<double> mean(dim, 0.0);
      for (size_t i = 0; i < 256; ++i) {
        for (uint32_t j = 0; j < dim; ++j) mean[j] += head.values[i * dim + j] / 256.0;
      }
      for (size_t i = 0; i < 256; ++i) {
        const std::vector<float> row = decoded_value(codes, i);
        for (uint32_t j = 0; j < dim; ++j) {
          const double truth = head.values[i * dim + j];
          lost += (row[j] - truth) * (row[j] - truth);
          all += (truth - mean[j]) * (truth - mean[j]);
        }
      }
      // Scaled to each row's own size, a little less is lost.
      EXPECT_NEAR(lost / all, theory[bits], 0.15 * theory[bits]) << dim << " x " << bits;
    }
  }
}

TEST(KvCodes, ScoresAreUnbiased) {
  KEYHOLE_SKIP_WITH_SANITIZERS();
  for (const uint32_t dim : {64U, 80U, 112U, 128U, 320U}) {
    CodedHead head(dim, 2048, 11 + dim);
    for (const uint32_t bits : kBits) {
      const KvCodes codes = head.codes(bits, 0);
      const CodeQueries queries = codes.queries(head.queries.data(), 16);
      std::vector<float> scores(size_t{16} * 2048);
      codes.score(queries, scores.data(), 2048);
      double products = 0.0, squares = 0.0;
      for (uint32_t h = 0; h < 16; ++h) {
        for (size_t block = 0; block < 8; ++block) {
          // About the block's mean, which is exact whatever the codes are.
          double mean = 0.0;
          std::vector<double> truth(256);
          for (size_t i = 0; i < 256; ++i) {
            for (uint32_t j = 0; j < dim; ++j) {
              truth[i] +=
                  double{head.queries[h * dim + j]} * head.keys[(block * 256 + i) * dim + j];
            }
            mean += truth[i] / 256.0;
          }
          for (size_t i = 0; i < 256; ++i) {
            products += (scores[h * 2048 + block * 256 + i] - mean) * (truth[i] - mean);
            squares += (truth[i] - mean) * (truth[i] - mean);
          }
        }
      }
      // The regression of the estimate on the truth: its slope is 1 but for sampling, of the order of 1/sqrt(32768).
      EXPECT_NEAR(products / squares, 1.0, bits == 1 ? 0.03 : 0.015) << dim << " x " << bits;
    }
  }
}

TEST(KvCodes, StatesComeNearExactAttention) {
  KEYHOLE_SKIP_WITH_SANITIZERS();
  for (const uint32_t dim : keyhole::test::kHeadDims) {
    CodedHead head(dim, 2048, 13 + dim);
    const float scale = 0.5F / std::sqrt(static_cast<float>(dim));
    double previous = 1e9;
    for (const uint32_t bits : kBits) {
      const KvCodes codes = head.codes(bits, bits);
      const uint32_t group = 4;
      const CodeQueries queries = codes.queries(head.queries.data(), group);
      std::vector<float> o(group * dim), lse(group);
      codes.attend(queries, {scale, 0.0F}, {}, {o.data(), lse.data()});
      double error = 0.0;
      for (uint32_t h = 0; h < group; ++h) {
        const ExactState truth = exact(head, head.queries.data() + h * dim, scale, all_rows(2048));
        error += relative_error(o.data() + h * dim, truth.o) / group;
        EXPECT_NEAR(lse[h], truth.lse,
                    bits == 4   ? 0.02
                    : bits == 2 ? 0.12
                                : 0.4)
            << dim << " x " << bits;
      }
      EXPECT_LT(error, bits == 1 ? 0.6 : bits == 2 ? 0.3 : 0.09) << dim << " x " << bits;
      EXPECT_LT(error, previous);
      previous = error;
    }
  }
}

TEST(KvCodes, EveryRowIsInTheStateOnce) {
  CodedHead head(96, 1024, 17);
  const KvCodes codes = head.codes(2, 2);
  const CodeQueries queries = codes.queries(head.queries.data(), 3);
  const LogitParams logits{0.05F, 0.0F};
  std::vector<uint32_t> some, others;
  for (uint32_t i = 0; i < 1024; ++i) (head.rng() % 4 == 0 ? some : others).push_back(i);
  std::vector<float> o[4], lse[4];
  for (int i = 0; i < 4; ++i) {
    o[i].resize(3 * 96);
    lse[i].resize(3);
  }
  codes.attend(queries, logits, {}, {o[0].data(), lse[0].data()});
  codes.attend(queries, logits, some, {o[1].data(), lse[1].data()});
  codes.attend(queries, logits, others, {o[2].data(), lse[2].data()});
  const StateView parts[] = {{o[1].data(), lse[1].data()}, {o[2].data(), lse[2].data()}};
  cpu::merge_states(parts, 3, 96, {o[3].data(), lse[3].data()});
  for (size_t i = 0; i < o[0].size(); ++i) EXPECT_NEAR(o[3][i], o[0][i], 1e-5);
  for (size_t h = 0; h < 3; ++h) EXPECT_NEAR(lse[3][h], lse[0][h], 1e-5);
  codes.attend(queries, logits, all_rows(1024), {o[1].data(), lse[1].data()});
  EXPECT_EQ(lse[1][0], kMinusInf);
  EXPECT_EQ(o[1][0], 0.0F);
}

TEST(KvCodes, OutlierChannelsChangeNothing) {
  KEYHOLE_SKIP_WITH_SANITIZERS();
  for (const float a : {4.0F, 16.0F, 64.0F}) {
    CodedHead plain(128, 2048, 19), wide(128, 2048, 19);
    for (const uint32_t j : {3U, 17U, 40U, 77U, 99U, 120U}) {
      for (size_t i = 0; i < 2048; ++i) wide.keys[i * 128 + j] *= a;
      for (size_t i = 0; i < 64; ++i) wide.queries[i * 128 + j] /= a;
    }
    // A large constant offset, too, which no softmax notices.
    for (size_t i = 0; i < 2048; ++i) wide.keys[i * 128 + 50] += 100.0F;
    double errors[2];
    for (int w = 0; w < 2; ++w) {
      const CodedHead& head = w == 0 ? plain : wide;
      const KvCodes codes = head.codes(2, 2);
      const CodeQueries queries = codes.queries(head.queries.data(), 8);
      std::vector<float> o(8 * 128), lse(8);
      codes.attend(queries, {0.05F, 0.0F}, {}, {o.data(), lse.data()});
      errors[w] = 0.0;
      for (uint32_t h = 0; h < 8; ++h) {
        const ExactState truth = exact(head, head.queries.data() + h * 128, 0.05, all_rows(2048));
        errors[w] += relative_error(o.data() + h * 128, truth.o);
      }
    }
    EXPECT_NEAR(errors[1] / errors[0], 1.0, 0.1) << a;
  }
}

TEST(KvCodes, ABlockDependsOnItsOwnRowsAlone) {
  CodedHead head(80, 2048, 23);
  const Balance balance = head.balance();
  KvCodes whole({80, 2, 4}, balance), pieces({80, 2, 4}, balance);
  whole.extend(kernels(), head.kv());
  size_t rows = 0;
  while (rows < 2048) {
    rows = std::min<size_t>(2048, rows + head.rng() % 700);
    pieces.extend(kernels(), head.kv(rows));
    EXPECT_EQ(pieces.count(), rows / 256 * 256);
    if (head.rng() % 3 == 0) {
      rows -= head.rng() % (rows / 2 + 1);
      pieces.truncate(rows);
      EXPECT_EQ(pieces.count(), rows / 256 * 256);
    }
  }
  ASSERT_EQ(pieces.blocks(), whole.blocks());
  EXPECT_EQ(
      std::memcmp(pieces.block(0), whole.block(0), whole.blocks() * whole.shape().block_bytes()),
      0);
}

// Copies share blocks until they differ, over many generations; none sees what another one does.
TEST(KvCodes, CopiesGrowAndAreCutEachByItself) {
  for (uint32_t seed = 1; seed <= test::cases(12); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const CodeShape shape{64, 1, 1};
    const Balance balance{std::vector<float>(64, 1.0F), 1.0F};
    struct Member {
      KvCodes codes;
      std::vector<uint32_t> blocks;  ///< what each is filled with
    };
    std::vector<Member> family{{KvCodes(shape, balance), {}}};
    uint32_t next = 0;
    for (int i = 0; i < 150; ++i) {
      const size_t at = random() % family.size();
      KvCodes& codes = family[at].codes;
      std::vector<uint32_t>& blocks = family[at].blocks;
      switch (random() % 6) {
        case 0:
        case 1:
        case 2: {
          std::vector<std::byte> more;
          for (uint32_t n = random() % 4; n != 0; --n) {
            blocks.push_back(++next);
            std::vector<uint32_t> fill(shape.block_bytes() / sizeof(uint32_t), next);
            const auto bytes = std::as_bytes(std::span(fill));
            more.insert(more.end(), bytes.begin(), bytes.end());
          }
          codes.append(more);
          break;
        }
        case 3: {
          const size_t rows = random() % (blocks.size() * kCodeBlock + 300);
          codes.truncate(rows);
          blocks.resize(std::min(blocks.size(), rows / kCodeBlock));
          break;
        }
        case 4:
          if (family.size() == 6) family.erase(family.begin() + (at == 0 ? 1 : 0));
          family.push_back(Member(family[std::min(at, family.size() - 1)]));
          break;
        default:
          if (family.size() > 1) family.erase(family.begin() + static_cast<ptrdiff_t>(at));
      }
      size_t counted = 0;
      for (const Member& member : family) {
        ASSERT_EQ(member.codes.blocks(), member.blocks.size());
        for (size_t b = 0; b < member.blocks.size(); ++b) {
          uint32_t first = 0, last = 0;
          std::memcpy(&first, member.codes.block(b), sizeof first);
          std::memcpy(&last, member.codes.block(b) + shape.block_bytes() - sizeof last,
                      sizeof last);
          ASSERT_EQ(first, member.blocks[b]);
          ASSERT_EQ(last, member.blocks[b]);
        }
        for (const Member& other : family) {
          const size_t common = member.codes.common_blocks(other.codes);
          ASSERT_EQ(common, other.codes.common_blocks(member.codes));
          ASSERT_LE(common, std::min(member.blocks.size(), other.blocks.size()));
          for (size_t b = 0; b < common; ++b) {
            ASSERT_EQ(member.codes.block(b), other.codes.block(b));
          }
          // Blocks that are at another place are not in common.
          const bool at_end = common == std::min(member.blocks.size(), other.blocks.size());
          ASSERT_TRUE(at_end || member.codes.block(common) != other.codes.block(common));
        }
        counted += member.codes.bytes() - member.codes.bytes_of_others();
        ASSERT_GE(member.codes.bytes(), member.blocks.size() * shape.block_bytes());
      }
      std::set<uint32_t> distinct;
      for (const Member& m : family) distinct.insert(m.blocks.begin(), m.blocks.end());
      ASSERT_GE(counted, distinct.size() * shape.block_bytes());
    }
  }
}

TEST(KvCodes, LevelsOfTheMachineGiveTheSameBits) {
  CodedHead head(128, 256, 29);
  const Balance balance = head.balance();
  for (const DType dtype : {DType::f16, DType::bf16}) {
    std::vector<std::byte> k(256 * 128 * 2), v(k.size());
    kernels().from_f32[static_cast<size_t>(dtype)](head.keys.data(), k.data(), 256 * 128);
    kernels().from_f32[static_cast<size_t>(dtype)](head.values.data(), v.data(), 256 * 128);
    const KvView kv{dense_rows(k.data(), 256, 128, dtype), dense_rows(v.data(), 256, 128, dtype)};
    const CodeShape shape{128, 2, 2};
    std::vector<std::byte> first(shape.block_bytes()), other(shape.block_bytes());
    encode_block(shape, balance, kernels(), kv, 0, first.data());
    for (const cpu::Level level : cpu::available_levels()) {
      encode_block(shape, balance, *cpu::kernels_for(level), kv, 0, other.data());
      EXPECT_EQ(first, other) << cpu::level_name(level);
    }
  }
}

// Values of rows that come later may be as long as fp16 is: what a device cannot sum up by code is told, and read.
TEST(KvCodes, ValuesWhoseFactorsAreTooLargeAreTold) {
  constexpr uint32_t kDim = 128;
  for (const uint32_t bits : {2U, 4U}) {
    // Of normal numbers a factor is the step between levels times their deviation, within a third.
    const float most = kMostValueFactor / code_step(bits);
    for (const float longer : {0.7F * most, 1.5F * most}) {
      CodedHead head(kDim, 512, 47);
      for (size_t i = 256 * kDim; i < head.values.size(); ++i) head.values[i] *= longer;
      KvCodes codes({kDim, bits, bits},
                    learn_balance(kernels(), head.kv(256), CodedHead::view(head.queries, kDim)));
      codes.extend(kernels(), head.kv());
      EXPECT_LT(codes.run(0).noise, kUnknownNoise);
      EXPECT_EQ(codes.run(1).noise == kUnknownNoise, longer > most) << bits << " bits";
      const CodeRun run = codes.run(1);
      const CodeRunReader reader({kDim, bits, bits}, run);
      float largest = 0.0F;
      for (uint32_t i = 0; i < kCodeBlock; ++i) largest = std::max(largest, reader.value_factor(i));
      EXPECT_LE(largest, kMostValueFactor);
      EXPECT_GT(largest, 0.5F * kMostValueFactor);
    }
    // Means are added to 15 factors.
    CodedHead head(kDim, 512, 47);
    for (size_t i = 256; i < 512; ++i) head.values[i * kDim + 3] += 8e5F;
    KvCodes codes({kDim, bits, bits},
                  learn_balance(kernels(), head.kv(256), CodedHead::view(head.queries, kDim)));
    codes.extend(kernels(), head.kv());
    EXPECT_EQ(codes.run(1).noise, kUnknownNoise);
    for (uint32_t j = 0; j < kDim; ++j) {
      EXPECT_LE(std::abs(CodeRunReader({kDim, bits, bits}, codes.run(1)).value_mean(j)),
                kMostValueMean);
    }
  }
}

TEST(KvCodes, StrangeRowsStayFinite) {
  for (const uint32_t bits : kBits) {
    CodedHead head(64, 512, 31);
    std::fill_n(head.keys.begin(), 64, 0.0F);       // zero
    std::fill_n(head.keys.begin() + 64, 64, 6e4F);  // huge
    for (size_t i = 256; i < 512; ++i) {            // all equal
      std::copy_n(head.keys.begin() + 128, 64, head.keys.begin() + static_cast<long>(i * 64));
      std::copy_n(head.values.begin() + 128, 64, head.values.begin() + static_cast<long>(i * 64));
    }
    std::fill_n(head.values.begin() + 64, 64, 6e4F);
    const KvCodes codes = head.codes(bits, bits);
    const CodeQueries queries = codes.queries(head.queries.data(), 2);
    std::vector<float> o(2 * 64), lse(2);
    codes.attend(queries, {0.01F, 0.0F}, {}, {o.data(), lse.data()});
    for (const float x : o) EXPECT_TRUE(std::isfinite(x));
    for (const float x : lse) EXPECT_TRUE(std::isfinite(x));
    // Rows that are all equal are their mean.
    const std::vector<float> row = decoded_value(codes, 300);
    for (uint32_t j = 0; j < 64; ++j) {
      EXPECT_NEAR(row[j], head.values[128 + j], 0.01F * codes.balance().value_scale);
    }
  }
}

}  // namespace
}  // namespace keyhole::index

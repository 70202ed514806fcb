// Blocks that attention passes over as no query gives them weight: with no threshold none is; else what is lost is no
// more than blocks that are light enough have, in double precision; and such blocks' values are not touched.
#include <algorithm>
#include <limits>
#include <string>

#include "gpu/cuda/common/kernel_generation.h"
#include "gpu/cuda/prefill/blocked_kernels.h"
#include "tests/gpu/cuda_fixture.h"

namespace keyhole::gpu {
namespace {

using namespace test;  // NOLINT

struct Case {
  uint32_t dim;
  DType dtype;
  bool hopper;
  float softcap = 0.0F;
};

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return "dim" + std::to_string(c.dim) + dtype_name(c.dtype) + (c.hopper ? "hopper" : "") +
         (c.softcap > 0.0F ? "capped" : "");
}

class SkippedBlocksTest : public testing::TestWithParam<Case> {
 protected:
  static constexpr uint32_t kKvHeads = 2, kGroup = 2, kHeads = kKvHeads * kGroup;

  void SetUp() override {
    KEYHOLE_NEEDS_GPU();
    if (GetParam().hopper && !hopper_kernels_run_on(0))
      GTEST_SKIP() << "the device is no Hopper, or the build has none";
  }
  [[nodiscard]] uint32_t dim() const { return GetParam().dim; }

  std::vector<float> rounded_floats(size_t n) {
    std::vector<float> x = random_floats(rng_, n);
    for (float& y : x) y = rounded(y, GetParam().dtype);
    return x;
  }
  [[nodiscard]] bool is_light(uint32_t row) const { return light_[row / kListRows]; }
  [[nodiscard]] uint32_t end_of(uint32_t token) const {
    return causal_ ? rows_ - n_ + token + 1 : rows_;
  }

  /// n queries; of the blocks, all but the first and the last few are light with the chance of 1 in 2: their logits are
  /// about 0, others' largest some 20.
  void fill(uint32_t n, uint32_t rows, bool causal) {
    n_ = n, rows_ = rows, causal_ = causal;
    const uint32_t blocks = (rows + kListRows - 1) / kListRows;
    light_.assign(blocks, false);
    for (uint32_t b = 2; b < blocks; ++b) light_[b] = b + 5 < blocks && rng_() % 2 == 0;
    q_ = rounded_floats(size_t{n} * kHeads * dim());
    k_ = rounded_floats(size_t{rows} * kKvHeads * dim());
    v_ = rounded_floats(k_.size());
    for (uint32_t i = 0; i < rows; ++i) {
      for (uint32_t j = 0; j < kKvHeads * dim(); ++j) {
        float& x = k_[size_t{i} * kKvHeads * dim() + j];
        x = rounded(is_light(i) ? 0.01F * x : x, GetParam().dtype);
      }
    }
  }
  /// skips: of each head.
  void attend(const std::vector<float>& skips, bool for_all) {
    BlockedParams p;
    p.q = upload(as_bytes(q_, GetParam().dtype));
    p.q_token_stride = size_t{kHeads} * dim();
    p.q_head_stride = dim();
    p.n = n_;
    p.q_heads = kHeads;
    p.kv_heads = kKvHeads;
    p.logits.scale = scale();
    p.logits.softcap = GetParam().softcap;
    p.keys = upload(as_bytes(k_, GetParam().dtype));
    p.values = upload(as_bytes(v_, GetParam().dtype));
    p.rows = rows_;
    p.row_stride = size_t{kKvHeads} * dim();
    p.head_stride = dim();
    p.causal = causal_;
    p.first = causal_ ? rows_ - n_ : 0;
    p.is_first = true;
    const DeviceBuffer out(q_.size() * sizeof(float)), lse(size_t{n_} * kHeads * sizeof(float));
    p.final = {out.data(), p.q_token_stride, p.q_head_stride, DType::f32, lse.as<float>(), nullptr};
    if (for_all) {
      p.skip = skips[0];
    } else {
      p.skips = upload(skips);
    }
    launch_blocked(p, GetParam().dtype, dim(), GetParam().hopper, nullptr);
    out_ = download(out.as<float>(), q_.size());
    lse_ = download(lse.as<float>(), size_t{n_} * kHeads);
  }
  [[nodiscard]] float scale() const { return 6.0F / std::sqrt(static_cast<float>(dim())); }
  [[nodiscard]] double logit(uint32_t token, uint32_t head, uint32_t row) const {
    double x = 0;
    for (uint32_t j = 0; j < dim(); ++j) {
      x += double{q_[(size_t{token} * kHeads + head) * dim() + j]} *
           double{k_[(size_t{row} * kKvHeads + head / kGroup) * dim() + j]};
    }
    x *= double{scale()};
    const double cap = double{GetParam().softcap};
    return cap > 0 ? cap * std::tanh(x / cap) : x;
  }

  /// Compares with attention of all rows, or of those that are not light. Weight may be lost of blocks that have less
  /// than 2^-skip of a query's largest.
  void compare(const std::vector<float>& skips, bool without_light) {
    std::vector<double> w(rows_), o(dim());
    for (uint32_t t = 0; t < n_; t += 7) {
      for (uint32_t h = 0; h < kHeads; ++h) {
        const uint32_t end = end_of(t);
        double top = -INFINITY;
        for (uint32_t i = 0; i < end; ++i) {
          w[i] = without_light && is_light(i) ? -INFINITY : logit(t, h, i);
          top = std::max(top, w[i]);
        }
        std::fill(o.begin(), o.end(), 0.0);
        double sum = 0, lost = 0, largest_value = 0;
        // Of 256 components half a block is passed over by itself.
        const uint32_t rows = dim() > 128 ? kListRows / 2 : kListRows;
        for (uint32_t b = 0; b * rows < end; ++b) {
          double heaviest = 0, of_block = 0;
          for (uint32_t i = b * rows; i < std::min(end, (b + 1) * rows); ++i) {
            const double x = std::exp(w[i] - top);
            heaviest = std::max(heaviest, x);
            of_block += x;
            if (x == 0.0) continue;
            for (uint32_t j = 0; j < dim(); ++j) {
              const double v = double{v_[(size_t{i} * kKvHeads + h / kGroup) * dim() + j]};
              o[j] += x * v;
              largest_value = std::max(largest_value, std::abs(v));
            }
          }
          sum += of_block;
          // The logits' rounding: a hundredth of an octave.
          if (skips[h] > 0.0F && heaviest < std::exp2(0.01 - double{skips[h]})) lost += of_block;
        }
        lost /= sum;
        const size_t at = size_t{t} * kHeads + h;
        const double lse = top + std::log(sum);
        const std::string where = "token " + std::to_string(t) + " head " + std::to_string(h) +
                                  ", of which may be lost " + std::to_string(lost);
        ASSERT_LT(double{lse_[at]}, lse + 2e-3) << where;
        if (lost < 1.0) {
          ASSERT_GT(double{lse_[at]}, lse + std::log(1.0 - lost) - 2e-3) << where;
        }
        double difference = 0, norm = 0;
        for (uint32_t j = 0; j < dim(); ++j) {
          const double x = double{out_[at * dim() + j]} - o[j] / sum;
          difference += x * x;
          norm += o[j] / sum * o[j] / sum;
        }
        const double rounding = 2e-3 * std::sqrt(norm);
        ASSERT_LT(std::sqrt(difference),
                  rounding + 2.0 * lost * largest_value * std::sqrt(static_cast<double>(dim())))
            << where;
      }
    }
  }

  uint32_t n_ = 0, rows_ = 0;
  bool causal_ = false;
  std::vector<bool> light_;
  std::vector<float> q_, k_, v_, out_, lse_;
  std::mt19937 rng_{testing::UnitTest::GetInstance()->random_seed() + 17U};
  Uploads upload;
};

TEST_P(SkippedBlocksTest, NothingIsLostButOfBlocksThatAreLightEnough) {
  for (const bool causal : {false, true}) {
    fill(150, 900, causal);
    for (const float skip : {0.0F, 2.0F, 6.0F, 14.0F}) {
      SCOPED_TRACE((causal ? "causal, skip " : "skip ") + std::to_string(skip));
      attend(std::vector<float>(kHeads, skip), true);
      compare(std::vector<float>(kHeads, skip), false);
      const std::vector<float> mixed = {skip, 0.0F, 1.0F, 2.0F * skip};
      attend(mixed, false);
      compare(mixed, false);
    }
  }
}
TEST_P(SkippedBlocksTest, ValuesOfLightBlocksAreNotTouched) {
  for (const bool causal : {false, true}) {
    SCOPED_TRACE(causal ? "causal" : "all rows");
    fill(200, 1100, causal);
    // In a light block lies what would make outputs infinite, whatever its weight.
    for (uint32_t i = 0; i < rows_; ++i) {
      if (!is_light(i)) continue;
      for (uint32_t j = 0; j < kKvHeads * dim(); ++j)
        v_[size_t{i} * kKvHeads * dim() + j] = std::numeric_limits<float>::infinity();
    }
    // All queries agree about the blocks, whose heavy ones come first in either order.
    for (uint32_t h = 0; h < kKvHeads; ++h) {
      for (uint32_t t = 0; t < n_; ++t) {
        for (uint32_t g = 0; g < kGroup; ++g) {
          for (uint32_t j = 0; j < dim(); ++j)
            q_[(size_t{t} * kHeads + h * kGroup + g) * dim() + j] = j == 0 ? 8.0F : 0.0F;
        }
      }
      for (uint32_t i = 0; i < rows_; ++i) {
        float* const k = &k_[(size_t{i} * kKvHeads + h) * dim()];
        // q.k is 8 k[0], the logit 48 k[0] / sqrt(dim): 0 of light rows, 8 to 11 of others.
        const float wanted = 8.0F + 3.0F * static_cast<float>(rng_() % 8) / 7.0F;
        const float x = wanted * std::sqrt(static_cast<float>(dim())) / 48.0F;
        k[0] = rounded(is_light(i) ? 0.0F : x, GetParam().dtype);
      }
    }
    attend(std::vector<float>(kHeads, 8.0F), true);
    for (const float x : out_) ASSERT_TRUE(std::isfinite(x)) << "a light block was attended";
    compare(std::vector<float>(kHeads, 0.0F), true);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, SkippedBlocksTest, testing::ValuesIn([] {
                           std::vector<Case> cases;
                           for (const bool hopper : {false, true}) {
                             for (const uint32_t dim : {64U, 96U, 128U, 256U})
                               cases.push_back({dim, DType::f16, hopper});
                             cases.push_back({128, DType::bf16, hopper});
                             cases.push_back({64, DType::f16, hopper, 20.0F});
                           }
                           return cases;
                         }()),
                         name_of);

}  // namespace
}  // namespace keyhole::gpu

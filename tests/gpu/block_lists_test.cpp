// Blocked attention's kernels beside double precision: lists of blocks (none, empty, all, random), rows and queries
// that end inside tiles, positions, pieces one after the other, strides; the kernel of all devices and Hopper's.
#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "gpu/cuda/common/kernel_generation.h"
#include "gpu/cuda/prefill/blocked_kernels.h"
#include "tests/gpu/cuda_fixture.h"
#include "tests/gpu/exact_attention.h"

namespace keyhole::gpu {
namespace {

using namespace test;  // NOLINT

struct Case {
  uint32_t dim, group;
  DType dtype;
  bool hopper;
  float softcap = 0.0F;
};

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return "dim" + std::to_string(c.dim) + "group" + std::to_string(c.group) + dtype_name(c.dtype) +
         (c.hopper ? "hopper" : "") + (c.softcap > 0.0F ? "capped" : "");
}

enum class Lists : uint8_t { none, empty, all, random };

/// One piece of rows, and which blocks of it each head and tile of queries attends.
struct Piece {
  uint32_t rows = 0;
  bool causal = false;
  uint32_t first = 0;
  Lists lists = Lists::none;
  uint32_t window = 0;
  bool some = false;  ///< of rows, whole blocks of them that are not causal, each tile attends some
};

class BlockListsTest : public testing::TestWithParam<Case> {
 protected:
  static constexpr uint32_t kKvHeads = 2;

  void SetUp() override {
    KEYHOLE_NEEDS_GPU();
    if (GetParam().hopper && !hopper_kernels_run_on(0))
      GTEST_SKIP() << "the device is no Hopper, or the build has none";
  }
  [[nodiscard]] uint32_t heads() const { return kKvHeads * GetParam().group; }
  [[nodiscard]] uint32_t dim() const { return GetParam().dim; }

  std::vector<float> rounded_floats(size_t n) {
    std::vector<float> x = random_floats(rng_, n);
    for (float& y : x) y = rounded(y, GetParam().dtype);
    return x;
  }

  /// Attends the pieces one after the other and compares. as_outputs: of the last one, not as states.
  void run(uint32_t n, const std::vector<Piece>& pieces, bool by_token,
           std::optional<DType> as_outputs = {}, bool with_sinks = false) {
    const Case& c = GetParam();
    const uint32_t d = dim(), query_tiles = (n + kListQueries - 1) / kListQueries;
    const std::vector<float> q = rounded_floats(size_t{n} * heads() * d);
    BlockedParams p;
    p.q = upload(as_bytes(q, c.dtype));
    p.q_token_stride = size_t{heads()} * d;
    p.q_head_stride = d;
    p.n = n;
    p.q_heads = heads();
    p.kv_heads = kKvHeads;
    p.logits.scale = 1.7F / std::sqrt(static_cast<float>(d));
    p.logits.softcap = c.softcap;
    p.o = upload(std::vector<float>(q.size(), std::numeric_limits<float>::quiet_NaN()));
    p.sums = upload(std::vector<float2>(size_t{n} * heads(), float2{NAN, NAN}));
    p.is_first = true;
    truth_.clear();
    for (size_t i = 0; i < size_t{n} * heads(); ++i) truth_.emplace_back(p.logits, &q[i * d], d);
    sinks_.clear();
    const size_t gap = 16;  // between the outputs of tokens
    const DeviceBuffer outputs(
        as_outputs ? size_t{n} * (heads() * d + gap) * dtype_size(*as_outputs) : 0);
    const DeviceBuffer lse(size_t{n} * heads() * sizeof(float));
    BlockedOutput final;
    if (as_outputs) {
      final = {outputs.data(), heads() * d + gap, d, *as_outputs, lse.as<float>(), nullptr};
      if (with_sinks) sinks_ = random_floats(rng_, heads(), 3.0F);
      if (with_sinks) final.sinks = upload(sinks_);
    }
    for (const Piece& piece : pieces) {
      p.final = &piece == &pieces.back() ? final : BlockedOutput{};
      const std::vector<float> k = rounded_floats(size_t{piece.rows} * kKvHeads * d);
      const std::vector<float> v = rounded_floats(k.size());
      p.keys = upload(as_bytes(k, c.dtype));
      p.values = upload(as_bytes(v, c.dtype));
      p.rows = piece.rows;
      p.row_stride = by_token ? size_t{kKvHeads} * d : d;
      p.head_stride = by_token ? d : size_t{piece.rows} * d;
      p.causal = piece.causal;
      p.window = piece.window;
      p.first = piece.first;
      const uint32_t blocks = (piece.rows + kListRows - 1) / kListRows;
      std::vector<uint32_t> counts(size_t{heads()} * query_tiles);
      std::vector<uint16_t> list(counts.size() * blocks, 65535);
      std::vector<bool> listed(list.size());
      for (size_t i = 0; i < counts.size(); ++i) {
        for (uint32_t b = 0; b < blocks; ++b) {
          const bool in = piece.lists == Lists::none || piece.lists == Lists::all ||
                          (piece.lists == Lists::random && rng_() % 3 == 0);
          listed[i * blocks + b] = in;
          if (in) list[i * blocks + counts[i]++] = static_cast<uint16_t>(b);
        }
      }
      const uint32_t words = piece.rows / 32;
      std::vector<uint32_t> chosen(counts.size() * words, ~0U);
      for (uint32_t& word : chosen) word = piece.some ? rng_() : word;
      // Some tiles have a block of which no row is chosen.
      for (uint32_t i = 0; piece.some && i < chosen.size(); i += 6) chosen[i] = 0;
      p.chosen = piece.some ? upload(chosen) : nullptr;
      p.lists = {};
      if (piece.lists != Lists::none) p.lists = {upload(counts), upload(list), blocks};
      launch_blocked(p, c.dtype, d, c.hopper, nullptr);
      p.is_first = false;
      for (uint32_t t = 0; t < n; ++t) {
        for (uint32_t h = 0; h < heads(); ++h) {
          const size_t tile = size_t{h} * query_tiles + t / kListQueries;
          const uint32_t end =
              piece.causal ? std::min(piece.rows, piece.first + t + 1) : piece.rows;
          for (uint32_t i = piece.window != 0 && end > piece.window ? end - piece.window : 0;
               i < end; ++i) {
            if (!listed[tile * blocks + i / kListRows]) continue;
            if (piece.some && (chosen[tile * words + i / 32] >> i % 32 & 1U) == 0) continue;
            const size_t at = i * p.row_stride + h / c.group * p.head_stride;
            truth_[size_t{t} * heads() + h].add(&k[at], &v[at]);
          }
        }
      }
    }
    as_outputs ? compare_outputs(p) : compare(p);
  }

 private:
  void compare(const BlockedParams& p) {
    const uint32_t d = dim();
    std::vector<float> o = download(p.o, truth_.size() * d);
    const std::vector<float2> sums = download(p.sums, truth_.size());
    const double bound = GetParam().dtype == DType::f16 ? 1e-3 : 2e-4;
    const float unit = p.logits.softcap > 0.0F ? 1.0F : p.logits.scale;
    for (size_t i = 0; i < truth_.size(); ++i) {
      const ExactAttention& t = truth_[i];
      if (t.is_empty()) {
        ASSERT_EQ(sums[i].y, 0.0F) << i;
        ASSERT_EQ(sums[i].x, -INFINITY) << i;
        for (uint32_t j = 0; j < d; ++j) ASSERT_EQ(o[i * d + j], 0.0F) << i;
        continue;
      }
      for (uint32_t j = 0; j < d; ++j) o[i * d + j] /= sums[i].y;
      ASSERT_LT(relative_error(&o[i * d], t.o()), bound)
          << "token " << i / heads() << " head " << i % heads();
      ASSERT_NEAR(double{sums[i].x} * double{unit} + std::log(double{sums[i].y}), t.lse(), 1e-3)
          << i;
    }
  }

  void compare_outputs(const BlockedParams& p) {
    const uint32_t d = dim();
    const std::vector<float> lse = download(p.final.lse, truth_.size());
    const auto out = download(static_cast<const std::byte*>(p.final.data),
                              p.n * p.final.token_stride * dtype_size(p.final.dtype));
    // The bound includes the rounding of the output, beside that of the weights.
    const double bound = p.final.dtype == DType::bf16 ? 4e-3 : 1e-3;
    for (size_t i = 0; i < truth_.size(); ++i) {
      ExactAttention& t = truth_[i];
      const bool has_rows = !t.is_empty();
      if (!sinks_.empty()) t.add_sink(sinks_[i % heads()]);
      if (t.is_empty()) {
        ASSERT_EQ(lse[i], -INFINITY);
        continue;
      }
      ASSERT_NEAR(lse[i], t.lse(), 2e-3) << i;
      if (!has_rows) continue;
      std::vector<float> row(d);
      for (uint32_t j = 0; j < d; ++j) {
        const size_t at = i / heads() * p.final.token_stride + i % heads() * d + j;
        row[j] = get(out.data(), at, p.final.dtype);
      }
      ASSERT_LT(relative_error(row.data(), t.o()), bound)
          << "token " << i / heads() << " head " << i % heads();
    }
  }

  std::vector<float> sinks_;
  std::mt19937 rng_{testing::UnitTest::GetInstance()->random_seed() + 7U};
  Uploads upload;
  std::vector<ExactAttention> truth_;
};

TEST_P(BlockListsTest, AllRows) {
  for (const uint32_t n : {1U, 64U, 130U}) {
    for (const uint32_t rows : {1U, 64U, 65U, 300U}) {
      SCOPED_TRACE(std::to_string(n) + " queries, " + std::to_string(rows) + " rows");
      run(n, {{rows}}, rows % 2 == 0);
    }
  }
}
TEST_P(BlockListsTest, RowsUpToTheirOwn) {
  for (const uint32_t n : {1U, 129U, 260U}) {
    for (const uint32_t first : {0U, 63U, 190U}) {
      SCOPED_TRACE(std::to_string(n) + " queries from " + std::to_string(first));
      run(n, {{first + n, true, first}}, n % 2 == 0);
    }
  }
}
TEST_P(BlockListsTest, RowsOfAWindow) {
  for (const uint32_t window : {1U, 50U, 64U, 200U}) {
    SCOPED_TRACE("window " + std::to_string(window));
    run(140, {{170, true, 30, Lists::none, window}}, true);
    run(64, {{400, true, 336, Lists::random, window}}, false);
  }
}
TEST_P(BlockListsTest, OutputsOfEveryDtypeWithSinks) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    run(150, {{190, true, 40}}, true, dtype);
    run(70, {{190, true, 120, Lists::random}}, true, dtype, true);
  }
}
TEST_P(BlockListsTest, RowsOfLists) {
  for (const Lists lists : {Lists::empty, Lists::all, Lists::random}) {
    for (const uint32_t first : {0U, 70U, 400U}) {
      SCOPED_TRACE("lists " + std::to_string(static_cast<int>(lists)) + ", from " +
                   std::to_string(first));
      run(200, {{first + 200, true, first, lists}}, true);
      run(130, {{first + 77, false, 0, lists}}, false);
    }
  }
}
TEST_P(BlockListsTest, PiecesOneAfterTheOther) {
  run(150, {{200, false, 0, Lists::random}, {64}, {150, true, 0}}, false);
  run(150,
      {{200, false, 0, Lists::empty}, {190, true, 40, Lists::random}, {65, false, 0, Lists::all}},
      true);
}

TEST_P(BlockListsTest, RowsThatTilesChoose) {
  for (const Lists lists : {Lists::none, Lists::random, Lists::empty}) {
    SCOPED_TRACE("lists " + std::to_string(static_cast<int>(lists)));
    run(200, {{64 * 5, false, 0, lists, 0, true}}, false);
    run(130, {{230, true, 100, Lists::random}, {64 * 4, false, 0, lists, 0, true}}, true,
        DType::f32, true);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, BlockListsTest, testing::ValuesIn([] {
                           std::vector<Case> cases;
                           for (const bool hopper : {false, true}) {
                             for (const DType dtype : {DType::f16, DType::bf16}) {
                               for (const uint32_t dim : {64U, 80U, 96U, 128U, 256U})
                                 cases.push_back({dim, 2, dtype, hopper});
                               cases.push_back({128, 1, dtype, hopper, 20.0F});
                             }
                           }
                           return cases;
                         }()),
                         name_of);

}  // namespace
}  // namespace keyhole::gpu

// Many new tokens over codes at once: codes read back in double precision where no row is read exactly, and exact
// attention of the rows beside single steps over the same codes elsewhere; heads whose codes cannot tell which rows
// weigh; blocks chosen by their means. By the kernels that all devices have, one after the other and launched ahead of
// the end of the one before, and, where it has some, by a device's own.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/half.h"
#include "gpu/blocked.h"
#include "gpu/cuda/common/kernel_generation.h"
#include "tests/gpu/codes_fixture.h"
#include "tests/gpu/decoded_codes.h"
#include "tests/gpu/exact_attention.h"
#include "tests/gpu/sharp_layer.h"
#include "tests/scoped_variable.h"

namespace keyhole::gpu::test {
namespace {

struct TurnCase {
  uint32_t dim, bits, group, tokens;
  DType dtype = DType::f16;
  float softcap = 0.0F;
  bool in_int8 = false;
};

/// The kernels of a turn: those that all devices have, the same as 12.0 launches them, and those of 9.0 alone.
enum class Way { general, ahead, hopper };
/// Has devices take the way while it lives, as far as they have it.
struct ForcedWay {
  explicit ForcedWay(Way way) {
    if (way == Way::hopper) return;
    variable.emplace("KEYHOLE_CUDA_CAPABILITY", way == Way::general ? "8.6" : "12.0");
  }
  std::optional<keyhole::test::ScopedVariable> variable;
};
const char* name_of(Way way) {
  return way == Way::general ? "general" : way == Way::ahead ? "ahead" : "hopper";
}
/// Where the way is forced.
bool runs_here(Way way) {
  if (way == Way::general) return true;
  return way == Way::ahead ? kernels_have_clusters(0) && !hopper_kernels_run_on(0)
                           : hopper_kernels_run_on(0);
}

class CodedTurnTest : public testing::TestWithParam<std::tuple<TurnCase, Way>> {
 protected:
  static constexpr uint32_t kHeads = 2;

  static const TurnCase& turn() { return std::get<TurnCase>(GetParam()); }

  void SetUp() override {
    KEYHOLE_NEEDS_GPU();
    const Way way = std::get<Way>(GetParam());
    forced_.emplace(way);
    if (!runs_here(way)) GTEST_SKIP() << "kernels of another device run here";
    check(cudaStreamCreate(&stream_), "stream");
  }
  void TearDown() override {
    blocked_.reset();
    codes_.reset();
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  std::vector<float> random(size_t count, DType dtype, float size = 1.0F) {
    std::vector<float> x = random_floats(rng_, count, size);
    for (float& y : x) y = rounded(y, dtype);
    return x;
  }

  /// scale: of logits, times 1 / sqrt(dim). needles: keys that one query each looks for, of tokens 0, tokens / 2 and
  /// the last. apart: how far the keys of a block lie from those of others.
  void make(uint32_t blocks, float scale, bool needles, float apart = 0.0F) {
    const TurnCase& c = turn();
    const uint32_t d = c.dim;
    ResidentShape r = small_shape(d, c.dtype, c.group, kHeads);
    r.logits.scale = scale / std::sqrt(static_cast<float>(d));
    r.logits.softcap = c.softcap;
    logits_ = r.logits;
    resident_ = make_cuda_resident(r, {});
    blocked_ = make_cuda_blocked(*resident_, {r.q_heads, kHeads, d, c.dtype});
    shape_.layers = r.layers;
    shape_.q_heads = r.q_heads;
    shape_.kv_heads = kHeads;
    shape_.code = {d, c.bits, c.bits};
    shape_.dtype = c.in_int8 ? DType::i8 : c.dtype;
    shape_.blocks = blocks;
    shape_.logits = logits_;
    shape_.exact_rows = 16;
    codes_ = make_cuda_codes(*resident_, shape_);
    const uint32_t rows = blocks * kCodeBlock;
    offloaded_ = std::make_unique<OffloadedLayer>(shape_, rows);
    q_ = random(size_t{c.tokens} * r.q_heads * d, DType::f16);
    std::vector<float> middle;
    for (uint32_t i = 0; i < rows; ++i) {
      std::vector<float> k = random_floats(rng_, kHeads * d);
      if (apart > 0.0F && i % kCodeBlock == 0) middle = random_floats(rng_, kHeads * d, apart);
      for (uint32_t j = 0; j < middle.size(); ++j) k[j] += middle[j];
      const std::vector<float> v = random_floats(rng_, kHeads * d);
      if (needles && i % 211 == 7) {
        const uint32_t token = std::vector{0U, c.tokens / 2, c.tokens - 1}[i / 211 % 3];
        for (uint32_t h = 0; h < kHeads; ++h) {
          const uint32_t head = h * c.group + i % c.group;
          for (uint32_t j = 0; j < d; ++j)
            k[h * d + j] += q_[(size_t{token} * r.q_heads + head) * d + j];
        }
      }
      offloaded_->append(k, v);
    }
    offloaded_->learn(random_floats(rng_, size_t{r.q_heads} * d));
    offloaded_->extend();
    offloaded_->tell(*codes_, 0);
    codes_->encode(0, 0, blocks, stream_);
    own_k_ = random(size_t{c.tokens} * kHeads * d, c.dtype);
    own_v_ = random(own_k_.size(), c.dtype);
    check(cudaStreamSynchronize(stream_), "encoding");
  }

  TensorView tensor(const std::vector<float>& x, uint32_t heads, DType dtype) {
    return dense_tensor(upload(as_bytes(x, dtype)), turn().tokens, heads, turn().dim, dtype,
                        Memory::device);
  }
  CodedAttention attend() {
    const TurnCase& c = turn();
    blocked_->begin(tensor(q_, shape_.q_heads, DType::f16), {logits_, sink()}, stream_);
    blocked_->attend_new(tensor(own_k_, kHeads, c.dtype), tensor(own_v_, kHeads, c.dtype), nullptr,
                         stream_);
    CodedRows rows = codes_->coded_rows(0);
    rows.chosen_blocks = chosen_;
    EXPECT_TRUE(blocked_->attends_codes(rows));
    const CodedAttention end = blocked_->attend_codes(rows, stream_, {});
    EXPECT_FALSE(end.refused);
    float* const out = upload(std::vector<float>(q_.size(), NAN));
    float* const lse = upload(std::vector<float>(q_.size() / c.dim, NAN));
    blocked_->finish(dense_tensor(reinterpret_cast<std::byte*>(out), c.tokens, shape_.q_heads,
                                  c.dim, DType::f32, Memory::device),
                     lse, stream_);
    check(cudaStreamSynchronize(stream_), "a turn");
    out_ = download(out, q_.size());
    lse_ = download(lse, q_.size() / c.dim);
    return end;
  }
  [[nodiscard]] const float* sink() const { return sinks_.empty() ? nullptr : sinks_.data(); }

  /// Runs over the query rows of a KV head: exact logits and rows; or, of all rows but the `exact` heaviest of the
  /// token's group, codes.
  struct Answer {
    std::vector<double> o;
    double lse;
  };
  void decode() {
    const TurnCase& c = turn();
    keys_.clear();
    values_.clear();
    decoded_.clear();
    std::vector<std::byte> block(shape_.code.block_bytes());
    for (uint32_t h = 0; h < kHeads; ++h) {
      const index::Balance& b = offloaded_->codes(h).balance();
      decoder_.push_back({shape_.code, b.key_scale, b.value_scale});
      decoded_.emplace_back();
      keys_.emplace_back();
      values_.emplace_back();
      for (uint32_t i = 0; i < offloaded_->rows(); ++i) {
        if (i % kCodeBlock == 0) codes_->read(0, h, i / kCodeBlock, block.data());
        decoded_[h].push_back(decoder_[h].row(block.data(), i % kCodeBlock));
        keys_[h].push_back(offloaded_->row(offloaded_->head(h).keys, i));
        values_[h].push_back(offloaded_->row(offloaded_->head(h).values, i));
      }
    }
    (void)c;
  }
  [[nodiscard]] double capped(double x) const {
    const double cap = double{logits_.softcap};
    return cap > 0 ? cap * std::tanh(x / cap) : x;
  }
  /// Logits of a query head by codes, less what their noise takes.
  [[nodiscard]] std::vector<double> by_code(const float* q, uint32_t h) const {
    const std::vector<double> x = decoder_[h].query(q);
    double square = 0.0;
    for (const double y : x) square += y * y;
    std::vector<double> logits;
    for (const auto& row : decoded_[h]) {
      double product = 0.0;
      for (uint32_t j = 0; j < x.size(); ++j) product += x[j] * row.key[j];
      const double scale = double{logits_.scale}, logit = capped(scale * product);
      double slope = scale;
      if (logits_.softcap > 0.0F) slope *= 1.0 - std::pow(logit / double{logits_.softcap}, 2);
      logits.push_back(logit -
                       std::min(0.5 * slope * slope * square * row.noise, double{kMostNoiseBias}));
    }
    return logits;
  }
  [[nodiscard]] double exact_logit(const float* q, const std::vector<float>& k) const {
    double product = 0.0;
    for (uint32_t j = 0; j < k.size(); ++j) product += double{q[j]} * double{k[j]};
    return capped(double{logits_.scale} * product);
  }
  /// The answer of a query head with these rows exact, and the others by code. exact: a flag for each row.
  [[nodiscard]] Answer answer(uint32_t t, uint32_t head, const std::vector<double>& by_code,
                              const std::vector<char>& exact) const {
    const TurnCase& c = turn();
    const uint32_t d = c.dim, h = head / c.group;
    const float* const q = &q_[(size_t{t} * shape_.q_heads + head) * d];
    std::vector<double> logits;
    for (uint32_t i = 0; i < by_code.size(); ++i)
      logits.push_back(exact[i] != 0 ? exact_logit(q, keys_[h][i]) : by_code[i]);
    for (uint32_t i = 0; i <= t; ++i) {
      const auto at = own_k_.begin() + (size_t{i} * kHeads + h) * d;
      logits.push_back(exact_logit(q, {at, at + d}));
    }
    const double top = *std::max_element(logits.begin(), logits.end());
    std::vector<double> coded(d, 0.0), o(d, 0.0);
    double total = 0.0;
    for (uint32_t i = 0; i < logits.size(); ++i) {
      const double w = std::exp(logits[i] - top);
      total += w;
      for (uint32_t j = 0; j < d; ++j) {
        if (i >= by_code.size()) {
          const size_t row = i - by_code.size();
          o[j] += w * double{own_v_[(row * kHeads + h) * d + j]};
        } else if (exact[i] != 0) {
          o[j] += w * double{values_[h][i][j]};
        } else {
          coded[j] += w * decoded_[h][i].value[j];
        }
      }
    }
    coded = decoder_[h].output(coded);
    if (!sinks_.empty()) total += std::exp(double{sinks_[head]} - top);
    for (uint32_t j = 0; j < d; ++j) o[j] = (o[j] + coded[j]) / total;
    return {o, top + std::log(total)};
  }

  /// Of how many blocks the tile of 128 query rows that begins with row `first` of a KV head attends which: those that
  /// are worth most to the head that gives them most, and the two newest. gap: how much more the last of them is worth
  /// than the next one.
  [[nodiscard]] std::vector<char> choice(uint32_t first, uint32_t h, double& gap) const {
    const TurnCase& c = turn();
    const uint32_t blocks = offloaded_->rows() / kCodeBlock;
    const double unit =
        double{logits_.scale} * (logits_.softcap > 0.0F ? 1.0 : 1.0 / std::log(2.0));
    std::vector<double> worth(blocks, -INFINITY);
    std::vector<std::byte> block(shape_.code.block_bytes());
    for (uint32_t g = 0; g < c.group; ++g) {
      std::vector<double> mean(c.dim, 0.0);
      uint32_t count = 0;
      for (uint32_t row = first; row < std::min(first + 128, c.tokens * c.group); ++row) {
        if (row % c.group != g) continue;
        const size_t head = size_t{row / c.group} * shape_.q_heads + h * c.group + g;
        const std::vector<double> x = decoder_[h].query(&q_[head * c.dim]);
        for (uint32_t j = 0; j < c.dim; ++j) mean[j] += x[j];
        ++count;
      }
      std::vector<double> scores;
      double sum = 0.0;
      for (uint32_t b = 0; b < blocks; ++b) {
        codes_->read(0, h, b, block.data());
        double product = 0.0;
        for (uint32_t j = 0; j < c.dim; ++j) {
          uint16_t bits;
          std::memcpy(&bits, block.data() + shape_.code.key_mean_at() + size_t{j} * 2, 2);
          product += mean[j] / std::max(count, 1U) * double{cpu::f16_to_f32(bits)};
        }
        scores.push_back(unit * product);
        sum += std::exp2(scores.back());
      }
      for (uint32_t b = 0; b < blocks; ++b) {
        worth[b] = std::max(worth[b], scores[b] - std::log2(sum));
      }
    }
    worth[blocks - 1] = worth[blocks - 2] = INFINITY;
    std::vector<double> sorted = worth;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    gap = sorted[chosen_ - 1] - sorted[chosen_];
    std::vector<char> attended;
    for (const double w : worth) attended.push_back(w >= sorted[chosen_ - 1] ? 1 : 0);
    return attended;
  }

  std::optional<ForcedWay> forced_;
  std::mt19937 rng_{11};
  uint32_t chosen_ = 0;  ///< blocks; 0: all
  CodesShape shape_;
  LogitParams logits_;
  std::unique_ptr<Resident> resident_;
  std::unique_ptr<BlockedAttention> blocked_;
  std::unique_ptr<Codes> codes_;
  std::unique_ptr<OffloadedLayer> offloaded_;
  std::vector<float> q_, own_k_, own_v_, sinks_, out_, lse_;
  std::vector<DecodedCodes> decoder_;
  std::vector<std::vector<DecodedCodes::Row>> decoded_;
  std::vector<std::vector<std::vector<float>>> keys_, values_;
  cudaStream_t stream_ = nullptr;
  Uploads upload;
};

TEST_P(CodedTurnTest, CodesOfFlatHeadsEqualDoublePrecision) {
  const TurnCase& c = turn();
  make(20, 0.2F, false);
  sinks_.assign(shape_.q_heads, 1.5F);
  sinks_[0] = -INFINITY;
  const CodedAttention end = attend();
  EXPECT_EQ(end.rows, 0U) << "no row of so many weighs much";
  EXPECT_EQ(end.passes, 1U);
  decode();
  const std::vector<char> none(offloaded_->rows(), 0);
  double worst = 0.0, worst_sum = 0.0;
  // All rows of a tile of queries, and of the tokens some.
  for (uint32_t t = 0; t < c.tokens; t += t < 4 ? 1 : 5) {
    for (uint32_t head = 0; head < shape_.q_heads; ++head) {
      const size_t at = size_t{t} * shape_.q_heads + head;
      const Answer want = answer(t, head, by_code(&q_[at * c.dim], head / c.group), none);
      raise(worst, relative_error(&out_[at * c.dim], want.o));
      raise(worst_sum, std::abs(double{lse_[at]} - want.lse));
    }
  }
  EXPECT_LT(worst, 5e-3);
  EXPECT_LT(worst_sum, 2e-3);
}

TEST_P(CodedTurnTest, ChosenBlocksAreThoseWhoseMeansWeighMost) {
  const TurnCase& c = turn();
  if (c.dim == 80 || c.dim == 96) GTEST_SKIP() << "all blocks are attended";
  chosen_ = 9;
  make(28, 0.15F, false, 2.0F);
  const CodedAttention end = attend();
  EXPECT_EQ(end.rows, 0U) << "no row of so many weighs much";
  EXPECT_EQ(end.passes, 1U);
  decode();
  const std::vector<char> none(offloaded_->rows(), 0);
  double worst = 0.0, worst_sum = 0.0;
  uint32_t clear = 0, tiles = 0, others = 0;
  for (uint32_t h = 0; h < kHeads; ++h) {
    for (uint32_t first = 0; first < c.tokens * c.group; first += 128, ++tiles) {
      double gap = 0.0;
      const std::vector<char> attended = choice(first, h, gap);
      if (gap < 1e-4) continue;  // rounding may choose either
      ++clear;
      for (uint32_t b = 0; b + chosen_ < attended.size(); ++b) others += attended[b] != 0 ? 1 : 0;
      for (uint32_t row = first; row < std::min(first + 128, c.tokens * c.group); row += 7) {
        const uint32_t head = h * c.group + row % c.group;
        const size_t at = size_t{row / c.group} * shape_.q_heads + head;
        std::vector<double> logits = by_code(&q_[at * c.dim], h);
        for (uint32_t i = 0; i < logits.size(); ++i) {
          if (attended[i / kCodeBlock] == 0) logits[i] = -INFINITY;
        }
        const Answer want = answer(row / c.group, head, logits, none);
        raise(worst, relative_error(&out_[at * c.dim], want.o));
        raise(worst_sum, std::abs(double{lse_[at]} - want.lse));
      }
    }
  }
  EXPECT_GE(2 * clear, tiles) << "of so many tiles it is clear which blocks they choose";
  EXPECT_GT(others, 0U) << "blocks that are not the newest";
  EXPECT_LT(worst, 5e-3);
  EXPECT_LT(worst_sum, 2e-3);
}

TEST_P(CodedTurnTest, ErrorsAreNoLargerThanThoseOfSingleSteps) {
  const TurnCase& c = turn();
  make(5, 2.0F, true);
  const CodedAttention end = attend();
  EXPECT_GT(end.rows, 0U);
  decode();
  const std::vector<char> all(offloaded_->rows(), 1);
  double errors = 0.0, of_steps = 0.0;
  uint32_t count = 0;
  for (uint32_t t = 0; t < c.tokens; t += t < 2 || t + 2 > c.tokens ? 1 : 3) {
    for (uint32_t h = 0; h < kHeads; ++h) {
      // A single step reads the 16 rows that weigh most in some head of the group.
      std::vector<std::vector<double>> logits;
      std::vector<double> weights(offloaded_->rows(), -INFINITY);
      for (uint32_t g = 0; g < c.group; ++g) {
        logits.push_back(by_code(&q_[(size_t{t} * shape_.q_heads + h * c.group + g) * c.dim], h));
        double sum = 0.0;
        for (const double x : logits[g]) sum += std::exp(x);
        for (uint32_t i = 0; i < weights.size(); ++i)
          weights[i] = std::max(weights[i], logits[g][i] - std::log(sum));
      }
      std::vector<double> sorted = weights;
      std::sort(sorted.begin(), sorted.end(), std::greater<>());
      std::vector<char> chosen;
      for (const double w : weights) chosen.push_back(w >= sorted[15] ? 1 : 0);
      for (uint32_t g = 0; g < c.group; ++g, ++count) {
        const uint32_t head = h * c.group + g;
        const size_t at = size_t{t} * shape_.q_heads + head;
        const Answer truth = answer(t, head, logits[g], all);
        const Answer step = answer(t, head, logits[g], chosen);
        const std::vector<float> by_step(step.o.begin(), step.o.end());
        errors += std::pow(relative_error(&out_[at * c.dim], truth.o), 2);
        of_steps += std::pow(relative_error(by_step.data(), truth.o), 2);
      }
    }
  }
  EXPECT_LT(std::sqrt(errors / count), 1.05 * std::sqrt(of_steps / count) + 2e-3);
}

std::string name_of_turn(const testing::TestParamInfo<std::tuple<TurnCase, Way>>& info) {
  const auto& [c, way] = info.param;
  return "dim" + std::to_string(c.dim) + "bits" + std::to_string(c.bits) + "group" +
         std::to_string(c.group) + "tokens" + std::to_string(c.tokens) + dtype_name(c.dtype) +
         (c.softcap > 0.0F ? "capped" : "") + (c.in_int8 ? "int8" : "") + name_of(way);
}
INSTANTIATE_TEST_SUITE_P(
    Shapes, CodedTurnTest,
    testing::Combine(testing::Values(TurnCase{64, 2, 1, 130}, TurnCase{64, 4, 5, 13},
                                     TurnCase{80, 4, 3, 43, DType::bf16}, TurnCase{80, 2, 2, 16},
                                     TurnCase{96, 2, 2, 13, DType::f16, 20.0F},
                                     TurnCase{96, 4, 7, 19}, TurnCase{128, 4, 4, 33},
                                     TurnCase{128, 2, 8, 17, DType::bf16, 15.0F},
                                     TurnCase{128, 2, 16, 13},
                                     TurnCase{128, 4, 4, 20, DType::f16, 0.0F, true},
                                     TurnCase{256, 4, 6, 22}, TurnCase{256, 2, 12, 13, DType::bf16},
                                     TurnCase{256, 4, 2, 70, DType::f16, 30.0F}),
                     testing::Values(Way::general, Way::hopper)),
    name_of_turn);
INSTANTIATE_TEST_SUITE_P(
    Ahead, CodedTurnTest,
    testing::Combine(testing::Values(TurnCase{64, 2, 1, 130}, TurnCase{96, 4, 7, 19},
                                     TurnCase{128, 4, 4, 33},
                                     TurnCase{128, 2, 8, 17, DType::bf16, 15.0F},
                                     TurnCase{256, 4, 6, 22}),
                     testing::Values(Way::ahead)),
    name_of_turn);

/// Queries of many tokens over heads whose logits spread as tests/index/sharp_heads.h says.
class HeadsInDoubt : public testing::TestWithParam<Way> {};

TEST_P(HeadsInDoubt, AreRead) {
  KEYHOLE_NEEDS_GPU();
  const ForcedWay forced(GetParam());
  if (!runs_here(GetParam())) GTEST_SKIP() << "kernels of another device run here";
  constexpr double kDeviations[] = {0.5, 1.0, 2.0, 4.0, 8.0, 20.0, 60.0, 500.0};
  constexpr uint32_t kTokens = 14;
  uint64_t doubted = 0;
  uint32_t sharp = 0, refused = 0, number = 0;
  for (const uint32_t dim : {64U, 128U, 256U}) {
    for (const Bias bias : {Bias::none, Bias::all, Bias::few, Bias::turned}) {
      const uint32_t bits = number % 2 == 0 ? 2 : 4, group = std::vector{1U, 4U, 6U}[number % 3];
      const float softcap = number % 4 == 3 ? 30.0F : 0.0F;
      const float norm = std::vector{1.0F, 30.0F, 1000.0F}[number % 3];
      std::vector<SharpHead> heads;
      for (uint32_t kv = 0; kv < 2; ++kv)
        heads.emplace_back(SharpShape{dim, 2048, bias, norm, number % 2 == 0}, number * 10 + kv);
      SharpLayer layer(heads, {bits, group, softcap});
      CodesStep& s = layer.step();
      ResidentShape r = small_shape(dim, DType::f16, group);
      const auto resident = make_cuda_resident(r, {});
      const auto blocked = make_cuda_blocked(*resident, {r.q_heads, 2, dim, DType::f16});
      CodedRows rows;
      rows.code = s.shape;
      rows.kv_heads = 2;
      rows.blocks = s.block_capacity;
      rows.blocks_at = s.blocks;
      rows.block_stride = s.block_stride;
      rows.head_stride = s.head_stride;
      rows.key_scale = s.key_scale;
      rows.value_scale = s.value_scale;
      rows.figures = s.doubt.figures;
      rows.keys = s.keys;
      rows.values = s.values;
      rows.kv_head_stride = s.kv_head_stride;
      rows.row_bytes = static_cast<uint32_t>(s.row_stride);
      for (size_t i = 0; i < std::size(kDeviations); ++i) {
        SCOPED_TRACE("d " + std::to_string(dim) + ", bias " + bias_name(bias) + ", " +
                     std::to_string(bits) + " bits, group " + std::to_string(group) +
                     ", deviation " + std::to_string(kDeviations[i]));
        const size_t token = size_t{2} * group * dim;
        std::vector<float> q(kTokens * token);
        for (uint32_t kv = 0; kv < 2; ++kv) {
          const auto own =
              layer.head(kv).queries(kTokens * group, kDeviations[kv == 0 ? i : i / 2]);
          for (uint32_t n = 0; n < kTokens * group; ++n) {
            std::copy_n(own.begin() + n * dim, dim,
                        q.begin() + n / group * token + (kv * group + n % group) * dim);
          }
        }
        for (float& x : q) x = rounded(x, DType::f16);
        const DeviceVector<float> queries(q), zeros(std::vector<float>(kTokens * 2 * dim)),
            out(std::vector<float>(q.size(), NAN));
        const auto tensor = [&](const DeviceVector<float>& x, uint32_t of) {
          return dense_tensor(reinterpret_cast<std::byte*>(x.get()), kTokens, of, dim, DType::f32,
                              Memory::device);
        };
        // New tokens that nobody sees.
        const std::vector<uint64_t> mask(kTokens, 0);
        blocked->begin(tensor(queries, 2 * group), {s.logits}, nullptr);
        blocked->attend_new(tensor(zeros, 2), tensor(zeros, 2), mask.data(), nullptr);
        const CodedAttention end = blocked->attend_codes(rows, nullptr, {});
        doubted += end.doubted;
        if (end.refused) {
          ++refused;
          continue;
        }
        blocked->finish(tensor(out, 2 * group), nullptr, nullptr);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        const std::vector<float> seen = out.read();
        for (uint32_t n = 0; n < kTokens * 2 * group; ++n) {
          const SharpTruth truth(layer.head(n % (2 * group) / group), &q[size_t{n} * dim],
                                 s.logits);
          const double error = truth.error(&seen[size_t{n} * dim]);
          if (truth.is_sharp()) ++sharp;
          ASSERT_LE(error, truth.is_sharp() ? allowed_error(bits) : allowed_elsewhere(bits, dim))
              << "token " << n / (2 * group) << ", head " << n % (2 * group);
        }
      }
      ++number;
    }
  }
  std::printf("%u sharp, %llu in doubt, %u turns of %zu refused\n", sharp,
              static_cast<unsigned long long>(doubted), refused, number * std::size(kDeviations));
  EXPECT_GT(sharp, 1000U);
  EXPECT_GT(doubted, 100U);
  EXPECT_LT(refused, 12U);
}
INSTANTIATE_TEST_SUITE_P(Ways, HeadsInDoubt, testing::Values(Way::general, Way::ahead, Way::hopper),
                         [](const auto& way) { return std::string(name_of(way.param)); });

}  // namespace
}  // namespace keyhole::gpu::test

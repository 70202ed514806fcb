// Steps of several tokens over codes, and drafts of which some stay, against double precision: sink and window as masks
// say, offloaded tokens by their codes. The exact rows are 0: which ones several tokens choose together, other tests
// look at (a group of as many query heads, codes_test.cpp).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <random>
#include <string>
#include <thread>

#include "tests/gpu/codes_fixture.h"
#include "tests/gpu/stream_fixture.h"

namespace keyhole::gpu::test {
namespace {

struct TokensSetting {
  uint32_t dim, bits, group;
  DType dtype, caller;
  float softcap = 0.0F;
  Signal signal = Signal::device_wait;
  float longer = 1.0F;  ///< values of the last block than those that the balance is learned from
};

class TokensSession {
 public:
  TokensSession(const TokensSetting& set, uint32_t seed) : set_(set), rng_(seed) {
    shape_ = small_shape(set.dim, set.dtype, set.group);
    shape_.window_capacity = 400;
    shape_.window = 200;
    shape_.logits.scale *= 1.5F;
    shape_.logits.softcap = set.softcap;
    codes_shape_.layers = shape_.layers;
    codes_shape_.q_heads = shape_.q_heads;
    codes_shape_.kv_heads = shape_.kv_heads;
    codes_shape_.code = {set.dim, set.bits, set.bits};
    codes_shape_.dtype = set.dtype;
    codes_shape_.blocks = 4;
    codes_shape_.logits = shape_.logits;
    CudaConfig config;
    config.probe_signal = false;
    config.signal = set.signal;
    resident_ = make_cuda_resident(shape_, config);
    codes_ = make_cuda_codes(*resident_, codes_shape_);
    row_ = size_t{shape_.kv_heads} * shape_.head_dim;
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      truth_.emplace_back(shape_);
      rows_.push_back(std::make_unique<OffloadedLayer>(codes_shape_, 4 * kCodeBlock));
    }
  }

  /// `sink` and `window` tokens, and two blocks of offloaded ones if the sink is full.
  void prefill(uint32_t sink, uint32_t window) {
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const auto tokens = random_tokens(rng_, shape_, sink + window);
      const Rows rows = rows_of(tokens, shape_.dtype);
      const size_t skip = sink * row_ * dtype_size(shape_.dtype);
      resident_->append_sink(layer, rows.k.data(), rows.v.data(), sink);
      resident_->append_window(layer, rows.k.data() + skip, rows.v.data() + skip, window);
      truth_[layer].sink.assign(tokens.begin(), tokens.begin() + sink);
      truth_[layer].window.assign(tokens.begin() + sink, tokens.end());
      OffloadedLayer& offloaded = *rows_[layer];
      for (uint32_t i = 0; i < 2 * kCodeBlock; ++i) {
        auto v = random_floats(rng_, row_, 2.0F);
        for (float& x : v) x += 1.0F;
        if (i >= kCodeBlock) {
          for (float& x : v) x *= set_.longer;
        }
        offloaded.append(random_floats(rng_, row_), v);
        if (i + 1 == (set_.longer == 1.0F ? 2 : 1) * kCodeBlock) {
          offloaded.learn(random_floats(rng_, row_ * set_.group));
        }
      }
      offloaded.cut(sink == shape_.sink ? 2 * kCodeBlock : 0);
      offloaded.tell(*codes_, layer);
      offloaded.extend();
      codes_->encode(layer, 0, sink == shape_.sink ? 2 : 0, stream_.get());
    }
  }
  /// The largest value factor of the first layer's codes, and whether fp16 holds all of them.
  [[nodiscard]] std::pair<float, bool> largest_factor() const {
    float most = 0.0F;
    bool is_known = true;
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      for (uint32_t b = 0; b < 2; ++b) {
        const index::CodeRun run = rows_[0]->codes(h).run(b);
        const index::CodeRunReader reader(codes_shape_.code, run);
        for (uint32_t i = 0; i < kCodeBlock; ++i) most = std::max(most, reader.value_factor(i));
        is_known = is_known && run.noise < kUnknownNoise;
      }
    }
    return {most, is_known};
  }
  [[nodiscard]] uint32_t most() const { return codes_->most_tokens(0); }

  /// n tokens, of which `before` drafts are there already; sees(i, j): whether token i attends to draft j.
  template <class Sees>
  void step(uint32_t layer, uint32_t n, uint32_t before, const Sees& sees) {
    SCOPED_TRACE(std::to_string(n) + " tokens after " + std::to_string(before) + " drafts, layer " +
                 std::to_string(layer));
    const uint32_t d = shape_.head_dim;
    const auto random = [&](size_t count) {
      auto x = random_floats(rng_, count);
      for (float& y : x) y = rounded(y, set_.caller);
      return x;
    };
    const size_t q_row = row_ * set_.group;
    const auto q = random(n * q_row), k = random(n * row_), v = random(n * row_);
    std::vector<DeviceBuffer> buffers;
    // A gap behind every token.
    const auto tokens = [&](const std::vector<float>& x, size_t row, DType dtype) {
      std::vector<float> padded;
      for (uint32_t i = 0; i < n; ++i) {
        padded.insert(padded.end(), x.begin() + i * row, x.begin() + (i + 1) * row);
        padded.insert(padded.end(), 8, NAN);
      }
      const auto bytes = as_bytes(padded, dtype);
      buffers.emplace_back(bytes.size());
      check(cudaMemcpy(buffers.back().data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice),
            "copy");
      TensorOut rows = dense_tensor(buffers.back().data(), n, static_cast<uint32_t>(row / d), d,
                                    dtype, Memory::device);
      rows.token_stride = static_cast<ptrdiff_t>(row + 8);
      return rows;
    };
    ManyTokens t;
    t.q = tokens(q, q_row, set_.caller);
    t.k = tokens(k, row_, set_.caller);
    t.v = tokens(v, row_, set_.caller);
    t.out = tokens(std::vector<float>(q.size(), NAN), q_row, DType::f32);
    DeviceBuffer lse(size_t{n} * shape_.q_heads * sizeof(float));
    t.lse = lse.as<float>();
    t.drafts = before + n;
    for (uint32_t i = 0; i < n; ++i) {
      for (uint32_t j = 0; j <= before + i; ++j) {
        if (sees(before + i, j)) t.sees[i] |= uint64_t{1} << j;
      }
    }
    // What was copied on the default stream, for which the session's does not wait.
    check(cudaDeviceSynchronize(), "setting up");
    steps().step_tokens(layer, t, *codes_, stream_.get());

    // The host takes what is published.
    Published published;
    ASSERT_TRUE(steps().await(layer, ++sequences_[layer], 100, 20'000'000, stop_, published));
    const size_t token_bytes = row_ * dtype_size(shape_.dtype);
    std::vector<std::byte> gone(shape_.window_capacity * token_bytes);
    for (uint32_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < q_row; ++j) ASSERT_EQ(published.q[i * q_row + j], q[i * q_row + j]);
      Token token;
      for (size_t j = 0; j < row_; ++j) {
        token.k.push_back(rounded(k[i * row_ + j], shape_.dtype));
        token.v.push_back(rounded(v[i * row_ + j], shape_.dtype));
        ASSERT_EQ(get(published.k, i * row_ + j, shape_.dtype), token.k.back());
        ASSERT_EQ(get(published.v, i * row_ + j, shape_.dtype), token.v.back());
      }
      Published one{published.q, published.k + i * token_bytes, published.v + i * token_bytes};
      ASSERT_EQ(steps().update_host_copy(layer, one, gone.data(), gone.data()), 0U);
      ASSERT_TRUE(truth_[layer].take(token).empty());
    }
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) steps().deliver(layer, h, sequences_[layer]);
    steps().synchronize(stream_.get());
    std::string text;
    ASSERT_EQ(steps().failure(text), Status::ok) << text;

    std::vector<float> out(n * (q_row + 8)), sums(size_t{n} * shape_.q_heads);
    check(cudaMemcpy(out.data(), t.out.data, out.size() * 4, cudaMemcpyDeviceToHost), "out");
    check(cudaMemcpy(sums.data(), t.lse, sums.size() * 4, cudaMemcpyDeviceToHost), "lse");
    const bool coarse = set_.dtype == DType::bf16 || set_.caller == DType::bf16;
    const double allowed = coarse ? 1e-2 : 4e-3;
    for (uint32_t i = 0; i < n; ++i) {
      const std::vector<float> own(q.begin() + i * q_row, q.begin() + (i + 1) * q_row);
      Truth visible(shape_);
      const Truth& all = truth_[layer];
      const size_t held = all.sink.size() + all.window.size(), first = held - t.drafts;
      for (size_t j = 0; j < held; ++j) {
        if (j >= first && (t.sees[i] >> (j - first) & 1U) == 0) continue;
        visible.window.push_back(j < all.sink.size() ? all.sink[j]
                                                     : all.window[j - all.sink.size()]);
      }
      std::vector<bool> close;
      const States want = merged(visible.attend(own), rows_[layer]->attend(own, close));
      for (uint32_t h = 0; h < shape_.q_heads; ++h) {
        const auto at = out.begin() + i * (q_row + 8) + h * d;
        const States head{{want.o.begin() + h * d, want.o.begin() + (h + 1) * d}, {want.lse[h]}};
        ASSERT_LT(worst_error({at, at + d}, head), allowed) << "token " << i << ", head " << h;
        ASSERT_LT(std::abs(double{sums[size_t{i} * shape_.q_heads + h]} - want.lse[h]),
                  2 * allowed);
      }
    }
  }

  void keep(uint32_t of, const std::vector<uint32_t>& kept) {
    std::vector<uint32_t> layers;
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) layers.push_back(layer);
    steps().keep_newest(layers, of, kept, stream_.get());
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      steps().keep_newest_of_copy(layer, of, kept);
      Truth& t = truth_[layer];
      std::vector<Token> newest;
      for (uint32_t i = 0; i < of; ++i) {
        auto& from = t.window.empty() ? t.sink : t.window;
        newest.insert(newest.begin(), from.back());
        from.pop_back();
      }
      for (const uint32_t i : kept) (void)t.take(newest[i]);
      ASSERT_EQ(resident_->sink_count(layer), t.sink.size());
      ASSERT_EQ(resident_->window_count(layer), t.window.size());
      const Rows want = rows_of({t.sink.begin(), t.sink.end()}, shape_.dtype);
      const Rows more = rows_of({t.window.begin(), t.window.end()}, shape_.dtype);
      std::vector<std::byte> k((t.sink.size() + t.window.size()) * row_ * dtype_size(shape_.dtype)),
          v(k.size());
      resident_->read(layer, k.data(), v.data());
      ASSERT_TRUE(std::equal(want.k.begin(), want.k.end(), k.begin()));
      ASSERT_TRUE(std::equal(more.k.begin(), more.k.end(),
                             k.begin() + static_cast<std::ptrdiff_t>(want.k.size())));
      ASSERT_TRUE(std::equal(more.v.begin(), more.v.end(),
                             v.begin() + static_cast<std::ptrdiff_t>(want.v.size())));
    }
  }

  [[nodiscard]] StreamSteps& steps() { return *resident_->stream_steps(); }
  [[nodiscard]] uint32_t layers() const { return shape_.layers; }
  [[nodiscard]] Codes& codes() { return *codes_; }
  [[nodiscard]] cudaStream_t stream() const { return stream_.get(); }

 private:
  TokensSetting set_;
  std::mt19937 rng_;
  ResidentShape shape_;
  CodesShape codes_shape_;
  size_t row_ = 0;
  OwnedStream stream_;
  std::unique_ptr<Resident> resident_;
  std::unique_ptr<Codes> codes_;
  std::vector<Truth> truth_;
  std::vector<std::unique_ptr<OffloadedLayer>> rows_;
  std::array<uint32_t, 2> sequences_{};
  std::atomic<bool> stop_{false};
};

const auto kCausal = [](uint32_t, uint32_t) { return true; };
/// Two branches: even drafts, and odd ones.
const auto kTree = [](uint32_t i, uint32_t j) { return i % 2 == j % 2; };

void run(const TokensSetting& set, uint32_t sink, uint32_t window, uint32_t seed = 5) {
  SCOPED_TRACE("d " + std::to_string(set.dim) + ", bits " + std::to_string(set.bits) + ", group " +
               std::to_string(set.group));
  TokensSession s(set, seed);
  s.prefill(sink, window);
  const uint32_t most = s.most();
  const uint32_t rows = set.dim <= 256 ? kMostStepRows : 32;
  EXPECT_EQ(most, std::min(most_step_tokens(set.group), rows / set.group));
  for (uint32_t n = 1; n <= most; ++n) {
    for (uint32_t layer = 0; layer < s.layers(); ++layer) s.step(layer, n, 0, kCausal);
    s.keep(n, n == 1 ? std::vector<uint32_t>{0} : std::vector<uint32_t>{});
    if (testing::Test::HasFatalFailure()) return;
  }
  // Three steps of one tree, of which a branch stays.
  for (uint32_t layer = 0; layer < s.layers(); ++layer) {
    for (uint32_t i = 0; i < 3; ++i) s.step(layer, most, i * most, kTree);
  }
  std::vector<uint32_t> branch;
  for (uint32_t j = 1; j < 3 * most; j += 2) branch.push_back(j);
  s.keep(3 * most, branch);
  for (uint32_t layer = 0; layer < s.layers(); ++layer) s.step(layer, most, 0, kCausal);
}

TEST(StepsOfTokens, AnswerAsEachTokenAlone) {
  KEYHOLE_NEEDS_GPU();
  for (const uint32_t group : {1U, 2U, 3U, 4U, 7U, 8U, 16U}) {
    run({128, 2, group, DType::f16, DType::f16}, 5, 120);
  }
  run({64, 4, 4, DType::bf16, DType::bf16}, 5, 90);
  run({80, 4, 2, DType::f32, DType::f32}, 5, 30);
  run({96, 4, 4, DType::f16, DType::f32, 15.0F}, 5, 30);
  run({128, 4, 4, DType::f16, DType::f32}, 5, 30);
  run({256, 2, 8, DType::f16, DType::f16}, 5, 30);
  run({256, 4, 6, DType::f16, DType::f16}, 5, 30);
  run({256, 2, 12, DType::f16, DType::f16}, 5, 30);
  run({64, 4, 8, DType::f16, DType::f32, 15.0F}, 5, 30);
  run({64, 2, 16, DType::f16, DType::f16}, 5, 30);
  run({64, 4, 6, DType::f32, DType::f32}, 5, 130);
  run({80, 2, 5, DType::f16, DType::f16}, 5, 30);
  run({96, 2, 6, DType::f16, DType::f16, 15.0F}, 5, 30);
  run({128, 2, 4, DType::f16, DType::f16, 0.0F, Signal::host_launch}, 5, 30);
}

TEST(StepsOfTokens, OfHeadsOf512AnswerAsEachTokenAlone) {
  KEYHOLE_NEEDS_GPU();
  run({512, 4, 8, DType::f16, DType::f16}, 5, 30);
  run({512, 2, 4, DType::bf16, DType::f32}, 5, 30);
  run({512, 4, 16, DType::f16, DType::f16}, 5, 30);
}

// Sums of weights times value factors are numbers of fp16 as long as the encoder lets factors be.
TEST(StepsOfTokens, OfValuesAsLongAsFactorsMayBe) {
  KEYHOLE_NEEDS_GPU();
  for (const uint32_t bits : {2U, 4U}) {
    for (const uint32_t dim : {64U, 80U, 128U, 256U}) {
      for (const float longer : {bits == 2 ? 1400.0F : 4150.0F, 6500.0F}) {
        SCOPED_TRACE("values " + std::to_string(longer) + " times as long");
        const TokensSetting set{dim,   bits, 4, DType::f16, DType::f32, 0.0F, Signal::device_wait,
                                longer};
        run(set, 5, 30);
        TokensSession s(set, 5);
        s.prefill(5, 30);
        const auto [factor, is_known] = s.largest_factor();
        EXPECT_GT(factor, 0.5F * kMostValueFactor);
        EXPECT_EQ(is_known, longer != 6500.0F);
        EXPECT_LE(factor, kMostValueFactor);
        if (HasFatalFailure()) return;
      }
    }
  }
}

/// What the shapes above leave out: all of them would take minutes.
TEST(StepsOfTokens, OfDrawnShapesAnswerAsEachTokenAlone) {
  KEYHOLE_NEEDS_GPU();
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  const auto one_of = [&](const auto& values) { return values[rng() % std::size(values)]; };
  constexpr uint32_t kDims[] = {64, 80, 96, 128, 256};
  constexpr DType kTypes[] = {DType::f16, DType::bf16, DType::f32};
  constexpr uint32_t kWindows[] = {30, 90, 130};
  for (uint32_t i = 0; i < 12; ++i) {
    const auto group = static_cast<uint32_t>(1 + rng() % 16);
    TokensSetting set{one_of(kDims), rng() % 2 == 0 ? 2U : 4U, group, one_of(kTypes),
                      one_of(kTypes)};
    set.softcap = rng() % 4 == 0 ? 15.0F : 0.0F;
    SCOPED_TRACE("shape " + std::to_string(i));
    run(set, 5, one_of(kWindows), static_cast<uint32_t>(rng()));
    if (HasFailure()) return;
  }
}

TEST(StepsOfTokens, BeginInTheSink) {
  KEYHOLE_NEEDS_GPU();
  run({128, 2, 4, DType::f16, DType::f16}, 2, 0);
}

TEST(StepsOfTokens, RefuseTooMany) {
  KEYHOLE_NEEDS_GPU();
  TokensSession s({128, 2, 4, DType::f16, DType::f16}, 5);
  s.prefill(5, 20);
  DeviceBuffer rows(size_t{1} << 20);
  rows.clear();
  ManyTokens t;
  t.out = dense_tensor(rows.data(), 1, 8, 128, DType::f16, Memory::device);
  t.q = t.k = t.v = t.out;
  for (const auto& [tokens, drafts] : {std::pair{0U, 0U}, {9U, 9U}, {4U, 3U}, {4U, 65U}}) {
    t.q.tokens = tokens;
    t.drafts = drafts;
    EXPECT_THROW(s.steps().step_tokens(0, t, s.codes(), s.stream()), Error)
        << tokens << " " << drafts;
  }
}

}  // namespace
}  // namespace keyhole::gpu::test

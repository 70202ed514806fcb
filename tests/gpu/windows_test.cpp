// Sliding layers on a CUDA device (gpu/windows.h) beside attention in double precision over exactly their newest
// tokens.
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "gpu/windows.h"
#include "tests/captured_graph.h"
#include "tests/gpu/stream_fixture.h"
#include "tests/scoped_variable.h"

namespace keyhole::gpu::test {
namespace {

class CudaWindowsTest : public testing::Test {
 protected:
  void SetUp() override { KEYHOLE_NEEDS_GPU(); }

  void make(uint32_t dim, DType dtype, uint32_t group, uint32_t kv_heads,
            std::vector<WindowsShape::Layer> layers, bool sinks) {
    resident_shape_ = small_shape(dim, dtype, group, kv_heads);
    shape_ = {kv_heads * group, kv_heads, dim, dtype, std::move(layers), {}};
    for (WindowsShape::Layer& layer : shape_.layers) {
      layer.logits.scale *= resident_shape_.logits.scale;
    }
    if (sinks) shape_.sinks = random_floats(rng_, shape_.layers.size() * shape_.q_heads, 3.0F);
    windows_.reset();
    resident_ = make_cuda_resident(resident_shape_, {});
    windows_ = make_cuda_windows(*resident_, shape_);
    tokens_.assign(shape_.layers.size(), {});
    first_.assign(shape_.layers.size(), 0);
  }
  /// What the layer holds, and attends.
  States truth(uint32_t layer, const std::vector<float>& q, const SeenDrafts& drafts = {}) const {
    ResidentShape s = resident_shape_;
    s.logits = shape_.layers[layer].logits;
    Truth all(s);
    const auto& tokens = tokens_[layer];
    const size_t before = tokens.size() - drafts.drafts;
    for (size_t i = tokens.size(); i-- > 0 && all.window.size() < shape_.layers[layer].window;) {
      const bool other =
          drafts.drafts != 0 && i >= before && (drafts.sees >> (i - before) & 1) == 0;
      if (!other) all.window.push_back(tokens[i]);
    }
    States state = all.attend(q);
    if (shape_.sinks.empty()) return state;
    States sinks{std::vector<double>(state.o.size()), {}};
    const float* own = shape_.sinks.data() + size_t{layer} * shape_.q_heads;
    sinks.lse.assign(own, own + shape_.q_heads);
    return merged(state, sinks);
  }
  void take(uint32_t layer, const Token& token) {
    auto& tokens = tokens_[layer];
    tokens.push_back(token);
    if (tokens.size() <= shape_.layers[layer].slots) return;
    tokens.pop_front();
    first_[layer] += 1;
  }
  void fill(uint32_t layer, uint32_t first, uint32_t n) {
    const auto tokens = random_tokens(rng_, resident_shape_, n);
    const Rows rows = rows_of(tokens, shape_.dtype);
    windows_->fill(layer, first, n, rows.k.data(), rows.v.data());
    tokens_[layer].assign(tokens.begin(), tokens.end());
    first_[layer] = first;
  }
  /// Tokens of a prompt in device memory.
  void append(uint32_t layer, uint32_t n, DType dtype, uint32_t gap) {
    std::vector<Token> tokens = random_tokens(rng_, resident_shape_, n);
    DeviceArray k(n * shape_.kv_heads, shape_.head_dim, dtype, gap),
        v(n * shape_.kv_heads, shape_.head_dim, dtype, gap);
    std::vector<float> keys, values;
    for (const Token& t : tokens) {
      keys.insert(keys.end(), t.k.begin(), t.k.end());
      values.insert(values.end(), t.v.begin(), t.v.end());
    }
    k.write(keys);
    v.write(values);
    check(cudaDeviceSynchronize(), "the tensors");
    const auto rows = [&](const DeviceArray& array) {
      TensorView r = array.rows();
      r.heads = shape_.kv_heads;
      r.tokens = n;
      r.token_stride = r.head_stride * shape_.kv_heads;
      return r;
    };
    const auto held = static_cast<uint32_t>(tokens_[layer].size());
    const uint32_t first = first_[layer] + held;
    ASSERT_TRUE(windows_->are_finite(0, rows(k), shape_.dtype, stream_.get()));
    windows_->append(layer, first, std::min(held + n, shape_.layers[layer].slots), rows(k), rows(v),
                     stream_.get());
    for (Token& t : tokens) {
      for (auto* x : {&t.k, &t.v}) {
        for (float& y : *x) y = rounded(rounded(y, dtype), shape_.dtype);
      }
      take(layer, t);
    }
    keys[keys.size() / 2] = NAN;
    k.write(keys);
    check(cudaDeviceSynchronize(), "a key that is no number");  // the stream waits for no copy
    EXPECT_FALSE(windows_->are_finite(0, rows(k), shape_.dtype, stream_.get()));
  }
  /// A step with new tensors, checked.
  void step(uint32_t layer, bool appends, bool halves, DType dtype, uint32_t gap,
            const SeenDrafts& drafts = {}) {
    LayerTensors t(resident_shape_, dtype, gap);
    const auto size = size_t{shape_.q_heads} * shape_.head_dim;
    std::vector<float> q = random_floats(rng_, size);
    for (float& x : q) x = rounded(x, dtype);
    t.q.write(q);
    if (appends) {
      Token token = random_tokens(rng_, resident_shape_, 1).front();
      t.k.write(token.k);
      t.v.write(token.v);
      for (auto* rows : {&token.k, &token.v}) {
        for (float& x : *rows) x = rounded(rounded(x, dtype), shape_.dtype);
      }
      take(layer, token);
    }
    const TensorView rq = t.q.rows(), rk = t.k.rows(), rv = t.v.rows();
    const TensorOut out = t.out.rows();
    const TensorView *k = appends ? &rk : nullptr, *v = appends ? &rv : nullptr;
    check(cudaDeviceSynchronize(), "the tensors");
    if (halves) {
      windows_->begin(layer, rq, k, v, stream_.get());
      windows_->end(layer, out, t.lse.floats(), stream_.get());
    } else {
      windows_->step(layer, rq, k, v, drafts, out, t.lse.floats(), stream_.get());
    }
    check(cudaStreamSynchronize(stream_.get()), "a step");
    const States expected = truth(layer, q, drafts);
    const double tolerance = dtype == DType::bf16         ? 1e-2
                             : dtype == DType::f16        ? 2e-3
                             : shape_.dtype == DType::f32 ? 2e-4
                                                          : 1e-3;
    ASSERT_LT(worst_error(t.out.read(), expected), tolerance)
        << "layer " << layer << ", " << tokens_[layer].size() << " tokens";
    ASSERT_LT(worst_lse(t.lse.read(), expected), tolerance);
  }
  void expect_read(uint32_t layer) const {
    const auto n = static_cast<uint32_t>(tokens_[layer].size());
    const Rows rows = rows_of({tokens_[layer].begin(), tokens_[layer].end()}, shape_.dtype);
    std::vector<std::byte> k(rows.k.size()), v(k.size());
    windows_->read(layer, first_[layer], n, k.data(), v.data());
    EXPECT_TRUE(k == rows.k && v == rows.v) << "layer " << layer;
  }
  void expect_no_failure() {
    std::string text;
    EXPECT_EQ(windows_->failure(text), Status::ok) << text;
  }

  std::mt19937 rng_{7};
  OwnedStream stream_;
  ResidentShape resident_shape_;
  WindowsShape shape_;
  std::unique_ptr<Resident> resident_;
  std::unique_ptr<Windows> windows_;
  std::vector<std::deque<Token>> tokens_;
  std::vector<uint32_t> first_;
};

TEST_F(CudaWindowsTest, AttendTheirNewestTokensInEveryShape) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    // Heads of 512 also in the 99 KiB of shared memory of GPUs for desktops.
    for (const auto& [dim, is_small] : {std::pair{64U, false},
                                        {80U, false},
                                        {128U, false},
                                        {256U, false},
                                        {512U, false},
                                        {512U, true}}) {
      std::optional<keyhole::test::ScopedVariable> forced;
      if (is_small) forced.emplace("KEYHOLE_CUDA_CAPABILITY", "8.6");
      for (const uint32_t group : {1U, 4U, 8U, 16U}) {
        SCOPED_TRACE(std::string(dtype_name(dtype)) + ", dim " + std::to_string(dim) + ", group " +
                     std::to_string(group) + (is_small ? ", 99 KiB" : ""));
        make(dim, dtype, group, 2,
             {{3, 17, 20, {1.0F, 0.0F}}, {5, 90, 150, {0.7F, 4.0F}}, {6, 1, 2, {1.0F, 0.0F}}},
             group != 4);
        for (uint32_t i = 0; i < 45; ++i) {
          for (uint32_t layer = 0; layer < 3; ++layer) {
            step(layer, i % 4 != 3, i % 3 == 1, i % 2 == 0 ? DType::f32 : dtype,
                 i % 5 == 0 ? 8 : 0);
            if (HasFatalFailure()) return;
          }
        }
        fill(1, 1000, 149);
        for (uint32_t i = 0; i < 6; ++i) step(1, true, i % 2 == 1, DType::f32, 0);
        for (uint32_t layer = 0; layer < 3; ++layer) expect_read(layer);
        expect_no_failure();
      }
    }
  }
}

// Windows longer and shorter than the trees; trees that fill tiles of which a step sees nothing.
TEST_F(CudaWindowsTest, StepsOfATreeSeeTheirBranch) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const uint32_t group : {1U, 8U, 12U}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + ", group " + std::to_string(group));
      make(group == 8 ? 128 : 80, dtype, group, 2,
           {{0, 17, 81, {1.0F, 0.0F}}, {1, 400, 470, {0.7F, 4.0F}}, {2, 2, 66, {1.0F, 0.0F}}},
           group == 8);
      for (uint32_t round = 0; round < 4; ++round) {
        fill(1, round == 0 ? 0 : 7, round == 0 ? 0 : 390 + 20 * round);
        const uint32_t n = round == 3 ? 64 : 5 + 9 * round;
        std::vector<uint32_t> layers(3);
        std::iota(layers.begin(), layers.end(), 0U);
        for (uint32_t i = 0; i < n; ++i) {
          // Long branches, and drafts that see their own alone.
          uint64_t sees = uint64_t{1} << i;
          if (round != 3 || i % 7 != 0) {
            for (uint32_t j = 0; j < i; ++j) sees |= uint64_t{rng_() % 2} << j;
          }
          for (const uint32_t layer : layers) {
            step(layer, true, false, i % 2 == 0 ? DType::f32 : dtype, 0, {i + 1, sees});
            if (HasFatalFailure()) return;
          }
        }
        windows_->keep_newest(layers, n, std::vector<uint32_t>{0, 3}, stream_.get());
        for (const uint32_t layer : layers) {
          auto& tokens = tokens_[layer];
          const Token first = tokens[tokens.size() - n], second = tokens[tokens.size() - n + 3];
          tokens.resize(tokens.size() - n);
          tokens.push_back(first);
          tokens.push_back(second);
          step(layer, true, round % 2 == 0, DType::f32, 0);
          if (HasFatalFailure()) return;
        }
      }
      for (uint32_t layer = 0; layer < 3; ++layer) expect_read(layer);
      expect_no_failure();
    }
  }
  const LayerTensors t(resident_shape_, DType::f32, 0);
  const TensorView q = t.q.rows(), k = t.k.rows(), v = t.v.rows();
  const TensorOut out = t.out.rows();
  for (const SeenDrafts& bad : {SeenDrafts{65, 1}, SeenDrafts{3, 3}, SeenDrafts{2, 7}}) {
    EXPECT_THROW(windows_->step(0, q, &k, &v, bad, out, nullptr, stream_.get()), Error);
  }
}

TEST_F(CudaWindowsTest, TakePromptsInDeviceMemory) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const uint32_t dim : {80U, 128U}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + ", dim " + std::to_string(dim));
      make(dim, dtype, 4, 3, {{0, 20, 27, {}}, {1, 300, 316, {}}}, true);
      for (const uint32_t n : {1U, 5U, 27U, 3U, 20U, 26U, 2U}) {
        append(0, n, n % 2 == 0 ? dtype : DType::f32, n % 3 == 0 ? 8 : 0);
        append(1, 11 * n, dtype, 0);
        for (uint32_t layer = 0; layer < 2; ++layer) {
          expect_read(layer);
          for (uint32_t i = 0; i < 3; ++i) step(layer, true, false, DType::f32, 0);
        }
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaWindowsTest, LongWindowsTurnOver) {
  for (const uint32_t kv_heads : {1U, 8U}) {
    make(128, DType::bf16, 4, kv_heads, {{0, 4096, 4112, {}}, {1, 1024, 5000, {}}}, true);
    fill(0, 77777, 4112);
    fill(1, 12, 4990);
    for (uint32_t i = 0; i < 40; ++i) {
      step(i % 2, true, false, DType::bf16, 0);
      if (HasFatalFailure()) return;
    }
    expect_read(0);
    expect_read(1);
  }
}

TEST_F(CudaWindowsTest, KeepSomeOfTheNewest) {
  make(64, DType::f16, 4, 2, {{0, 30, 60, {}}, {1, 8, 70, {}}, {2, 30, 60, {}}, {3, 5, 8, {}}},
       false);
  for (uint32_t round = 0; round < 20; ++round) {
    const uint32_t n = 1 + round % 7;
    for (uint32_t layer = 0; layer < 4; ++layer) {
      for (uint32_t i = 0; i < n + 3; ++i) step(layer, true, false, DType::f16, 0);
    }
    std::vector<uint32_t> kept;
    for (uint32_t i = 0; i < n; ++i) {
      if (rng_() % 2 == 0) kept.push_back(i);
    }
    // Not layer 2, which lies beside layer 0.
    const std::vector<uint32_t> layers = {0, 1, 3};
    windows_->keep_newest(layers, n, kept, stream_.get());
    for (const uint32_t layer : layers) {
      auto& tokens = tokens_[layer];
      const std::deque<Token> before = tokens;
      tokens.resize(before.size() - n);
      for (const uint32_t i : kept) tokens.push_back(before[before.size() - n + i]);
    }
    check(cudaStreamSynchronize(stream_.get()), "keeping");
    for (uint32_t layer = 0; layer < 4; ++layer) {
      expect_read(layer);
      step(layer, false, false, DType::f16, 0);
      step(layer, true, true, DType::f16, 0);
      if (HasFatalFailure()) return;
    }
  }
  // And on the host's word.
  const auto left = static_cast<uint32_t>(tokens_[0].size()) - 9;
  windows_->keep(0, first_[0], left);
  tokens_[0].resize(left);
  for (uint32_t i = 0; i < 20; ++i) step(0, true, false, DType::f16, 0);
  windows_->keep(0, 0, 0);
  tokens_[0].clear();
  first_[0] = 0;
  for (uint32_t i = 0; i < 3; ++i) step(0, true, false, DType::f16, 0);
  expect_read(0);
  expect_no_failure();
}

TEST_F(CudaWindowsTest, GraphsGoOnWhereTheLastLaunchEnded) {
  make(128, DType::f16, 4, 2, {{0, 40, 50, {}}}, true);
  LayerTensors t(resident_shape_, DType::f32, 0);
  const TensorView q = t.q.rows(), k = t.k.rows(), v = t.v.rows();
  const TensorOut out = t.out.rows();
  const CapturedGraph graph(stream_.get(), cudaStreamCaptureModeThreadLocal, [&] {
    windows_->step(0, q, &k, &v, {}, out, t.lse.floats(), stream_.get());
    windows_->begin(0, q, nullptr, nullptr, stream_.get());
    windows_->end(0, out, t.lse.floats(), stream_.get());
  });
  for (uint32_t i = 0; i < 120; ++i) {
    const auto queries = random_floats(rng_, size_t{shape_.q_heads} * shape_.head_dim);
    const Token token = random_tokens(rng_, resident_shape_, 1).front();
    t.q.write(queries);
    t.k.write(token.k);
    t.v.write(token.v);
    check(cudaDeviceSynchronize(), "the tensors");
    graph.run();
    take(0, token);
    const States expected = truth(0, queries);
    ASSERT_LT(worst_error(t.out.read(), expected), 1e-3) << i;
    ASSERT_LT(worst_lse(t.lse.read(), expected), 1e-3) << i;
    if (i == 60) fill(0, 500, 20);
  }
  expect_read(0);
}

TEST_F(CudaWindowsTest, SayWhatIsNotFinite) {
  make(128, DType::f16, 4, 2, {{9, 40, 50, {}}}, false);
  for (const auto& [name, value, dtype] :
       {std::tuple{"q", NAN, DType::f32}, std::tuple{"k", INFINITY, DType::f32},
        std::tuple{"v", -NAN, DType::f16}, std::tuple{"k", 70000.0F, DType::f32}}) {
    LayerTensors t(resident_shape_, dtype, 0);
    auto q = random_floats(rng_, size_t{shape_.q_heads} * shape_.head_dim);
    Token token = random_tokens(rng_, resident_shape_, 1).front();
    // Of KV head 1, or its group.
    if (*name == 'q') {
      q[size_t{5} * shape_.head_dim + 3] = value;
    } else {
      (*name == 'k' ? token.k : token.v)[shape_.head_dim + 70] = value;
    }
    t.q.write(q);
    t.k.write(token.k);
    t.v.write(token.v);
    check(cudaDeviceSynchronize(), "the tensors");
    const TensorView rq = t.q.rows(), k = t.k.rows(), v = t.v.rows();
    const TensorOut out = t.out.rows();
    windows_->step(0, rq, &k, &v, {}, out, nullptr, stream_.get());
    check(cudaStreamSynchronize(stream_.get()), "a step");
    std::string text;
    EXPECT_EQ(windows_->failure(text), Status::not_finite);
    EXPECT_NE(text.find(std::string("tensor ") + name), std::string::npos) << text;
    EXPECT_NE(text.find("of layer 9, KV head 1"), std::string::npos) << text;
    expect_no_failure();
  }
}

TEST_F(CudaWindowsTest, CountAgainstTheLimit) {
  const ResidentShape r = small_shape(128, DType::f16, 4);
  WindowsShape shape{r.q_heads, r.kv_heads, r.head_dim, r.dtype, {{0, 100, 120, {}}}, {}};
  const auto resident = make_cuda_resident(r, {}, cuda_resident_bytes(r) + windows_bytes(shape));
  { const auto fits = make_cuda_windows(*resident, shape); }
  const auto again = make_cuda_windows(*resident, shape);
  EXPECT_EQ(again->bytes(), windows_bytes(shape));
  shape.layers[0].slots = 121;
  try {
    (void)make_cuda_windows(*resident, shape);
    ADD_FAILURE() << "beyond the limit";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::out_of_device_memory) << e.what();
  }
}

}  // namespace
}  // namespace keyhole::gpu::test

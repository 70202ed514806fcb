// CudaStepper with tensors of the host: rows come and go exactly, and attention over them is that of the truth.
#include <algorithm>

#include "tests/gpu/cuda_fixture.h"

namespace keyhole::gpu::test {
namespace {

// q in two parts of 16 bits: 22 bits in f16, 16 in bf16; fp32 sums.
double tolerance(DType dtype) { return dtype == DType::bf16 ? 1e-3 : 1e-4; }

class Session {
 public:
  Session(const ResidentShape& shape, uint32_t seed, const CudaConfig& config = {})
      : shape_(shape), rng_(seed), resident_(make_cuda_resident(shape, config)) {
    for (uint32_t i = 0; i < shape.layers; ++i) truth_.emplace_back(shape);
  }

  void append(uint32_t layer, uint32_t n) {
    Truth& t = truth_[layer];
    const auto to_sink = static_cast<uint32_t>(
        std::min<size_t>(n, t.window.empty() ? shape_.sink - t.sink.size() : 0));
    const auto to_window = static_cast<uint32_t>(
        std::min<size_t>(n - to_sink, shape_.window_capacity - t.window.size()));
    const auto tokens = random_tokens(rng_, shape_, to_sink + to_window);
    const Rows rows = rows_of(tokens, shape_.dtype);
    resident_->append_sink(layer, rows.k.data(), rows.v.data(), to_sink);
    const size_t skip = to_sink * token_bytes();
    resident_->append_window(layer, rows.k.data() + skip, rows.v.data() + skip, to_window);
    t.sink.insert(t.sink.end(), tokens.begin(), tokens.begin() + to_sink);
    t.window.insert(t.window.end(), tokens.begin() + to_sink, tokens.end());
  }

  void evict(uint32_t layer, uint32_t n) {
    Truth& t = truth_[layer];
    Rows got;
    got.k.resize(n * token_bytes());
    got.v.resize(n * token_bytes());
    resident_->evict(layer, got.k.data(), got.v.data(), n);
    const Rows want = rows_of({t.window.begin(), t.window.begin() + n}, shape_.dtype);
    EXPECT_EQ(got.k, want.k);
    EXPECT_EQ(got.v, want.v);
    t.window.erase(t.window.begin(), t.window.begin() + n);
  }

  void truncate(uint32_t layer, uint32_t sink, uint32_t window) {
    resident_->truncate(layer, sink, window);
    truth_[layer].sink.resize(sink);
    truth_[layer].window.resize(window);
  }

  void check_rows(uint32_t layer) {
    Truth& t = truth_[layer];
    ASSERT_EQ(resident_->sink_count(layer), t.sink.size());
    ASSERT_EQ(resident_->window_count(layer), t.window.size());
    std::vector<Token> all(t.sink.begin(), t.sink.end());
    all.insert(all.end(), t.window.begin(), t.window.end());
    const Rows want = rows_of(all, shape_.dtype);
    Rows got{std::vector<std::byte>(want.k.size()), std::vector<std::byte>(want.v.size())};
    resident_->read(layer, got.k.data(), got.v.data());
    EXPECT_EQ(got.k, want.k);
    EXPECT_EQ(got.v, want.v);
  }

  void check_attention(uint32_t layer, float q_deviation = 1.0F) {
    const auto q = random_floats(rng_, size_t{shape_.q_heads} * shape_.head_dim, q_deviation);
    std::vector<float> o(q.size(), NAN), lse(shape_.q_heads, NAN);
    resident_->attend_begin(layer, q.data());
    EXPECT_EQ(resident_->host_tasks(), 0U);
    resident_->attend_end({o.data(), lse.data()});
    const States truth = truth_[layer].attend(q);
    EXPECT_LT(worst_error(o, truth), tolerance(shape_.dtype) * std::max(1.0F, q_deviation));
    EXPECT_LT(worst_lse(lse, truth), tolerance(shape_.dtype) * std::max(1.0F, q_deviation));
  }

  [[nodiscard]] size_t token_bytes() const {
    return size_t{shape_.kv_heads} * shape_.head_dim * dtype_size(shape_.dtype);
  }
  std::mt19937& rng() { return rng_; }
  Truth& truth(uint32_t layer) { return truth_[layer]; }
  Resident& resident() { return *resident_; }

 private:
  ResidentShape shape_;
  std::mt19937 rng_;
  std::unique_ptr<Resident> resident_;
  std::vector<Truth> truth_;
};

struct Case {
  uint32_t dim;
  DType dtype;
};

class CudaResidentRows : public testing::TestWithParam<Case> {};

TEST_P(CudaResidentRows, AnyOrderOfAppendEvictTruncateAttend) {
  const Case c = GetParam();
  KEYHOLE_NEEDS_GPU();
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  const auto up_to = [&](uint32_t n) { return std::uniform_int_distribution<uint32_t>(0, n)(rng); };
  for (uint32_t group : {1U, 1 + up_to(3), 4U, 5 + up_to(3), 9 + up_to(6), 16U}) {
    SCOPED_TRACE("group " + std::to_string(group));
    ResidentShape shape = small_shape(c.dim, c.dtype, group, 1 + up_to(2));
    if (group == 4) shape.logits.softcap = 2.0F;
    Session s(shape, rng());
    for (uint32_t layer = 0; layer < 2; ++layer) s.check_attention(layer);  // nothing there yet
    for (int i = 0; i < 25; ++i) {
      const uint32_t layer = up_to(1);
      Truth& t = s.truth(layer);
      const auto window = static_cast<uint32_t>(t.window.size());
      switch (up_to(5)) {
        case 0: s.evict(layer, up_to(window)); break;
        case 1:
          if (up_to(3) == 0) {
            const uint32_t left = up_to(window);
            s.truncate(layer, static_cast<uint32_t>(t.sink.size()), left);
          }
          break;
        case 2: s.append(layer, 1); break;
        default: s.append(layer, up_to(40));
      }
      s.check_attention(layer);
    }
    for (uint32_t layer = 0; layer < 2; ++layer) s.check_rows(layer);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, CudaResidentRows,
    testing::Values(Case{64, DType::f16}, Case{80, DType::f16}, Case{96, DType::f16},
                    Case{128, DType::f16}, Case{256, DType::f16}, Case{64, DType::bf16},
                    Case{80, DType::bf16}, Case{96, DType::bf16}, Case{128, DType::bf16},
                    Case{256, DType::bf16}, Case{64, DType::f32}, Case{80, DType::f32},
                    Case{96, DType::f32}, Case{128, DType::f32}, Case{256, DType::f32},
                    Case{512, DType::f16}, Case{512, DType::bf16}, Case{512, DType::f32}),
    [](const auto& shape) {
      return std::string(dtype_name(shape.param.dtype)) + "_" + std::to_string(shape.param.dim);
    });

TEST(CudaResident, ManySplitsAndTilesPerWarp) {
  KEYHOLE_NEEDS_GPU();
  for (DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    ResidentShape shape = small_shape(128, dtype, 4, 2);
    shape.layers = 1;
    shape.sink = 64;
    shape.window_capacity = 30000;
    Session s(shape, 7);
    for (uint32_t n : {700U, 1U, 3000U, 22001U}) {
      s.append(0, n);
      s.check_attention(0);
    }
    s.evict(0, 9000);
    s.append(0, 6000);  // across the end of the ring
    s.check_attention(0);
  }
}

TEST(CudaResident, QueriesOfAnySize) {
  KEYHOLE_NEEDS_GPU();
  // Beyond what f16 holds, and below: keys make up for it through the scale.
  for (float size : {1e-12F, 1e-4F, 3e5F, 1e12F}) {
    SCOPED_TRACE(size);
    ResidentShape shape = small_shape(128, DType::f16, 4);
    shape.logits.scale /= size;
    Session s(shape, 3);
    s.append(0, 60);
    const auto unit = random_floats(s.rng(), size_t{shape.q_heads} * shape.head_dim);
    auto q = unit;
    for (float& x : q) x *= size;
    std::vector<float> o(q.size(), NAN), lse(shape.q_heads, NAN);
    s.resident().attend_begin(0, q.data());
    s.resident().attend_end({o.data(), lse.data()});
    const States truth = s.truth(0).attend(q);
    EXPECT_LT(worst_error(o, truth), 1e-4);
    EXPECT_LT(worst_lse(lse, truth), 1e-4);
  }
}

TEST(CudaResident, OneLargeLogitAmongMany) {
  KEYHOLE_NEEDS_GPU();
  ResidentShape shape = small_shape(64, DType::f32, 2);
  shape.logits.scale = 10.0F;  // logits of +-300: weights of exactly 0 and 1
  Session s(shape, 5);
  s.append(0, 70);
  const auto q = random_floats(s.rng(), size_t{shape.q_heads} * shape.head_dim);
  std::vector<float> o(q.size(), NAN), lse(shape.q_heads, NAN);
  s.resident().attend_begin(0, q.data());
  s.resident().attend_end({o.data(), lse.data()});
  const States truth = s.truth(0).attend(q);
  EXPECT_LT(worst_error(o, truth), 1e-3);
  EXPECT_LT(worst_lse(lse, truth), 1e-3);
}

template <class F>
void expect_refusal(Status status, const char* word, F&& f) {
  try {
    f();
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), status) << e.what();
    EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
  }
}

TEST(CudaResident, RefusesMoreThanItsLimit) {
  KEYHOLE_NEEDS_GPU();
  const ResidentShape shape = small_shape(128, DType::f16, 4);
  size_t before = 0, after = 0, all = 0;
  { (void)make_cuda_resident(shape, {}); }
  ASSERT_EQ(cudaMemGetInfo(&before, &all), cudaSuccess);
  const size_t bytes = cuda_resident_bytes(shape);
  expect_refusal(Status::out_of_device_memory, std::to_string(bytes).c_str(),
                 [&] { (void)make_cuda_resident(shape, {}, bytes - 1); });
  ASSERT_EQ(cudaMemGetInfo(&after, &all), cudaSuccess);
  EXPECT_EQ(before, after);
  (void)make_cuda_resident(shape, {}, bytes);
}

TEST(CudaResident, RefusesMoreThanTheDeviceHas) {
  KEYHOLE_NEEDS_GPU();
  ResidentShape shape = small_shape(128, DType::f16, 4, 8);
  shape.layers = 1000;
  shape.window_capacity = 1U << 20U;
  expect_refusal(Status::out_of_device_memory, "free",
                 [&] { (void)make_cuda_resident(shape, {}); });
}

TEST(CudaResident, RefusesShapesItCannotServe) {
  KEYHOLE_NEEDS_GPU();
  const auto refuses = [](auto change, const char* word) {
    ResidentShape shape = small_shape(128, DType::f16, 4);
    change(shape);
    expect_refusal(Status::invalid_argument, word, [&] { (void)make_cuda_resident(shape, {}); });
  };
  refuses([](ResidentShape& s) { s.head_dim = 72; }, "72");
  refuses([](ResidentShape& s) { s.q_heads = 34; }, "34");
  refuses([](ResidentShape& s) { s.dtype = DType::i8; }, "i8");
  refuses([](ResidentShape& s) { s.window = s.window_capacity + 1; }, "slots");
  CudaConfig config;
  config.ordinal = 1000;
  expect_refusal(Status::unsupported, "1000",
                 [&] { (void)make_cuda_resident(small_shape(128, DType::f16, 4), config); });
}

TEST(CudaResident, ALargeWindowTakesNoHostMemoryUntilItFills) {
  KEYHOLE_NEEDS_GPU();
  ResidentShape shape = small_shape(128, DType::f16, 4, 8);
  shape.layers = 8;
  shape.window_capacity = 131072;
  Session s(shape, 11);  // 4 GiB of address space: touching it all would take seconds
  s.append(7, 100);
  s.check_attention(7);
  s.check_rows(7);
}

}  // namespace
}  // namespace keyhole::gpu::test

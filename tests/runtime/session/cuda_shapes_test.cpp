// Layers of different shapes on the machine's CUDA device, beside attention in double precision: all that a session
// does there, and the shapes of models as there are.
#include "tests/runtime/session/shaped_device.h"

#include <cuda_runtime_api.h>

#include <string>
#include <utility>
#include <vector>

#include "gpu/device.h"
#include "tests/runtime/device_vector.h"

namespace keyhole::test {
namespace {

class CudaWorld {
 public:
  using Vector = DeviceVector;
  CudaWorld() {
    EXPECT_EQ(cudaSuccess, cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~CudaWorld() {
    if (graph_ != nullptr) (void)cudaGraphExecDestroy(graph_);
    (void)cudaStreamDestroy(stream_);
  }
  CudaWorld(const CudaWorld&) = delete;
  CudaWorld& operator=(const CudaWorld&) = delete;

  keyhole_engine* engine(const keyhole_engine_config& c) {
    engine_ = make_engine(c);
    return engine_.get();
  }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }
  void begin_capture() {
    EXPECT_EQ(cudaSuccess, cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  }
  void end_capture() {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaSuccess, cudaStreamEndCapture(stream_, &graph));
    if (graph_ != nullptr) (void)cudaGraphExecDestroy(graph_);
    graph_ = nullptr;
    EXPECT_EQ(cudaSuccess, cudaGraphInstantiate(&graph_, graph, 0));
    (void)cudaGraphDestroy(graph);
  }
  void launch() { EXPECT_EQ(cudaSuccess, cudaGraphLaunch(graph_, stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
  EnginePtr engine_;
};

class CudaShapes : public ::testing::TestWithParam<ShapedCase> {
 protected:
  void SetUp() override {
    if (gpu::cuda_devices().empty()) GTEST_SKIP() << gpu::cuda_status();
  }
};

TEST_P(CudaShapes, AfterEveryOperation) {
  CudaWorld world;
  ShapedSequences<CudaWorld> sequences(world, GetParam());
  ASSERT_FALSE(HasFatalFailure());
  sequences.run(40);
}

TEST_P(CudaShapes, WhatIsOffloadedIsWhereItIsToBe) {
  CudaWorld world;
  ShapedSequences<CudaWorld> sequences(world, GetParam());
  ASSERT_FALSE(HasFatalFailure());
  sequences.run_once(700);
}

// Gemma's pattern: layers that slide between full ones of other heads, the last of which slides as well.
TEST(CudaShape, CodesAreThereWhereTheLastLayersSlide) {
  if (gpu::cuda_devices().empty()) GTEST_SKIP() << gpu::cuda_status();
  for (const auto& [dim, alike] : {std::pair{256U, true}, {256U, false}, {512U, false}}) {
    SCOPED_TRACE(std::to_string(dim) + (alike ? ", alike" : ""));
    const Heads full{8, 1, dim}, narrow = alike ? full : Heads{8, 4, dim / 2};
    ShapedConfig c({narrow, full, narrow, full, narrow});
    for (const uint32_t l : {0U, 2U, 4U}) c.layers[l].window = 100;
    for (keyhole_layer_config& layer : c.layers) layer.scale = 0.004F;
    c.engine.device = KEYHOLE_DEVICE_CUDA;
    const EnginePtr engine = make_engine(c.engine);
    keyhole_session_config sc = small_session();
    sc.flush_block = sc.append_block = 256;
    sc.index = "codes:k=4,v=4";
    sc.budget.top_k = 16;
    sc.budget.tail = KEYHOLE_TAIL_CODES;
    sc.offload_placement = KEYHOLE_PLACE_DEVICE;
    const SessionPtr s = make_session(engine.get(), sc);
    ASSERT_NE(s, nullptr);
    EXPECT_EQ(statistics(s.get()).code_layers, 2U);
    Numbers numbers(3);
    Model model(c.engine);
    for (uint32_t l = 0; l < 5; ++l) {
      prefill_both(s.get(), model, c.shape(l), l, 1500, numbers);
      const auto q = numbers.many(c.shape(l).q(1));
      std::vector<double> lse;
      const auto o = model.attend_all(l, q, lse);
      SCOPED_TRACE("layer " + std::to_string(l));
      expect_near(attend_only(s.get(), c.shape(l), l, q), o, lse, 0.04);
    }
  }
}

// Tolerances for values up to 6 about patterns of their heads and channels, where a row of another head changes
// answers by whole units. Codes of 4 bits leave errors of a tenth of the values' spread about the mean of their
// block, and of a sixteenth of that in means of 256 rows.
constexpr double kExact = 1e-2, kExactInBf16 = 3e-2, kByCodes = 0.1;

std::vector<ShapedCase> all_cases() {
  std::vector<ShapedCase> all;
  uint64_t seed = 1;
  for (const Offloaded o :
       {Offloaded::flat, Offloaded::codes, Offloaded::host_codes, Offloaded::partitions}) {
    const bool coded = o == Offloaded::codes || o == Offloaded::host_codes;
    for (uint32_t i = 0; i < 6; ++i) {
      const keyhole_dtype dtype = i % 3 == 0   ? KEYHOLE_F16
                                  : i % 3 == 1 ? KEYHOLE_BF16
                                               : KEYHOLE_F32;
      const double exact = dtype == KEYHOLE_BF16 ? kExactInBf16 : kExact;
      all.push_back({seed++, o, dtype, coded ? kByCodes : exact, coded && i % 2 == 1});
    }
  }
  for (const Offloaded o :
       {Offloaded::flat, Offloaded::codes, Offloaded::host_codes, Offloaded::partitions}) {
    const bool coded = o == Offloaded::codes || o == Offloaded::host_codes;
    all.push_back({seed++, o, KEYHOLE_F16, coded ? kByCodes : kExact, false, true});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Random, CudaShapes, ::testing::ValuesIn(all_cases()),
                         [](const auto& p) { return "Seed" + std::to_string(p.param.seed); });

}  // namespace
}  // namespace keyhole::test

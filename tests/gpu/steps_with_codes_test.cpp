// Whole steps with codes: resident tokens and the heaviest offloaded ones exactly, all others by their codes, against
// double precision; a thread of the test plays the host, which only takes what is published.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/gpu/codes_session.h"

namespace keyhole::gpu::test {
namespace {

/// A prompt, two rounds, a flush, and more rounds.
void run_session(const CodesSetting& set) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed) + ", group " + std::to_string(set.group) +
               ", exact rows " + std::to_string(set.exact_rows));
  CodesSession session(set, seed);
  session.prefill(3, 290);
  session.serve(4);
  session.round();
  session.round();
  session.flush();
  session.round();
  session.truncate(2);
  session.round();
}

struct StepCase {
  uint32_t dim, bits;
  DType dtype, caller;
  bool int8 = false;
};

class StepsWithCodes : public testing::TestWithParam<StepCase> {};

TEST_P(StepsWithCodes, AttendEveryToken) {
  const StepCase c = GetParam();
  KEYHOLE_NEEDS_GPU();
  CodesSetting set;
  set.dim = c.dim;
  set.bits = c.bits;
  set.dtype = c.dtype;
  set.caller = c.caller;
  set.int8 = c.int8;
  const uint32_t exact[] = {16, 0, 64, 16, 5};
  uint32_t i = 0;
  for (uint32_t group : {1U, 4U, 5U, 8U, 16U}) {
    set.group = group;
    set.exact_rows = exact[i];
    set.way = i % 3 == 0 ? CodesWay::begin_end : i % 3 == 1 ? CodesWay::graph : CodesWay::step;
    ++i;
    run_session(set);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, StepsWithCodes,
    testing::Values(
        StepCase{64, 2, DType::f16, DType::f16}, StepCase{80, 4, DType::bf16, DType::bf16},
        StepCase{96, 2, DType::f16, DType::f32}, StepCase{128, 2, DType::f16, DType::f16},
        StepCase{128, 4, DType::bf16, DType::bf16}, StepCase{128, 4, DType::f32, DType::f32},
        StepCase{128, 2, DType::f32, DType::f16}, StepCase{128, 2, DType::bf16, DType::f32},
        StepCase{128, 2, DType::f16, DType::f16, true},
        StepCase{80, 4, DType::bf16, DType::f32, true}, StepCase{256, 2, DType::f16, DType::f16},
        StepCase{256, 4, DType::bf16, DType::bf16}, StepCase{256, 2, DType::f32, DType::f32},
        StepCase{256, 4, DType::bf16, DType::f16, true}, StepCase{128, 4, DType::f16, DType::f16},
        StepCase{64, 4, DType::f16, DType::f16, true}, StepCase{512, 4, DType::f16, DType::f16},
        StepCase{512, 2, DType::bf16, DType::bf16}, StepCase{512, 4, DType::f32, DType::f16},
        StepCase{512, 2, DType::f16, DType::f32, true}),
    [](const auto& c) {
      return std::to_string(c.param.dim) + "_" + std::to_string(c.param.bits) + "_" +
             dtype_name(c.param.dtype) + "_" + dtype_name(c.param.caller) +
             (c.param.int8 ? "_int8" : "");
    });

TEST(StepsWithCodesOnce, CapLogits) {
  KEYHOLE_NEEDS_GPU();
  CodesSetting set;
  set.softcap = 2.0F;
  run_session(set);
}

TEST(StepsWithCodesOnce, CountLearnedSinks) {
  KEYHOLE_NEEDS_GPU();
  CodesSetting set;
  set.sinks = true;
  for (CodesWay way : {CodesWay::step, CodesWay::begin_end, CodesWay::graph}) {
    set.way = way;
    run_session(set);
  }
  set.dim = 256;
  run_session(set);
  set.group = 1;
  set.exact_rows = 0;
  run_session(set);
}

TEST(StepsWithCodesOnce, CountLearnedSinksOfHeadsOf512) {
  KEYHOLE_NEEDS_GPU();
  CodesSetting set;
  set.sinks = true;
  set.dim = 512;
  set.group = 8;
  run_session(set);
}

TEST(StepsWithCodesOnce, WithoutABlock) {
  KEYHOLE_NEEDS_GPU();
  CodesSetting set;
  CodesSession session(set, 3);
  session.prefill(0, 280);
  session.serve(2);
  session.round();
  session.flush();
  session.round();
}

TEST(StepsWithCodesOnce, AGraphOfManySteps) {
  KEYHOLE_NEEDS_GPU();
  CodesSetting set;
  set.way = CodesWay::graph;
  set.steps = 12;
  set.delay = milliseconds(3);
  CodesSession session(set, 4);
  session.prefill(2, 530);
  session.serve(5);
  for (int i = 0; i < 5; ++i) {
    session.round();
    if (i % 2 == 1) session.flush();
    if (i == 3) session.truncate(1);
  }
}

TEST(StepsWithCodesOnce, HostLaunchGivesTheSame) {
  KEYHOLE_NEEDS_GPU();
  CodesSetting set;
  set.signal = Signal::host_launch;
  set.delay = milliseconds(2);
  for (CodesWay way : {CodesWay::step, CodesWay::begin_end}) {
    set.way = way;
    run_session(set);
  }
}

TEST(StepsWithCodesOnce, TheHostReadsRows) {
  KEYHOLE_NEEDS_GPU();
  CodesSetting set;
  set.rows_by_host = true;
  for (const auto& [dtype, int8] : {std::pair{DType::f16, false}, std::pair{DType::bf16, false},
                                    std::pair{DType::f32, false}, std::pair{DType::f16, true}}) {
    set.dtype = dtype;
    set.int8 = int8;
    for (const uint32_t exact_rows : {0U, 5U, 64U}) {
      set.exact_rows = exact_rows;
      for (CodesWay way : {CodesWay::step, CodesWay::begin_end, CodesWay::graph}) {
        set.way = way;
        run_session(set);
      }
    }
  }
}

TEST(StepsWithCodesOnce, TheHostReadsRowsWhereKernelsAreLaunchedOneAtATime) {
  KEYHOLE_NEEDS_GPU();
  CodesSetting set;
  set.signal = Signal::host_launch;
  set.rows_by_host = true;
  for (CodesWay way : {CodesWay::step, CodesWay::begin_end}) {
    set.way = way;
    run_session(set);
  }
}

/// Steps of layer 0 without a host.
class AloneWithCodes : public testing::Test {
 protected:
  void start(CudaConfig config, bool rows_by_host = false) {
    shape_ = small_shape(128, DType::f16, 4);
    resident_ = make_cuda_resident(shape_, config);
    steps_ = resident_->stream_steps();
    CodesShape codes;
    codes.layers = shape_.layers;
    codes.q_heads = shape_.q_heads;
    codes.kv_heads = shape_.kv_heads;
    codes.code = {128, 2, 2};
    codes.blocks = 1;
    codes.logits = shape_.logits;
    if (rows_by_host) {
      codes.exact_rows = 8;
      codes.rows_by_host = true;
    }
    codes_ = make_cuda_codes(*resident_, codes);
    if (rows_by_host) {
      rows_ = std::make_unique<OffloadedLayer>(codes, kCodeBlock);
      std::mt19937 rng(2);
      const size_t row = size_t{shape_.kv_heads} * 128;
      for (uint32_t i = 0; i < kCodeBlock; ++i) {
        rows_->append(random_floats(rng, row), random_floats(rng, row));
      }
      rows_->learn(random_floats(rng, size_t{shape_.q_heads} * 128));
      rows_->tell(*codes_, 0);
      codes_->encode(0, 0, 1, stream_.get());
    }
    t_ = std::make_unique<LayerTensors>(shape_, DType::f16, 0);
    std::mt19937 rng(1);
    t_->q.write(random_floats(rng, size_t{shape_.q_heads} * 128));
    t_->k.write(random_floats(rng, size_t{shape_.kv_heads} * 128));
    t_->v.write(random_floats(rng, size_t{shape_.kv_heads} * 128));
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  void step() {
    const TensorView k = t_->k.rows(), v = t_->v.rows();
    steps_->step(0, t_->q.rows(), &k, &v, {codes_.get()}, t_->out.rows(), nullptr, stream_.get());
  }
  void take(uint32_t sequence) {
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) steps_->deliver(0, h, sequence);
  }
  [[nodiscard]] bool arrives(uint32_t sequence, uint64_t timeout_us) {
    Published published;
    return steps_->await(0, sequence, 1000, timeout_us, stop_, published);
  }

  ResidentShape shape_;
  OwnedStream stream_;
  std::unique_ptr<Resident> resident_;
  std::unique_ptr<Codes> codes_;
  std::unique_ptr<OffloadedLayer> rows_;
  StreamSteps* steps_ = nullptr;
  std::unique_ptr<LayerTensors> t_;
  std::atomic<bool> stop_{false};
};

TEST_F(AloneWithCodes, OnlyTheNextStepWaitsForTheHost) {
  KEYHOLE_NEEDS_GPU();
  start({});
  if (steps_->signal() != Signal::device_wait) GTEST_SKIP() << "kernels are launched one at a time";
  step();
  steps_->synchronize(stream_.get());  // nobody has answered
  for (float x : t_->out.read()) ASSERT_FALSE(std::isnan(x));
  EXPECT_TRUE(arrives(1, 10'000'000));
  step();
  EXPECT_FALSE(arrives(2, 30'000));
  take(1);
  EXPECT_TRUE(arrives(2, 10'000'000));
  steps_->synchronize(stream_.get());
  take(2);
  std::string text;
  EXPECT_EQ(steps_->failure(text), Status::ok) << text;
  EXPECT_GE(steps_->wait_nanoseconds(), 20'000'000U);
}

TEST_F(AloneWithCodes, AHostThatDoesNotTakeRowsIsNoted) {
  KEYHOLE_NEEDS_GPU();
  CudaConfig config;
  config.timeout_ms = 50;
  start(config);
  if (steps_->signal() != Signal::device_wait) GTEST_SKIP() << "kernels are launched one at a time";
  step();
  step();
  steps_->synchronize(stream_.get());
  std::string text;
  EXPECT_EQ(steps_->failure(text), Status::timeout);
  EXPECT_NE(text.find("step 1 of layer 0"), std::string::npos) << text;
  EXPECT_NE(text.find("50 ms"), std::string::npos) << text;
  for (float x : t_->out.read()) ASSERT_FALSE(std::isnan(x));
  steps_->give_up(0, 2);
  step();
  steps_->synchronize(stream_.get());
  EXPECT_EQ(steps_->failure(text), Status::cancelled);
  EXPECT_NE(text.find("step 2 of layer 0"), std::string::npos) << text;
}

TEST_F(AloneWithCodes, AHostThatReadsNoRowsIsNoted) {
  KEYHOLE_NEEDS_GPU();
  CudaConfig config;
  config.timeout_ms = 50;
  start(config, true);
  if (steps_->signal() != Signal::device_wait) GTEST_SKIP() << "kernels are launched one at a time";
  step();
  steps_->synchronize(stream_.get());
  std::string text;
  EXPECT_EQ(steps_->failure(text), Status::timeout);
  EXPECT_NE(text.find("step 1 of layer 0"), std::string::npos) << text;
  EXPECT_NE(text.find("has not read the rows that it chose within 50 ms"), std::string::npos)
      << text;
  for (float x : t_->out.read()) ASSERT_TRUE(std::isnan(x));
  EXPECT_GE(steps_->wait_nanoseconds(), 40'000'000U);
  take(1);
  codes_->give_up_rows(2);
  step();
  steps_->synchronize(stream_.get());
  EXPECT_EQ(steps_->failure(text), Status::cancelled);
  EXPECT_NE(text.find("gave it up"), std::string::npos) << text;
  take(2);
  step();
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    while (codes_->serve_rows(h) != 3 && std::chrono::steady_clock::now() < patience) {
      std::this_thread::yield();
    }
    EXPECT_EQ(codes_->serve_rows(h), 3U);
  }
  steps_->synchronize(stream_.get());
  EXPECT_EQ(steps_->failure(text), Status::ok) << text;
  for (float x : t_->out.read()) ASSERT_FALSE(std::isnan(x));
  take(3);
}

TEST_F(AloneWithCodes, HostLaunchWaitsOnTheCallersThread) {
  KEYHOLE_NEEDS_GPU();
  CudaConfig config;
  config.probe_signal = false;
  config.signal = Signal::host_launch;
  config.timeout_ms = 50;
  start(config);
  step();
  steps_->synchronize(stream_.get());
  EXPECT_TRUE(arrives(1, 1'000'000));
  try {
    step();
    ADD_FAILURE() << "did not wait";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::timeout) << e.what();
  }
  take(1);
  step();
  EXPECT_TRUE(arrives(2, 1'000'000));
  take(2);
  steps_->synchronize(stream_.get());
}

}  // namespace
}  // namespace keyhole::gpu::test

// The runner alone: a client that writes down what it is asked, on a device made of a thread.
#include "runtime/stream/stream_runner.h"

#include <gtest/gtest.h>

#include "tests/runtime/fixture.h"
#include "tests/runtime/stream_device.h"

namespace keyhole::runtime {
namespace {

/// Layers that are counted; no offloaded token weighs anything.
class CountingClient final : public StreamClient {
 public:
  CountingClient(const ModelShape& model, const SessionParams& params, gpu::Resident& resident,
                 gpu::StreamSteps& steps)
      : model_(model),
        params_(params),
        resident_(&resident),
        steps_(&steps),
        offloaded_(model.layers) {
    const size_t bytes =
        size_t{params.window + params.flush_block} * model.of(0).token_bytes(model.kv_dtype);
    k_.resize(bytes);
    v_.resize(bytes);
  }
  uint32_t tokens(uint32_t layer) const override {
    return resident_->sink_count(layer) + offloaded_[layer] + resident_->window_count(layer);
  }
  ResidentCounts resident_counts(uint32_t layer) const override {
    return {resident_->sink_count(layer), resident_->window_count(layer)};
  }
  bool append_is_due(uint32_t layer) const override { return layer == due_layer_; }
  uint64_t host_bytes() const override {
    uint64_t rows = 0;
    for (const uint32_t n : offloaded_) rows += n;
    return rows * 2 * model_.of(0).token_bytes(model_.kv_dtype);
  }
  void advance_append(uint32_t layer) override {
    say("advance", layer);
    due_layer_ = UINT32_MAX;
  }
  void codes_gone() override { ADD_FAILURE() << "there were none"; }
  uint32_t row_block() const override { return 1; }
  void flush(uint32_t) override { ADD_FAILURE() << "rows do not come in blocks"; }
  void prepare_work(uint32_t layer, uint32_t position) override {
    if (fails_) throw Error(Status::internal, "planted: no work");
    say("work", layer, position);
  }
  void start_step(uint32_t /*layer*/, const float* q, ResultSink& sink) override {
    EXPECT_TRUE(std::isfinite(q[0]));
    for (uint32_t h = 0; h < model_.kv_heads; ++h) {
      const StateView slot = sink.slot(h);
      std::fill_n(slot.o, model_.of(0).group() * model_.head_dim, 0.0F);
      std::fill_n(slot.lse, model_.of(0).group(), kMinusInf);
      sink.deliver(h);
    }
  }
  void finish_step() override { finished += 1; }
  void append_published(uint32_t layer, const gpu::Published& published, uint32_t tokens) override {
    EXPECT_EQ(tokens, 1U);
    offloaded_[layer] += steps_->update_host_copy(layer, published, k_.data(), v_.data());
  }
  bool has_audits() const override { return false; }
  std::optional<uint64_t> count_step(uint32_t) override { return std::nullopt; }
  void begin_audit(const StreamStep&, const gpu::Published&) override { ADD_FAILURE(); }
  void end_served_audit() override { ADD_FAILURE(); }
  void close_audit(bool) override {}
  void drop_audit() override {}

  void say(const char* what, uint32_t layer, uint32_t position = 0) {
    said.push_back(std::string(what) + " " + std::to_string(layer) + " " +
                   std::to_string(position));
  }
  std::vector<std::string> said;
  uint32_t finished = 0;
  uint32_t due_layer_ = UINT32_MAX;
  std::atomic<bool> fails_{false};

 private:
  ModelShape model_;
  SessionParams params_;
  gpu::Resident* resident_;
  gpu::StreamSteps* steps_;
  std::vector<uint32_t> offloaded_;
  std::vector<std::byte> k_, v_;
};

/// Offloaded rows that nobody makes codes of.
struct NoRows final : CodeSource {
  KvView rows(uint32_t) const override { return {}; }
  const uint16_t* scales(uint32_t) const override { return nullptr; }
  uint32_t row_block() const override { return 1; }
  void learn_balances(uint32_t) override {}
  const index::Balance& balance(uint32_t, uint32_t) override {
    throw Error(Status::internal, "planted: no codes");
  }
  void set_pinned(uint32_t, size_t) override {}
  bool is_shared(uint32_t, size_t) const override { return false; }
};

class StreamRunnerTest : public testing::Test {
 protected:
  StreamRunnerTest() {
    params_.max_tokens = 1000;
    params_.sink = 2;
    params_.window = 4;
    params_.flush_block = 2;
    params_.append_block = 32;
    q_.resize(size_t{model().q_heads} * model().head_dim, 0.5F);
    kv_.resize(size_t{model().kv_heads} * model().head_dim, 0.25F);
    out_.resize(q_.size());
  }
  [[nodiscard]] const ModelShape& model() const { return engine_.model(); }
  [[nodiscard]] TensorView rows(const std::vector<float>& of, uint32_t heads) const {
    return dense_tensor(reinterpret_cast<const std::byte*>(of.data()), 1, heads, model().head_dim,
                        DType::f32, Memory::device);
  }
  void step(uint32_t layer, bool appends = true) {
    const TensorView q = rows(q_, model().q_heads), k = rows(kv_, model().kv_heads);
    const TensorOut out = dense_tensor(reinterpret_cast<std::byte*>(out_.data()), 1, q.heads, q.dim,
                                       DType::f32, Memory::device);
    runner_->enqueue(layer, q, appends ? &k : nullptr, appends ? &k : nullptr, &out, nullptr);
  }
  void make_runner() {
    client_ = std::make_unique<CountingClient>(model(), params_, device_, device_);
    runner_ = std::make_unique<StreamRunner>(engine_, params_, device_, codes_, *client_);
  }

  Engine engine_{test::small_engine(2)};
  SessionParams params_;
  test::FakeStream stream_;
  test::FakeFaults faults_;
  std::vector<float> q_, kv_, out_;
  test::FakeDevice device_{{2, 4, 2, 64, DType::f16, 2, 6, 4, engine_.model().logits},
                           cpu::select_kernels(nullptr),
                           stream_,
                           faults_};
  NoRows no_rows_;
  DeviceCodes codes_{params_, engine_.model(), nullptr, nullptr, nullptr, no_rows_, engine_.log()};
  std::unique_ptr<CountingClient> client_;
  std::unique_ptr<StreamRunner> runner_;
};

TEST_F(StreamRunnerTest, ServesStepsInTheirOrder) {
  make_runner();
  std::vector<std::string> expected;
  for (uint32_t t = 0; t < 20; ++t) {
    for (uint32_t l = 0; l < 2; ++l) {
      step(l);
      expected.push_back("work " + std::to_string(l) + " " + std::to_string(t));
    }
  }
  runner_->synchronize();
  EXPECT_EQ(client_->said, expected);
  EXPECT_EQ(client_->finished, 40U);
  EXPECT_EQ(client_->tokens(0), 20U);
  for (const float x : out_) ASSERT_NEAR(x, 0.25F, 1e-3F);  // all values are alike
  keyhole_statistics s{};
  runner_->add_statistics(s);
  EXPECT_EQ(s.stream_steps, 40U);
  EXPECT_GT(s.serve_seconds, 0.0);
  runner_->reset_statistics();
  s = {};
  runner_->add_statistics(s);
  EXPECT_EQ(s.stream_steps, 0U);
  EXPECT_EQ(s.attend_seconds, 0.0);
}

TEST_F(StreamRunnerTest, TakesInABlockBeforeTheStepThatIsDue) {
  make_runner();
  step(0);
  step(1);
  client_->due_layer_ = 1;
  step(0);
  step(1);
  runner_->synchronize();
  const std::vector<std::string> expected{"work 0 0", "work 1 0", "work 0 1", "advance 1 0",
                                          "work 1 1"};
  EXPECT_EQ(client_->said, expected);
}

TEST_F(StreamRunnerTest, KeepsTheFirstErrorOfAClient) {
  make_runner();
  step(0);
  runner_->synchronize();
  client_->fails_ = true;
  step(0);
  EXPECT_THROW(runner_->synchronize(), Error);
  client_->fails_ = false;
  try {
    step(1);
    FAIL() << "a step after a failure";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "planted: no work");
  }
  EXPECT_TRUE(std::isnan(out_[0])) << "the step that failed was given up";
}

TEST_F(StreamRunnerTest, RefusesAStepThatWouldPassTheMemoryLimit) {
  // 7 tokens may be offloaded. A full window of 4 + 2 falls back to 3, then takes the new token: 3 tokens leave at
  // once, twice, and not a third time.
  params_.host_memory_limit = 7 * 2 * model().of(0).token_bytes(model().kv_dtype);
  make_runner();
  uint32_t taken = 0;
  try {
    for (;; ++taken) step(0);
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::out_of_memory);
  }
  EXPECT_EQ(taken, 2U + 6U + 3U + 3U);
  runner_->synchronize();
  EXPECT_EQ(client_->tokens(0), taken);
  EXPECT_LE(client_->host_bytes(), params_.host_memory_limit);
  step(1);  // its window has not filled
  runner_->synchronize();
}

TEST_F(StreamRunnerTest, AGraphIsRefusedWholeWhereItWouldPassTheMemoryLimit) {
  params_.host_memory_limit = 7 * 2 * model().of(0).token_bytes(model().kv_dtype);
  make_runner();
  runner_->synchronize();
  stream_.begin_capture();
  for (int i = 0; i < 5; ++i) step(0);
  stream_.end_capture();
  for (uint32_t tokens = 5; tokens <= 10; tokens += 5) {
    runner_->submit_graph(runner_->ready_graph(0));
    stream_.launch_graph();
    runner_->synchronize();
    EXPECT_EQ(client_->tokens(0), tokens);
  }
  // Of tokens 11 to 15 the 12th and the 15th overflow the window: 9 offloaded tokens in the end, and 7 may be.
  try {
    runner_->submit_graph(runner_->ready_graph(0));
    FAIL() << "announced";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::out_of_memory) << e.what();
  }
  runner_->synchronize();
  EXPECT_EQ(client_->tokens(0), 10U);
}

}  // namespace
}  // namespace keyhole::runtime

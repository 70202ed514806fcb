// CudaStepper in the order of a stream: a thread of the test plays the host, with states that it makes up.
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/captured_graph.h"
#include "tests/gpu/stream_fixture.h"

namespace keyhole::gpu::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// Answers `steps` steps of every layer, in their order, on a thread of its own, and keeps what it saw.
class Host {
 public:
  struct Seen {
    std::vector<float> q, k, v;
    std::vector<Token> left;
    States answer;
  };

  /// empty: every so many steps the host has nothing to say (an empty state).
  Host(Resident& resident, const ResidentShape& shape, uint32_t steps, bool appends, uint32_t seed,
       milliseconds delay = {}, uint32_t first = 1)
      : steps_(*resident.stream_steps()), shape_(shape), rng_(seed), delay_(delay) {
    thread_ = std::thread([this, steps, appends, first] { serve(steps, appends, first); });
  }
  ~Host() { join(); }
  void join() {
    if (thread_.joinable()) thread_.join();
  }
  [[nodiscard]] const Seen& seen(uint32_t step, uint32_t layer) const {
    return seen_.at(size_t{step} * shape_.layers + layer);
  }
  [[nodiscard]] bool served_all() const { return served_all_; }

 private:
  void serve(uint32_t steps, bool appends, uint32_t first) {
    const uint32_t group = shape_.q_heads / shape_.kv_heads;
    const size_t rows = size_t{shape_.kv_heads} * shape_.head_dim;
    const size_t row_bytes = rows * dtype_size(shape_.dtype);
    std::vector<std::byte> k(shape_.window_capacity * row_bytes), v(k.size());
    for (uint32_t step = 0; step < steps; ++step) {
      for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
        Published published;
        const uint32_t sequence = first + step;
        if (!steps_.await(layer, sequence, 100, 20'000'000, stop_, published)) return;
        Seen seen;
        seen.q.assign(published.q, published.q + size_t{shape_.q_heads} * shape_.head_dim);
        if (delay_.count() > 0) std::this_thread::sleep_for(delay_);
        seen.answer.lse.resize(shape_.q_heads);
        seen.answer.o.resize(seen.q.size());
        for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
          const StateView slot = steps_.host_slot(layer, h);
          const bool empty = (step + layer + h) % 5 == 0;
          const auto o = random_floats(rng_, size_t{group} * shape_.head_dim);
          const auto lse = random_floats(rng_, group, 3.0F);
          for (uint32_t g = 0; g < group; ++g) {
            slot.lse[g] = empty ? kMinusInf : lse[g];
            seen.answer.lse[h * group + g] = double{slot.lse[g]};
            for (uint32_t d = 0; d < shape_.head_dim; ++d) {
              const size_t i = size_t{g} * shape_.head_dim + d;
              slot.o[i] = empty ? 0.0F : o[i];
              seen.answer.o[size_t{h} * group * shape_.head_dim + i] = double{slot.o[i]};
            }
          }
          steps_.deliver(layer, h, sequence);
        }
        if (appends) {
          for (size_t i = 0; i < rows; ++i) {
            seen.k.push_back(get(published.k, i, shape_.dtype));
            seen.v.push_back(get(published.v, i, shape_.dtype));
          }
          const uint32_t n = steps_.update_host_copy(layer, published, k.data(), v.data());
          for (uint32_t i = 0; i < n; ++i) {
            Token t;
            for (size_t j = 0; j < rows; ++j) {
              t.k.push_back(get(k.data(), i * rows + j, shape_.dtype));
              t.v.push_back(get(v.data(), i * rows + j, shape_.dtype));
            }
            seen.left.push_back(std::move(t));
          }
        }
        seen_.push_back(std::move(seen));
      }
    }
    served_all_ = true;
  }

  StreamSteps& steps_;
  ResidentShape shape_;
  std::mt19937 rng_;
  milliseconds delay_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> served_all_{false};
  std::vector<Seen> seen_;
  std::thread thread_;
};

double tolerance(DType session, DType caller) {
  if (session == DType::bf16 || caller == DType::bf16) return 8e-3;
  return caller == DType::f16 ? 1e-3 : 1e-4;
}

enum class Way { begin_end, step, graph };

struct Setting {
  Way way = Way::step;
  DType caller = DType::f16;
  uint32_t gap = 0;
  bool appends = true;
  uint32_t steps = 6;
  uint32_t before = 0;  ///< tokens appended from the host first
  milliseconds delay{};
  CudaConfig config;
};

std::vector<float> through(const std::vector<float>& x, DType dtype) {
  std::vector<float> y = x;
  for (float& z : y) z = rounded(z, dtype);
  return y;
}

void run_steps(const ResidentShape& shape, const Setting& set, uint32_t seed) {
  std::mt19937 rng(seed);
  const auto resident = make_cuda_resident(shape, set.config);
  StreamSteps& steps = *resident->stream_steps();
  if (set.way == Way::graph && steps.signal() != Signal::device_wait) {
    GTEST_SKIP() << "kernels are launched one at a time";
  }
  const OwnedStream stream;
  std::vector<Truth> truth(shape.layers, Truth(shape));
  std::vector<LayerTensors> tensors;
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    tensors.emplace_back(shape, set.caller, set.gap);
    if (set.before == 0) continue;
    const auto tokens = random_tokens(rng, shape, set.before);
    const uint32_t to_sink = std::min(set.before, shape.sink);
    const Rows rows = rows_of(tokens, shape.dtype);
    const size_t skip = to_sink * rows.k.size() / set.before;
    resident->append_sink(layer, rows.k.data(), rows.v.data(), to_sink);
    resident->append_window(layer, rows.k.data() + skip, rows.v.data() + skip,
                            set.before - to_sink);
    truth[layer].sink.assign(tokens.begin(), tokens.begin() + to_sink);
    truth[layer].window.assign(tokens.begin() + to_sink, tokens.end());
  }
  Host host(*resident, shape, set.steps, set.appends, rng(), set.delay);

  const auto enqueue = [&](uint32_t layer) {
    LayerTensors& t = tensors[layer];
    const TensorView q = t.q.rows(), k = t.k.rows(), v = t.v.rows();
    const TensorOut out = t.out.rows();
    const TensorView* new_k = set.appends ? &k : nullptr;
    const TensorView* new_v = set.appends ? &v : nullptr;
    if (set.way == Way::begin_end) {
      steps.begin(layer, q, new_k, new_v, {}, stream.get());
      steps.end(layer, out, t.lse.floats(), stream.get());
    } else {
      steps.step(layer, q, new_k, new_v, {}, out, t.lse.floats(), stream.get());
    }
  };
  CapturedGraph graph;
  if (set.way == Way::graph) {
    ASSERT_FALSE(steps.is_capturing(stream.get()));
    graph = CapturedGraph(stream.get(), cudaStreamCaptureModeGlobal, [&] {
      EXPECT_TRUE(steps.is_capturing(stream.get()));
      for (uint32_t layer = 0; layer < shape.layers; ++layer) enqueue(layer);
    });
  }

  const size_t kv = size_t{shape.kv_heads} * shape.head_dim;
  std::vector<Host::Seen> want(size_t{set.steps} * shape.layers);
  std::vector<States> resident_states(want.size());
  std::vector<std::vector<float>> out(want.size()), lse(want.size());
  for (uint32_t step = 0; step < set.steps; ++step) {
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      const size_t i = size_t{step} * shape.layers + layer;
      LayerTensors& t = tensors[layer];
      want[i].q = through(random_floats(rng, kv * shape.q_heads / shape.kv_heads), set.caller);
      const auto k = through(random_floats(rng, kv), set.caller);
      const auto v = through(random_floats(rng, kv), set.caller);
      t.q.write(want[i].q);
      t.k.write(k);
      t.v.write(v);
      t.out.write(std::vector<float>(want[i].q.size(), NAN));
      t.lse.write(std::vector<float>(shape.q_heads, NAN));
      if (set.appends) {
        const Token token{through(k, shape.dtype), through(v, shape.dtype)};
        want[i].k = token.k;
        want[i].v = token.v;
        want[i].left = truth[layer].take(token);
      }
      resident_states[i] = truth[layer].attend(want[i].q);
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    if (graph) {
      graph.launch();
    } else {
      for (uint32_t layer = 0; layer < shape.layers; ++layer) enqueue(layer);
    }
    steps.synchronize(stream.get());
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      const size_t i = size_t{step} * shape.layers + layer;
      out[i] = tensors[layer].out.read();
      lse[i] = tensors[layer].lse.read();
    }
  }
  host.join();
  ASSERT_TRUE(host.served_all());
  std::string text;
  EXPECT_EQ(steps.failure(text), Status::ok) << text;
  EXPECT_EQ(steps.merges(), set.steps * shape.layers);

  const double allowed = tolerance(shape.dtype, set.caller);
  for (uint32_t step = 0; step < set.steps; ++step) {
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      SCOPED_TRACE("step " + std::to_string(step) + ", layer " + std::to_string(layer));
      const size_t i = size_t{step} * shape.layers + layer;
      const Host::Seen& seen = host.seen(step, layer);
      EXPECT_EQ(seen.q, want[i].q);
      EXPECT_EQ(seen.k, want[i].k);
      EXPECT_EQ(seen.v, want[i].v);
      ASSERT_EQ(seen.left.size(), want[i].left.size());
      for (size_t t = 0; t < seen.left.size(); ++t) {
        EXPECT_EQ(seen.left[t].k, want[i].left[t].k);
        EXPECT_EQ(seen.left[t].v, want[i].left[t].v);
      }
      const States all = merged(resident_states[i], seen.answer);
      EXPECT_LT(worst_error(out[i], all), allowed);
      EXPECT_LT(worst_lse(lse[i], all), allowed);
    }
  }
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    EXPECT_EQ(resident->sink_count(layer), truth[layer].sink.size());
    EXPECT_EQ(resident->window_count(layer), truth[layer].window.size());
  }
}

struct Case {
  uint32_t dim;
  DType session, caller;
};

class CudaStreamSteps : public testing::TestWithParam<Case> {};

TEST_P(CudaStreamSteps, MergeWhatTheHostDelivers) {
  const Case c = GetParam();
  KEYHOLE_NEEDS_GPU();
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  for (uint32_t group : {1U, 3U, 4U, 8U, 16U}) {
    SCOPED_TRACE("group " + std::to_string(group));
    Setting set;
    set.caller = c.caller;
    set.way = group == 4 ? Way::graph : (group % 2 == 0 ? Way::step : Way::begin_end);
    set.gap = group % 3;
    set.before = std::uniform_int_distribution<uint32_t>(0, 80)(rng);
    run_steps(small_shape(c.dim, c.session, group), set, rng());
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, CudaStreamSteps,
    testing::Values(Case{64, DType::f16, DType::f16}, Case{80, DType::bf16, DType::bf16},
                    Case{96, DType::f16, DType::f32}, Case{128, DType::f16, DType::f16},
                    Case{128, DType::bf16, DType::bf16}, Case{128, DType::f32, DType::f32},
                    Case{256, DType::f16, DType::bf16}, Case{256, DType::f32, DType::f16},
                    Case{64, DType::f32, DType::f32}, Case{128, DType::bf16, DType::f32},
                    Case{512, DType::f16, DType::f16}, Case{512, DType::f32, DType::bf16},
                    Case{512, DType::bf16, DType::f32}),
    [](const auto& shape) {
      return std::to_string(shape.param.dim) + "_" + dtype_name(shape.param.session) + "_" +
             dtype_name(shape.param.caller);
    });

TEST(CudaStreamSteps, FillTheSinkThenTheWindowThenFallBack) {
  KEYHOLE_NEEDS_GPU();
  for (Way way : {Way::step, Way::graph}) {
    ResidentShape shape = small_shape(64, DType::f16, 2);
    shape.window_capacity = 9;
    shape.window = 6;
    Setting set;
    set.way = way;
    set.steps = 60;  // five times around
    run_steps(shape, set, 17);
    shape.window = 0;
    run_steps(shape, set, 18);
    shape.window = 9;  // each step drops one
    run_steps(shape, set, 19);
    shape.sink = 0;
    shape.window_capacity = shape.window = 1;
    run_steps(shape, set, 20);
  }
}

TEST(CudaStreamSteps, WithoutANewToken) {
  KEYHOLE_NEEDS_GPU();
  Setting set;
  set.appends = false;
  for (uint32_t before : {0U, 3U, 64U}) {
    set.before = before;
    run_steps(small_shape(128, DType::f16, 4), set, 21);
  }
}

TEST(CudaStreamSteps, ManyLayersInOneGraph) {
  KEYHOLE_NEEDS_GPU();
  ResidentShape shape = small_shape(128, DType::f16, 4, 8);
  shape.layers = 32;
  Setting set;
  set.way = Way::graph;
  set.steps = 20;
  set.before = 70;
  run_steps(shape, set, 23);
}

TEST(CudaStreamSteps, HostLaunchGivesTheSame) {
  KEYHOLE_NEEDS_GPU();
  Setting set;
  set.config.probe_signal = false;
  set.config.signal = Signal::host_launch;
  for (Way way : {Way::step, Way::begin_end}) {
    set.way = way;
    run_steps(small_shape(128, DType::f16, 4), set, 29);
  }
}

TEST(CudaStreamSteps, AStalledHostIsWaitedFor) {
  KEYHOLE_NEEDS_GPU();
  Setting set;
  set.delay = milliseconds(30);
  set.steps = 2;
  for (Way way : {Way::step, Way::begin_end, Way::graph}) {
    set.way = way;
    run_steps(small_shape(128, DType::f16, 4), set, 31);
  }
}

TEST(CudaStreamSteps, SessionsDoNotHoldUpEachOther) {
  KEYHOLE_NEEDS_GPU();
  // One waits for its host with more steps behind it; the other's host comes first.
  const ResidentShape shape = small_shape(128, DType::f16, 4);
  CudaConfig config;
  config.timeout_ms = 5000;
  struct Session {
    Session(const ResidentShape& s, const CudaConfig& c)
        : resident(make_cuda_resident(s, c)),
          steps(*resident->stream_steps()),
          t(s, DType::f16, 0) {
      std::mt19937 rng(1);
      t.q.write(random_floats(rng, size_t{s.q_heads} * s.head_dim));
      t.k.write(random_floats(rng, size_t{s.kv_heads} * s.head_dim));
      t.v.write(random_floats(rng, size_t{s.kv_heads} * s.head_dim));
      check(cudaDeviceSynchronize(), "filled");
    }
    void step() {
      const TensorView k = t.k.rows(), v = t.v.rows();
      steps.step(0, t.q.rows(), &k, &v, {}, t.out.rows(), t.lse.floats(), stream.get());
    }
    void serve(const ResidentShape& s, uint32_t sequence) {
      const std::atomic<bool> stop{false};
      Published published;
      ASSERT_TRUE(steps.await(0, sequence, 1000, 3'000'000, stop, published));
      for (uint32_t h = 0; h < s.kv_heads; ++h) {
        const StateView slot = steps.host_slot(0, h);
        std::fill_n(slot.o, size_t{4} * s.head_dim, 0.0F);
        std::fill_n(slot.lse, 4, kMinusInf);
        steps.deliver(0, h, sequence);
      }
    }
    std::unique_ptr<Resident> resident;
    StreamSteps& steps;
    OwnedStream stream;
    LayerTensors t;
  };
  Session first(shape, config), second(shape, config);
  if (first.steps.signal() != Signal::device_wait) {
    GTEST_SKIP() << "kernels are launched one at a time";
  }
  for (int i = 0; i < 3; ++i) first.step();
  second.step();
  second.serve(shape, 1);
  second.steps.synchronize(second.stream.get());
  for (uint32_t i = 1; i <= 3; ++i) first.serve(shape, i);
  first.steps.synchronize(first.stream.get());
  std::string text;
  EXPECT_EQ(first.steps.failure(text), Status::ok) << text;
  EXPECT_EQ(second.steps.failure(text), Status::ok) << text;
}

class CudaStreamStepsAlone : public testing::Test {
 protected:
  void start(CudaConfig config) {
    shape_ = small_shape(128, DType::f16, 4);
    resident_ = make_cuda_resident(shape_, config);
    steps_ = resident_->stream_steps();
    stream_ = std::make_unique<OwnedStream>();
    t_ = std::make_unique<LayerTensors>(shape_, DType::f16, 0);
    std::mt19937 rng(1);
    t_->q.write(random_floats(rng, size_t{shape_.q_heads} * shape_.head_dim));
    t_->k.write(random_floats(rng, size_t{shape_.kv_heads} * shape_.head_dim));
    t_->v.write(random_floats(rng, size_t{shape_.kv_heads} * shape_.head_dim));
    t_->out.write(std::vector<float>(size_t{shape_.q_heads} * shape_.head_dim, 1.0F));
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  void step(uint32_t layer = 0) {
    const TensorView k = t_->k.rows(), v = t_->v.rows();
    steps_->step(layer, t_->q.rows(), &k, &v, {}, t_->out.rows(), t_->lse.floats(), stream_->get());
  }
  void expect_all_nan() {
    for (float x : t_->out.read()) ASSERT_TRUE(std::isnan(x));
    for (float x : t_->lse.read()) ASSERT_TRUE(std::isnan(x));
  }
  void answer(uint32_t layer, uint32_t sequence) {
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      const StateView slot = steps_->host_slot(layer, h);
      std::fill_n(slot.o, size_t{4} * shape_.head_dim, 0.0F);
      std::fill_n(slot.lse, 4, kMinusInf);
      steps_->deliver(layer, h, sequence);
    }
  }

  ResidentShape shape_;
  std::unique_ptr<Resident> resident_;
  StreamSteps* steps_ = nullptr;
  std::unique_ptr<OwnedStream> stream_;
  std::unique_ptr<LayerTensors> t_;
};

TEST_F(CudaStreamStepsAlone, TimeOutInsteadOfHanging) {
  KEYHOLE_NEEDS_GPU();
  CudaConfig config;
  config.timeout_ms = 50;
  start(config);
  if (steps_->signal() != Signal::device_wait) GTEST_SKIP() << "kernels are launched one at a time";
  const auto begin = steady_clock::now();
  step();
  steps_->synchronize(stream_->get());
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(5));
  expect_all_nan();
  std::string text;
  EXPECT_EQ(steps_->failure(text), Status::timeout);
  EXPECT_NE(text.find("50 ms"), std::string::npos) << text;
  EXPECT_NE(text.find("step 1 of layer 0"), std::string::npos) << text;
  EXPECT_EQ(steps_->failure(text), Status::ok);  // said once
  EXPECT_GE(steps_->wait_nanoseconds(), 50'000'000U);

  answer(0, 2);  // the next step is not disturbed
  step();
  steps_->synchronize(stream_->get());
  for (float x : t_->out.read()) ASSERT_FALSE(std::isnan(x));
  EXPECT_EQ(steps_->failure(text), Status::ok);
}

TEST_F(CudaStreamStepsAlone, GiveUpEndsTheWait) {
  KEYHOLE_NEEDS_GPU();
  CudaConfig config;
  config.timeout_ms = 60'000;
  start(config);
  if (steps_->signal() != Signal::device_wait) GTEST_SKIP() << "kernels are launched one at a time";
  const auto begin = steady_clock::now();
  step();
  std::atomic<bool> stop{false};
  Published published;
  ASSERT_TRUE(steps_->await(0, 1, 1000, 10'000'000, stop, published));
  steps_->give_up(0, 1);
  steps_->synchronize(stream_->get());
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(10));
  expect_all_nan();
  std::string text;
  EXPECT_EQ(steps_->failure(text), Status::cancelled);
  EXPECT_NE(text.find("gave it up"), std::string::npos) << text;

  step();
  ASSERT_TRUE(steps_->await(0, 2, 1000, 10'000'000, stop, published));
  answer(0, 2);
  steps_->synchronize(stream_->get());
  for (float x : t_->out.read()) ASSERT_FALSE(std::isnan(x));
}

TEST_F(CudaStreamStepsAlone, AwaitEndsByTimeAndByStop) {
  KEYHOLE_NEEDS_GPU();
  start({});
  std::atomic<bool> stop{false};
  Published published;
  EXPECT_FALSE(steps_->await(0, 1, 10, 2000, stop, published));
  stop = true;
  EXPECT_FALSE(steps_->await(0, 1, 1'000'000, 60'000'000, stop, published));
}

TEST_F(CudaStreamStepsAlone, HostLaunchTimesOutOnTheCallersThread) {
  KEYHOLE_NEEDS_GPU();
  CudaConfig config;
  config.probe_signal = false;
  config.signal = Signal::host_launch;
  config.timeout_ms = 50;
  start(config);
  const TensorView k = t_->k.rows(), v = t_->v.rows();
  steps_->begin(0, t_->q.rows(), &k, &v, {}, stream_->get());
  try {
    steps_->end(0, t_->out.rows(), nullptr, stream_->get());
    ADD_FAILURE() << "did not wait";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::timeout) << e.what();
  }
  ASSERT_EQ(cudaStreamBeginCapture(stream_->get(), cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_THROW(steps_->begin(0, t_->q.rows(), &k, &v, {}, stream_->get()), Error);
  cudaGraph_t graph = nullptr;
  (void)cudaStreamEndCapture(stream_->get(), &graph);
  if (graph != nullptr) (void)cudaGraphDestroy(graph);
}

TEST_F(CudaStreamStepsAlone, HostAndStreamStepsTakeTurns) {
  KEYHOLE_NEEDS_GPU();
  start({});
  if (steps_->signal() != Signal::device_wait) GTEST_SKIP() << "kernels are launched one at a time";
  std::mt19937 rng(3);
  std::atomic<bool> stop{false};
  Published published;
  std::vector<std::byte> k(100 * 512 * 8), v(k.size());
  std::vector<float> o(size_t{shape_.q_heads} * shape_.head_dim, NAN), lse(shape_.q_heads, NAN);
  for (uint32_t i = 1; i <= 200; ++i) {
    step();
    ASSERT_TRUE(steps_->await(0, i, 1000, 10'000'000, stop, published));
    answer(0, i);
    steps_->update_host_copy(0, published, k.data(), v.data());
    // At once, with the stream's kernel perhaps not ended: what the host sees must already hold the token.
    const auto q = random_floats(rng, o.size());
    resident_->attend_begin(0, q.data());
    resident_->attend_end({o.data(), lse.data()});
    const Rows rows = rows_of(random_tokens(rng, shape_, 1), shape_.dtype);
    if (resident_->window_count(0) > 60) resident_->evict(0, k.data(), v.data(), 30);
    if (resident_->sink_count(0) == shape_.sink) {
      resident_->append_window(0, rows.k.data(), rows.v.data(), 1);
    }
    const uint32_t tokens = resident_->sink_count(0) + resident_->window_count(0);
    std::vector<std::byte> all_k(tokens * size_t{512}), all_v(all_k.size());
    resident_->read(0, all_k.data(), all_v.data());
    Truth truth(shape_);
    for (uint32_t t = 0; t < tokens; ++t) {
      Token token;
      for (size_t d = 0; d < 256; ++d) {
        token.k.push_back(get(all_k.data(), t * 256 + d, DType::f16));
        token.v.push_back(get(all_v.data(), t * 256 + d, DType::f16));
      }
      truth.sink.push_back(token);
    }
    resident_->attend_begin(0, q.data());
    resident_->attend_end({o.data(), lse.data()});
    const States want = truth.attend(q);
    ASSERT_LT(worst_error(o, want), 1e-4);
    ASSERT_LT(worst_lse(lse, want), 1e-4);
  }
  steps_->synchronize(stream_->get());
}

}  // namespace
}  // namespace keyhole::gpu::test

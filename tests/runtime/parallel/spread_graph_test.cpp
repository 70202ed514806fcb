// Graphs of steps of spread sessions: which rank appends changes from block to block, and a graph is captured again
// there; what the ranks see when one of them cannot launch its graph.
#include <atomic>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "tests/runtime/parallel/spread_stream_fixture.h"

namespace keyhole::test {
namespace {

/// A token in both layers, number 30: what the ranks' states need of the device's memory is there then.
void take_memory(keyhole_session* s, Numbers& numbers) {
  const Shape shape(small_engine());
  Step step(shape, numbers, true);
  for (uint32_t l = 0; l < 2; ++l) ASSERT_OK(step.enqueue(s, shape, l, false));
  ASSERT_OK(keyhole_session_synchronize(s));
}

TEST(SpreadGraph, AGraphIsCapturedAgainAtTheEndsOfARanksBlocks) {
  const Shape shape(small_engine());
  on_two_ranks([&](uint32_t r, StreamRank& its, keyhole_session* s, Numbers& numbers) {
    take_memory(s, numbers);
    Graph graph(shape, 2, 1, numbers);
    // Token 31 is rank 1's, 32 to 39 are rank 0's, 40 to 47 rank 1's.
    std::vector<uint32_t> captures;
    for (uint32_t t = 31; t < 48; ++t) {
      graph.launch(its, s, numbers);
      its.device->stream.wait();
      captures.push_back(graph.captures());
      EXPECT_EQ(layer_tokens(s, 1).total, t + 1);
      for (const auto& step : graph.steps()) EXPECT_TRUE(std::isfinite(step->o[0]));
    }
    std::vector<uint32_t> wanted(1, 1);
    wanted.resize(9, 2);
    wanted.resize(17, 3);
    EXPECT_EQ(captures, wanted) << "rank " << r;
    EXPECT_OK(keyhole_session_synchronize(s));
  });
}

TEST(SpreadGraph, ARankCapturesAgainWhileTheOthersWaitForItsStates) {
  const Shape shape(small_engine());
  std::atomic<bool> is_launched = false;
  on_two_ranks([&](uint32_t r, StreamRank& its, keyhole_session* s, Numbers& numbers) {
    take_memory(s, numbers);
    Graph graph(shape, 2, 1, numbers);
    graph.launch(its, s, numbers);
    its.device->stream.wait();
    graph.launch(
        its, s, numbers);  // the first token of rank 0's block: the graph is good for the next ones
    its.device->stream.wait();
    EXPECT_EQ(graph.captures(), 2U);
    if (r == 1) {
      while (!is_launched) std::this_thread::yield();
      // A capture in which a call fails takes the graph's place.
      Rows wide(shape.o(1) * 2);
      const int64_t strides[] = {2 * shape.dv, 1};
      auto out = on_device(wide, {shape.hq, shape.dv});
      std::copy_n(strides, 2, out.strides);
      const auto q = on_device(graph.steps()[0]->q, {shape.hq, shape.d});
      its.device->stream.begin_capture();
      EXPECT_EQ(keyhole_session_attend(s, 0, &q, nullptr, nullptr, &out, nullptr),
                KEYHOLE_UNSUPPORTED);
      its.device->stream.end_capture();
    }
    graph.launch(its, s, numbers);
    is_launched = true;
    its.device->stream.wait();
    EXPECT_EQ(graph.captures(), r == 1 ? 3U : 2U);
    for (const auto& step : graph.steps()) EXPECT_TRUE(std::isfinite(step->o[0]));
    EXPECT_OK(keyhole_session_synchronize(s));
  });
}

TEST(SpreadGraph, AGraphEndsAtMaxTokensOfTheTextOnAllRanks) {
  const Shape shape(small_engine());
  on_two_ranks([&](uint32_t, StreamRank& its, keyhole_session* s, Numbers& numbers) {
    take_memory(s, numbers);
    const uint32_t most = small_session().max_tokens;
    Model model(small_engine());
    for (uint32_t l = 0; l < 2; ++l) {
      prefill_both(s, model, shape, l, most - 32, numbers);
    }
    ASSERT_OK(keyhole_session_synchronize(s));
    Graph graph(shape, 2, 1, numbers);
    graph.launch(its, s, numbers);
    its.device->stream.wait();
    EXPECT_EQ(keyhole_session_announce(s), KEYHOLE_INVALID_ARGUMENT);
    expect_error_text("max_tokens");
    EXPECT_EQ(layer_tokens(s, 1).total, most);
    EXPECT_OK(keyhole_session_synchronize(s));
  });
}

/// Launches the graph for tokens 31 and 32; then the device of rank 1 fails in a step, so that it cannot make the
/// graph's steps.
void launch_and_lose(Graph& graph, uint32_t r, StreamRank& its, keyhole_session* s,
                     Numbers& numbers) {
  for (int i = 0; i < 2; ++i) {
    graph.launch(its, s, numbers);
    its.device->stream.wait();
  }
  const Shape shape(small_engine());
  Step lost(shape, numbers, false);
  its.device->faults.fails = r == 1;
  EXPECT_EQ(lost.enqueue(s, shape, 0, false), r == 1 ? KEYHOLE_DEVICE_ERROR : KEYHOLE_OK);
  its.device->faults.fails = false;
  its.device->stream.wait();
  EXPECT_TRUE(std::isnan(lost.o[0]));
}

/// The graph's answers are NaN, and all ranks have the error of rank 1.
void expect_lost(const Graph& graph, keyhole_session* s) {
  for (const auto& step : graph.steps()) EXPECT_TRUE(std::isnan(step->o[0]));
  EXPECT_EQ(keyhole_session_synchronize(s), KEYHOLE_DEVICE_ERROR);
  EXPECT_TRUE(std::string(keyhole_last_error()).starts_with("rank 1: ")) << keyhole_last_error();
}

TEST(SpreadGraph, AGraphThatARankCannotLaunchIsNanOnAllAndEveryRanksErrorWhenTheyMeet) {
  const Shape shape(small_engine());
  on_two_ranks([&](uint32_t r, StreamRank& its, keyhole_session* s, Numbers& numbers) {
    take_memory(s, numbers);
    Graph graph(shape, 2, 1, numbers);
    launch_and_lose(graph, r, its, s, numbers);
    for (const auto& step : graph.steps()) step->refill(shape, numbers);
    EXPECT_EQ(keyhole_session_announce(s), r == 1 ? KEYHOLE_DEVICE_ERROR : KEYHOLE_OK);
    if (r == 0) its.device->stream.launch_graph();
    its.device->stream.wait();
    EXPECT_EQ(layer_tokens(s, 0).total, 34U);
    expect_lost(graph, s);
    EXPECT_EQ(keyhole_session_announce(s), KEYHOLE_DEVICE_ERROR);
  });
}

TEST(SpreadGraph, ARankWhoseCaptureFailsKeepsStepBySingleCalls) {
  const Shape shape(small_engine());
  on_two_ranks([&](uint32_t r, StreamRank& its, keyhole_session* s, Numbers& numbers) {
    take_memory(s, numbers);
    Graph graph(shape, 2, 1, numbers);
    launch_and_lose(graph, r, its, s, numbers);
    if (r == 0) {
      graph.launch(its, s, numbers);
    } else {
      // A graph of one layer is all that it has: neither its tokens nor its gathers are counted.
      its.device->stream.begin_capture();
      EXPECT_EQ(graph.steps()[0]->enqueue(s, shape, 0, false), KEYHOLE_DEVICE_ERROR);
      its.device->stream.end_capture();
      EXPECT_EQ(keyhole_session_announce(s), KEYHOLE_DEVICE_ERROR);
      EXPECT_EQ(layer_tokens(s, 0).total, 33U);
      for (uint32_t l = 0; l < 2; ++l) {
        EXPECT_EQ(graph.steps()[l]->enqueue(s, shape, l, false), KEYHOLE_DEVICE_ERROR);
      }
    }
    its.device->stream.wait();
    EXPECT_EQ(layer_tokens(s, 1).total, 34U);
    expect_lost(graph, s);
  });
}

TEST(SpreadGraph, RefusesGraphsWithoutAStepBeforeAndGapsByName) {
  const Shape shape(small_engine());
  on_two_ranks([&](uint32_t, StreamRank& its, keyhole_session* s, Numbers& numbers) {
    Step step(shape, numbers, true);
    EXPECT_EQ(keyhole_session_announce(s), KEYHOLE_INVALID_ARGUMENT);  // nothing was captured
    uint64_t number = 0;
    EXPECT_EQ(keyhole_session_get_graph(s, &number), KEYHOLE_UNSUPPORTED);
    EXPECT_EQ(keyhole_session_announce_graph(s, 1), KEYHOLE_UNSUPPORTED);
    its.device->stream.begin_capture();
    EXPECT_EQ(step.enqueue(s, shape, 0, false), KEYHOLE_INVALID_ARGUMENT);
    expect_error_text("memory of the ranks' states");
    its.device->stream.end_capture();
    EXPECT_EQ(keyhole_session_announce(s), KEYHOLE_INVALID_ARGUMENT);
    expect_error_text("capture it again");
    Rows wide(shape.o(1) * 2);
    const int64_t strides[] = {2 * shape.dv, 1};
    const auto q = on_device(step.q, {shape.hq, shape.d});
    auto out = on_device(wide, {shape.hq, shape.dv});
    std::copy_n(strides, 2, out.strides);
    EXPECT_EQ(keyhole_session_attend(s, 0, &q, nullptr, nullptr, &out, nullptr),
              KEYHOLE_UNSUPPORTED);
    expect_error_text("gaps");
    // The next call still finds all ranks together.
    ASSERT_OK(step.enqueue(s, shape, 0, false));
    ASSERT_OK(keyhole_session_synchronize(s));
  });
  StreamRanks ranks(1);
  StreamRank alone(ranks, 0, small_engine(1), 8, false);
  const SessionPtr s = make_session(alone.engine(), small_session());
  Numbers numbers(3);
  Step step(shape, numbers, true);
  ASSERT_OK(step.enqueue(s.get(), shape, 0, false));
  alone.device->stream.begin_capture();
  EXPECT_EQ(step.enqueue(s.get(), shape, 0, false), KEYHOLE_UNSUPPORTED);
  expect_error_text("all_gather_on_stream");
  alone.device->stream.end_capture();
}

TEST(SpreadGraph, AStepOfAGraphEndsInTheCaptureThatItBeganIn) {
  const Shape shape(small_engine());
  on_two_ranks([&](uint32_t, StreamRank& its, keyhole_session* s, Numbers& numbers) {
    Step step(shape, numbers, true);
    ASSERT_OK(step.enqueue(s, shape, 0, false));
    const auto q = on_device(step.q, {shape.hq, shape.d});
    const auto k = on_device(step.k, {shape.hkv, shape.d}),
               v = on_device(step.v, {shape.hkv, shape.dv});
    const auto out = on_device(step.o, {shape.hq, shape.dv});
    FakeStream& stream = its.device->stream;
    ASSERT_OK(keyhole_session_synchronize(s));
    stream.begin_capture();
    ASSERT_OK(keyhole_session_attend_begin(s, 0, &q, &k, &v));
    stream.end_capture();
    EXPECT_EQ(keyhole_session_attend_end(s, &out, nullptr), KEYHOLE_INVALID_ARGUMENT);
    EXPECT_EQ(keyhole_session_announce(s), KEYHOLE_INVALID_ARGUMENT);
    // And one that began before a capture ends after it.
    ASSERT_OK(keyhole_session_attend_begin(s, 1, &q, &k, &v));
    stream.begin_capture();
    EXPECT_EQ(keyhole_session_attend_end(s, &out, nullptr), KEYHOLE_BUSY);
    stream.end_capture();
    ASSERT_OK(keyhole_session_attend_end(s, &out, nullptr));
    ASSERT_OK(keyhole_session_synchronize(s));
    EXPECT_TRUE(std::isfinite(step.o[0]));
    EXPECT_EQ(layer_tokens(s, 0).total, 31U);
    EXPECT_EQ(layer_tokens(s, 1).total, 31U);
  });
}

}  // namespace
}  // namespace keyhole::test

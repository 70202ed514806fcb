// Steps of several sessions that wait in a group and are launched together, against double precision: sink, window and
// codes, what the host is sent, and windows that are flushed; sessions whose steps go alone beside them.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/captured_graph.h"
#include "tests/gpu/codes_session.h"

namespace keyhole::gpu::test {
namespace {

constexpr uint32_t kRounds = 4;

class StepsTogether : public testing::Test {
 protected:
  void SetUp() override {
    KEYHOLE_NEEDS_GPU();
    stream_.emplace();
  }
  /// A session with a prompt of `blocks` blocks and a window of so many tokens.
  void add(const CodesSetting& set, uint32_t blocks, uint32_t window) {
    const auto seed = static_cast<uint32_t>(sessions_.size() + 1);
    sessions_.push_back(std::make_unique<CodesSession>(set, seed, stream_->get()));
    sessions_.back()->prefill(blocks, window);
    sessions_.back()->serve(kRounds);
  }
  /// joins: how many of the sessions take their steps together.
  void enqueue(uint32_t joins) {
    const auto count = static_cast<uint32_t>(sessions_.size());
    const auto group = sessions_[0]->steps().make_group(count);
    for (uint32_t step = 0; step < CodesSetting{}.steps; ++step) {
      for (uint32_t layer = 0; layer < sessions_[0]->shape().layers; ++layer) {
        for (const auto& s : sessions_) s->enqueue_step(step, layer, group.get());
        ASSERT_EQ(group->count(), joins);
        std::vector<std::exception_ptr> errors(joins, std::make_exception_ptr(0));
        group->launch(errors);
        EXPECT_EQ(group->count(), 0U);
        for (const auto& error : errors) ASSERT_EQ(error, nullptr);
      }
    }
  }
  void round(uint32_t joins, bool in_graph) {
    for (const auto& s : sessions_) s->prepare_round();
    if (HasFatalFailure()) return;
    if (!in_graph) {
      enqueue(joins);
    } else {
      if (!graph_) {
        graph_ =
            CapturedGraph(stream_->get(), cudaStreamCaptureModeGlobal, [&] { enqueue(joins); });
      }
      graph_.launch();
    }
    for (size_t i = 0; i < sessions_.size(); ++i) {
      SCOPED_TRACE("session " + std::to_string(i) + " of " + std::to_string(sessions_.size()));
      sessions_[i]->expect_round();
    }
  }
  /// joins: sessions that do not go alone.
  void run(uint32_t joins, bool in_graph) {
    round(joins, in_graph);
    round(joins, in_graph);
    for (const auto& s : sessions_) s->flush();
    round(joins, in_graph);
    for (const auto& s : sessions_) s->truncate(1);
    round(joins, in_graph);
    sessions_.clear();
  }
  [[nodiscard]] static bool can_join() { return kernels_major(0) >= 9; }

  std::optional<OwnedStream> stream_;
  std::vector<std::unique_ptr<CodesSession>> sessions_;
  CapturedGraph graph_;
};

TEST_F(StepsTogether, OfSessionsOfOneKind) {
  for (const uint32_t count : {2U, 3U, 16U, 17U}) {
    for (uint32_t i = 0; i < count; ++i) add({}, i % 5, 256 + i % 30);
    run(can_join() ? count : 0, false);
    if (HasFailure()) return;
  }
}

TEST_F(StepsTogether, InGraphs) {
  for (uint32_t i = 0; i < 17; ++i) add({}, 4 - i % 5, 256 + i % 30);
  run(can_join() ? 17 : 0, true);
}

TEST_F(StepsTogether, OfManyKinds) {
  CodesSetting set;
  uint32_t joins = 0;
  const auto add_two = [&](bool join) {
    add(set, 3, 270);
    add(set, 1, 256);
    if (join && can_join()) joins += 2;
  };
  add_two(true);
  set.group = 8;
  add_two(true);
  set.bits = 4;
  set.exact_rows = 64;
  add_two(true);
  set.group = 3;
  set.dim = 64;
  set.dtype = DType::bf16;
  set.caller = DType::f32;
  set.sinks = true;
  add_two(true);
  set = {};
  set.int8 = true;
  set.softcap = 15.0F;
  set.exact_rows = 0;
  add_two(true);
  // These go alone: heads of 80 and 256 components, groups of 16, rows that the host reads.
  set = {};
  set.dim = 80;
  add_two(false);
  set.dim = 256;
  add_two(false);
  set = {};
  set.group = 16;
  add_two(false);
  set = {};
  set.rows_by_host = true;
  add_two(false);
  run(joins, false);
}

TEST_F(StepsTogether, OnStreamsOfTheirOwn) {
  const OwnedStream other;
  for (uint32_t i = 0; i < 5; ++i) {
    sessions_.push_back(std::make_unique<CodesSession>(CodesSetting{}, i,
                                                       i % 2 == 0 ? stream_->get() : other.get()));
    sessions_.back()->prefill(i % 3 + 1, 270);
    sessions_.back()->serve(kRounds);
  }
  run(can_join() ? 5 : 0, false);
}

}  // namespace
}  // namespace keyhole::gpu::test

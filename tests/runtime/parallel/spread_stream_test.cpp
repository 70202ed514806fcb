// Spread sessions with tensors in device memory: ranks are threads with a device and a stream each, beside attention in
// double precision over the whole text; and what all of them see when one fails or does not come.
#include <chrono>
#include <cmath>

#include "keyhole/batch.h"
#include "keyhole/save.h"
#include "tests/runtime/parallel/spread_stream_fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

/// One rank's part of a random conversation: every rank draws the same. Returns all answers.
class Conversation {
 public:
  Conversation(StreamRanks& ranks, uint32_t rank, uint64_t seed, std::string path)
      : numbers_(seed), path_(std::move(path)) {
    const uint32_t blocks[] = {1, 3, 16, 64};
    const uint32_t block = blocks[numbers_.below(4)];
    layers_.resize(config_.layers);
    if (numbers_.below(3) == 0) {
      for (keyhole_layer_config& layer : layers_) keyhole_layer_config_init(&layer, &config_);
      layers_[0].window = 9;
      layers_[0].window_slack = 200;
      config_.layer_configs = layers_.data();
      config_.layer_count = config_.layers;
    }
    gathers_ = numbers_.below(3) != 0;
    rank_ = std::make_unique<StreamRank>(ranks, rank, config_, block, gathers_);
    keyhole_session_config sc = small_session();
    sc.mode = numbers_.below(2) == 0 ? KEYHOLE_MODE_EXACT : KEYHOLE_MODE_INDEXED;
    if (numbers_.below(2) == 0) sc.index = "codes";
    sc.append_mode = KEYHOLE_APPEND_IN_STEP;
    session_ = make_session(rank_->engine(), sc);
    model_ = std::make_unique<Model>(config_);
  }

  Rows run(uint32_t turns) {
    for (uint32_t turn = 0; turn < turns && !testing::Test::HasFatalFailure(); ++turn) {
      SCOPED_TRACE("turn " + std::to_string(turn));
      take_turn();
      EXPECT_EQ(layer_tokens(session_.get(), 1).total, model_->tokens(1));
    }
    return answers_;
  }

 private:
  void take_turn() {
    const Shape shape(config_);
    switch (numbers_.below(gathers_ ? 11 : 9)) {
      case 0: prefill(1 + numbers_.below(100)); break;
      case 1: EXPECT_OK(keyhole_session_build(session_.get(), nullptr, nullptr)); break;
      case 2: {
        const uint32_t held = model_->tokens(0);
        const uint32_t n = held - std::min(held, numbers_.below(40));
        EXPECT_OK(keyhole_session_truncate(session_.get(), n));
        model_->truncate(n);
        break;
      }
      case 3: {
        session_ = fork_of(session_.get());
        break;
      }
      case 4: {
        EXPECT_OK(keyhole_session_save(session_.get(), path_.c_str()));
        session_ = load_of(rank_->engine(), path_);
        break;
      }
      case 5: extend(1 + numbers_.below(20)); break;
      case 6: {
        // In host memory, behind steps on the stream.
        for (uint32_t l = 0; l < config_.layers && model_->tokens(l) != 0; ++l) {
          expect_exact(session_.get(), *model_, shape, l, numbers_);
        }
        break;
      }
      case 9:
      case 10: graphs(1 + numbers_.below(12), 1 + numbers_.below(2)); break;
      default: steps(1 + numbers_.below(4));
    }
  }

  void prefill(uint32_t n) {
    const Shape shape(config_);
    const bool there = numbers_.below(2) == 0;
    for (uint32_t l = 0; l < config_.layers; ++l) {
      if (!there) {
        prefill_both(session_.get(), *model_, shape, l, n, numbers_);
        continue;
      }
      const Rows k = numbers_.many(shape.kv(n)), v = numbers_.many(shape.v(n));
      const Rows q = numbers_.many(shape.q(n));
      const auto tk = on_device(k, {n, shape.hkv, shape.d});
      const auto tv = on_device(v, {n, shape.hkv, shape.dv});
      const auto tq = on_device(q, {n, shape.hq, shape.d});
      ASSERT_OK(keyhole_session_append(session_.get(), l, &tk, &tv, &tq));
      model_->append(l, k, v);
    }
  }

  /// n tokens through every layer before anybody waits.
  void steps(uint32_t n) {
    const Shape shape(config_);
    std::vector<std::unique_ptr<Step>> steps;
    bool appends = true;
    for (uint32_t i = 0; i < n * config_.layers; ++i) {
      const uint32_t layer = i % config_.layers;
      if (layer == 0) appends = numbers_.below(4) != 0 || model_->tokens(layer) == 0;
      steps.push_back(std::make_unique<Step>(shape, numbers_, appends));
      const bool halves = numbers_.below(2) == 0;
      ASSERT_OK(steps.back()->enqueue(session_.get(), shape, layer, halves));
    }
    ASSERT_OK(keyhole_session_synchronize(session_.get()));
    for (uint32_t i = 0; i < steps.size(); ++i) {
      steps[i]->expect_exact(*model_, i % config_.layers);
      keep(steps[i]->o, steps[i]->lse);
    }
  }

  /// Launches a graph of n tokens this many times, and looks at each answer before the next.
  void graphs(uint32_t launches, uint32_t n) {
    steps(1);  // takes the memory of the ranks' states
    Graph graph(Shape(config_), config_.layers, n, numbers_);
    for (uint32_t i = 0; i < launches; ++i) {
      graph.launch(*rank_, session_.get(), numbers_);
      rank_->device->stream.wait();
      for (uint32_t j = 0; j < graph.steps().size(); ++j) {
        const Step& step = *graph.steps()[j];
        step.expect_exact(*model_, j % config_.layers);
        keep(step.o, step.lse);
      }
    }
    ASSERT_OK(keyhole_session_synchronize(session_.get()));
  }

  void extend(uint32_t n) {
    const Shape shape(config_);
    const uint32_t before = model_->tokens(0);
    for (uint32_t l = 0; l < config_.layers; ++l) {
      const Rows q = numbers_.many(shape.q(n)), k = numbers_.many(shape.kv(n));
      const Rows v = numbers_.many(shape.v(n));
      Rows o(shape.o(n), NAN), lse(static_cast<size_t>(n * shape.hq), NAN);
      const auto tq = on_device(q, {n, shape.hq, shape.d});
      const auto tk = on_device(k, {n, shape.hkv, shape.d});
      const auto tv = on_device(v, {n, shape.hkv, shape.dv});
      const auto out = on_device(o, {n, shape.hq, shape.dv});
      ASSERT_OK(
          keyhole_session_extend(session_.get(), l, &tq, &tk, &tv, nullptr, &out, lse.data()));
      for (uint32_t i = 0; i < n; ++i) {
        const auto row = [&](const Rows& rows, size_t width) {
          const auto at = rows.begin() + static_cast<ptrdiff_t>(i * width);
          return Rows(at, at + static_cast<ptrdiff_t>(width));
        };
        model_->append(l, row(k, shape.kv(1)), row(v, shape.v(1)));
        std::vector<double> sums;
        const auto truth = model_->attend_all(l, row(q, shape.q(1)), sums);
        expect_near({row(o, shape.o(1)), row(lse, static_cast<size_t>(shape.hq))}, truth, sums);
      }
      keep(o, lse);
    }
    if (numbers_.below(2) == 0) return;
    const uint32_t m = numbers_.below(n + 1);
    ASSERT_OK(keyhole_session_accept(session_.get(), m, nullptr));
    model_->truncate(before + m);
  }

  void keep(const Rows& o, const Rows& lse) {
    answers_.insert(answers_.end(), o.begin(), o.end());
    answers_.insert(answers_.end(), lse.begin(), lse.end());
  }

  keyhole_engine_config config_ = small_engine(1);
  std::vector<keyhole_layer_config> layers_;
  Numbers numbers_;
  std::string path_;
  bool gathers_ = true;
  std::unique_ptr<StreamRank> rank_;
  SessionPtr session_;
  std::unique_ptr<Model> model_;
  Rows answers_;
};

TEST(SpreadStream, AnswersAsOneProcessOverTheWholeText) {
  for (uint32_t i = 0; i < cases(24); ++i) {
    const uint64_t seed = 700 + i;
    SCOPED_TRACE("seed " + std::to_string(seed));
    TemporaryFolder folder;
    StreamRanks ranks(1 + i % 4);
    std::vector<Rows> answers(ranks.host.size());
    ranks.host.run([&](uint32_t r) {
      answers[r] = Conversation(ranks, r, seed, folder / "saved").run(unless_sanitized(14, 7));
    });
    // The same bits on all ranks.
    for (const Rows& a : answers) ASSERT_EQ(a, answers[0]);
    ASSERT_FALSE(testing::Test::HasFailure());
  }
}

TEST(SpreadStream, AnErrorOfOneRankIsNanAtOnceAndEveryRanksWhenTheyMeet) {
  const Shape shape(small_engine());
  for (const bool sees_nan : {false, true}) {
    on_two_ranks([&](uint32_t r, StreamRank& its, keyhole_session* s, Numbers& numbers) {
      Step first(shape, numbers, true), second(shape, numbers, true), third(shape, numbers, true);
      ASSERT_OK(first.enqueue(s, shape, 0, false));
      // The token is rank 1's: its device fails, or its keys are not finite, which the others do not look at.
      if (sees_nan) {
        second.k[0] = NAN;
      } else if (r == 1) {
        its.device->stream.wait();
        its.device->faults.fails = true;
      }
      const keyhole_status status = second.enqueue(s, shape, 0, false);
      const keyhole_status told = r == 1 ? KEYHOLE_DEVICE_ERROR : KEYHOLE_OK;
      EXPECT_TRUE(sees_nan || status == told) << status;
      // The rank that has failed keeps step with the others.
      const keyhole_status after = third.enqueue(s, shape, 1, false);
      EXPECT_TRUE(sees_nan || after == told) << after;
      const keyhole_status wanted = sees_nan ? KEYHOLE_NOT_FINITE : KEYHOLE_DEVICE_ERROR;
      EXPECT_EQ(keyhole_session_synchronize(s), wanted) << keyhole_last_error();
      EXPECT_TRUE(std::string(keyhole_last_error()).starts_with("rank 1: "))
          << keyhole_last_error();
      EXPECT_TRUE(std::isfinite(first.o[0]));
      EXPECT_TRUE(std::isnan(second.o[0]));
      // There are no more steps, on any rank.
      EXPECT_EQ(keyhole_session_synchronize(s), wanted);
      EXPECT_EQ(third.enqueue(s, shape, 1, false), wanted);
      EXPECT_EQ(keyhole_session_build(s, nullptr, nullptr), wanted);
      EXPECT_EQ(keyhole_session_save(s, "/nowhere/at/all"), wanted);
    });
    ASSERT_FALSE(testing::Test::HasFailure());
  }
}

TEST(SpreadStream, ARankThatDoesNotComeEndsInATimeout) {
  const Shape shape(small_engine());
  StreamRanks ranks(2);
  on_two_ranks(
      [&](uint32_t r, StreamRank&, keyhole_session* s, Numbers& numbers) {
        Step together(shape, numbers, true), alone(shape, numbers, true);
        ASSERT_OK(together.enqueue(s, shape, 0, false));
        ASSERT_OK(keyhole_session_synchronize(s));
        if (r == 1) return;
        ASSERT_OK(alone.enqueue(s, shape, 0, false));
        EXPECT_EQ(keyhole_session_synchronize(s), KEYHOLE_TIMEOUT);
        expect_error_text("300 ms");
        // The ranks are lost, and nothing is left on the stream.
        EXPECT_EQ(keyhole_session_build(s, nullptr, nullptr), KEYHOLE_TIMEOUT);
        EXPECT_EQ(statistics(s).tokens, 32U);
      },
      300, &ranks);
  EXPECT_EQ(ranks.aborts, 1U);
}

TEST(SpreadStream, ASessionThatIsDestroyedWaitsForNoRankForEver) {
  const Shape shape(small_engine());
  StreamRanks ranks(2);
  on_two_ranks(
      [&](uint32_t r, StreamRank&, keyhole_session* s, Numbers& numbers) {
        Step together(shape, numbers, true), alone(shape, numbers, true);
        ASSERT_OK(together.enqueue(s, shape, 0, false));
        ASSERT_OK(keyhole_session_synchronize(s));
        const SessionPtr owner = fork_of(s);
        ASSERT_OK(together.enqueue(owner.get(), shape, 0, false));
        ASSERT_OK(keyhole_session_synchronize(owner.get()));
        if (r == 0) {
          ASSERT_OK(alone.enqueue(owner.get(), shape, 0, false));
        }
      },
      300, &ranks);
  EXPECT_EQ(ranks.aborts, 1U);
}

TEST(SpreadStream, GathersOncePerStepAndWaitsForNobody) {
  const Shape shape(small_engine());
  StreamRanks ranks(2);
  std::atomic<bool> rank_1_may_go = false;
  on_two_ranks(
      [&](uint32_t r, StreamRank&, keyhole_session* s, Numbers& numbers) {
        Step opens(shape, numbers, true);
        ASSERT_OK(opens.enqueue(s, shape, 0, false));
        ASSERT_OK(keyhole_session_synchronize(s));
        std::vector<std::unique_ptr<Step>> steps;
        for (uint32_t l = 0; l < 2; ++l) {
          steps.push_back(std::make_unique<Step>(shape, numbers, true));
        }
        // Rank 0 has enqueued the whole token before rank 1 begins.
        while (r == 1 && !rank_1_may_go) std::this_thread::yield();
        for (uint32_t l = 0; l < 2; ++l) ASSERT_OK(steps[l]->enqueue(s, shape, l, false));
        rank_1_may_go = true;
        ASSERT_OK(keyhole_session_synchronize(s));
        for (const auto& step : steps) EXPECT_TRUE(std::isfinite(step->o[0]));
      },
      0, &ranks);
  EXPECT_EQ(ranks.gathers, 6U);  // of three steps on two ranks
}

}  // namespace
}  // namespace keyhole::test

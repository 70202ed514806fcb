// Random calls of the whole C API on a device with streams that needs no GPU: steps on the stream, several of them
// under way, in captured graphs and beside steps with tensors in host memory.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "tests/runtime/faults/random_calls.h"
#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {
namespace {

/// What the calls have come to, over all seeds.
struct Seen {
  uint64_t steps = 0, launches = 0, graphs_refused = 0, failures = 0, with_codes = 0,
           sliding_failures = 0;
};

class RandomStreamCalls final : public RandomCalls {
 public:
  RandomStreamCalls(uint64_t seed, Seen& seen) : RandomCalls(seed, false), seen_(&seen) {
    // The test's device attends rows that it has codes of exactly.
    coded_ = ec_.head_dim != 256 && random_.below(3) == 0;
    constexpr keyhole_placement kPlaces[] = {KEYHOLE_PLACE_AUTO, KEYHOLE_PLACE_HOST};
    sc_.offload_placement = coded_ ? KEYHOLE_PLACE_DEVICE : kPlaces[random_.below(2)];
    sc_.tail_partition = 4 + random_.below(6);
    if (coded_) {
      sc_.index = pick_spec();
      sc_.budget = pick_budget();
      sc_.flush_block = kCodeBlock;
      sc_.window += 2;  // a graph of three tokens finds room whatever the window has
      longest_prompt_ = 600;
    } else if (random_.below(2) == 0) {
      sc_.budget = on_partitions();
    }
    ec_.values_in_keys = random_.below(4) == 0 ? 1 : 0;
  }

  void run() {
    StreamEngine device(ec_, 120000);
    device_ = &device;
    RandomCalls::run(device.handle.get());
  }

 protected:
  const char* pick_spec() override {
    if (!coded_) return RandomCalls::pick_spec();
    return random_.below(2) == 0 ? "codes:k=2,v=2" : "codes:k=4,v=4";
  }
  keyhole_budget pick_budget() override {
    keyhole_budget b;
    keyhole_budget_init(&b);
    if (coded_) {
      b.top_k = 1 + random_.below(64);
      b.tail = KEYHOLE_TAIL_CODES;
      b.attend = random_.below(2) == 0 ? KEYHOLE_ATTEND_TOPK : KEYHOLE_ATTEND_NONE;
      return b;
    }
    return random_.below(2) == 0 ? RandomCalls::pick_budget() : on_partitions();
  }
  /// The rows of all partitions.
  keyhole_budget on_partitions() {
    keyhole_budget b;
    keyhole_budget_init(&b);
    b.attend = KEYHOLE_ATTEND_NONE;
    b.tail = random_.below(2) == 0 ? KEYHOLE_TAIL_CENTROID : KEYHOLE_TAIL_SECOND;
    b.min_keys = sc_.max_tokens;
    return b;
  }

  void step(Sequence& s) override {
    switch (random_.below(10)) {
      case 0: return RandomCalls::step(s);
      case 1:
      case 2: return run_graph(s);
      case 3: ASSERT_OK(keyhole_session_set_stream(s.session.get(), &random_)); return;
      case 4: return fail_late(s);
      default:
        for (uint32_t n = 1 + random_.below(6); n > 0; --n) enqueue_token(s);
    }
  }
  void look_at(Sequence& s) override {
    if (random_.below(3) == 0) check(s);
  }
  void settle(Sequence& s) override {
    ASSERT_OK(keyhole_session_synchronize(s.session.get()));
    for (const StepUnderWay& step : s.under_way) {
      SCOPED_TRACE("layer " + std::to_string(step.layer) + " of a step on the stream");
      expect_truth(step.seen, step.o, step.lse);
    }
    s.under_way.clear();
    seen_->with_codes += statistics(s.session.get()).code_layers != 0 ? 1 : 0;
  }

 private:
  [[nodiscard]] RandomTensor device_row(uint32_t heads) {
    RandomTensor made = row(std::vector<float>(size_t{heads} * ec_.head_dim), heads);
    made.tensor.memory = KEYHOLE_DEVICE;
    return made;
  }
  [[nodiscard]] StepUnderWay new_step(uint32_t layer, bool appends) {
    return {layer,
            appends,
            device_row(ec_.q_heads),
            device_row(ec_.kv_heads),
            device_row(ec_.kv_heads),
            {std::vector<float>(shape().q(1)), std::vector<float>(ec_.q_heads)},
            {},
            {}};
  }
  /// Other numbers in the step's tensors, and what it answers to them.
  void fill(StepUnderWay& step, Sequence& s) {
    const auto q = random_.many(shape().q(1)), k = random_.many(shape().kv(1)),
               v = shape().values_of(k, random_);
    step.q.set(q);
    step.k.set(k);
    step.v.set(v);
    if (step.appends) s.model.append(step.layer, k, v);
    step.o = s.model.attend_all(step.layer, q, step.lse);
    std::fill(step.seen.o.begin(), step.seen.o.end(), NAN);
    std::fill(step.seen.lse.begin(), step.seen.lse.end(), NAN);
  }
  keyhole_status enqueue(Sequence& s, StepUnderWay& step) {
    keyhole_session* const session = s.session.get();
    const keyhole_tensor* const k = step.appends ? &step.k.tensor : nullptr;
    const keyhole_tensor* const v = step.appends ? shape().given(step.v.tensor) : nullptr;
    const keyhole_tensor out = on_device(step.seen.o, {ec_.q_heads, ec_.head_dim});
    float* const lse = step.seen.lse.data();
    seen_->steps += 1;
    if (random_.below(2) == 0) {
      return keyhole_session_attend(session, step.layer, &step.q.tensor, k, v, &out, lse);
    }
    if (const auto status =
            keyhole_session_attend_begin(session, step.layer, &step.q.tensor, k, v)) {
      return status;
    }
    EXPECT_EQ(keyhole_session_truncate(session, 0), KEYHOLE_BUSY) << "inside a step";
    EXPECT_EQ(keyhole_session_attend_begin(session, 0, &step.q.tensor, k, v), KEYHOLE_BUSY);
    return keyhole_session_attend_end(session, &out, lse);
  }

  void enqueue_token(Sequence& s) {
    for (uint32_t l = 0; l < ec_.layers && has_room(s, 0); ++l) {
      s.under_way.push_back(new_step(l, true));
      fill(s.under_way.back(), s);
      ASSERT_OK(enqueue(s, s.under_way.back()));
      if (random_.below(8) != 0) continue;
      s.under_way.push_back(new_step(l, false));
      fill(s.under_way.back(), s);
      ASSERT_OK(enqueue(s, s.under_way.back()));
    }
  }

  /// Captures some tokens, and launches the graph a few times with other calls between.
  void run_graph(Sequence& s) {
    keyhole_session* const session = s.session.get();
    if (coded_ && random_.below(2) == 0) {
      // A whole block leaves the window for one of the graph's tokens.
      const uint32_t window = layer_tokens(session, 0).window;
      const uint32_t room = sc_.window + sc_.flush_block - std::min(window, sc_.window);
      prefill(s, room - std::min(room, random_.below(8)));
    }
    settle(s);
    std::vector<StepUnderWay> steps;
    const uint32_t tokens = 1 + random_.below(3);
    for (uint32_t t = 0; t < tokens; ++t) {
      for (uint32_t l = 0; l < ec_.layers; ++l) steps.push_back(new_step(l, true));
    }
    device_->stream.begin_capture();
    for (StepUnderWay& step : steps) {
      EXPECT_OK(enqueue(s, step));
      if (random_.below(4) != 0) continue;
      EXPECT_EQ(refused_in_capture(session), KEYHOLE_BUSY);
    }
    device_->stream.end_capture();
    if (random_.below(8) == 0) return;  // and is never launched
    for (uint32_t n = random_.below(6); n > 0 && has_room(s, 4 * tokens); --n) {
      if (random_.below(4) == 0) {
        const uint32_t left = random_.below(s.model.tokens(0) + 4);
        const keyhole_status cut = keyhole_session_truncate(session, left);
        if (cut == KEYHOLE_OK) s.model.truncate(left);
        ASSERT_TRUE(cut == KEYHOLE_OK ||
                    (cut == KEYHOLE_INVALID_ARGUMENT && can_refuse_truncation_ && left != 0))
            << keyhole_last_error();
      }
      if (random_.below(4) == 0) {
        enqueue_token(s);
        settle(s);
      }
      if (random_.below(8) == 0) {
        ASSERT_OK(keyhole_session_set_mode(session, KEYHOLE_MODE_EXACT, 0));
      }
      if (random_.below(8) == 0) set_budget(s);
      const keyhole_status status = keyhole_session_announce(session);
      if (status == KEYHOLE_INVALID_ARGUMENT) {
        // The mode or the budget has changed: nothing was announced, and the graph is of no use any more.
        expect_error_text("capture it again");
        seen_->graphs_refused += 1;
        return;
      }
      ASSERT_OK(status);
      for (StepUnderWay& step : steps) fill(step, s);
      device_->stream.launch_graph();
      ASSERT_OK(keyhole_session_synchronize(session));
      for (const StepUnderWay& step : steps) {
        SCOPED_TRACE("layer " + std::to_string(step.layer) + " of a graph");
        expect_truth(step.seen, step.o, step.lse);
      }
      seen_->launches += 1;
    }
  }
  keyhole_status refused_in_capture(keyhole_session* session) {
    keyhole_session* copy = nullptr;
    switch (random_.below(6)) {
      case 0: return keyhole_session_truncate(session, 0);
      case 1: return keyhole_session_build(session, nullptr, nullptr);
      case 2: return keyhole_session_fork(session, &copy);
      case 3: return keyhole_session_synchronize(session);
      case 4: return keyhole_session_announce(session);
      default: return keyhole_session_set_stream(session, nullptr);
    }
  }

  /// A number that is not finite shows when the stream comes to its step. The session takes no more steps then; a copy
  /// has the tokens of the steps before.
  void fail_late(Sequence& s) {
    settle(s);
    const uint32_t tokens = s.model.tokens(0), broken = random_.below(ec_.layers);
    std::vector<StepUnderWay> steps;
    steps.reserve(ec_.layers);
    keyhole_status status = KEYHOLE_OK;
    for (uint32_t l = 0; l < ec_.layers && status == KEYHOLE_OK; ++l) {
      steps.push_back(new_step(l, true));
      auto k = random_.many(shape().kv(1));
      if (l == broken) k[random_.below(static_cast<uint32_t>(k.size()))] = NAN;
      steps.back().k.set(k);
      status = enqueue(s, steps.back());
    }
    if (status == KEYHOLE_OK) status = keyhole_session_synchronize(s.session.get());
    ASSERT_EQ(status, KEYHOLE_NOT_FINITE) << keyhole_last_error();
    ASSERT_EQ(keyhole_session_truncate(s.session.get(), 0), KEYHOLE_NOT_FINITE);
    keyhole_session* copy = nullptr;
    const keyhole_status forked = keyhole_session_fork(s.session.get(), &copy);
    if (forked == KEYHOLE_NOT_FINITE && window_of(broken) != 0) {
      // Without slack the window before the token is gone.
      s.session = make_session(device_->handle.get(), sc_);
      s.model.truncate(0);
      return;
    }
    ASSERT_OK(forked);
    s.session.reset(copy);
    bool slides = false;
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      // Nobody stops the stream before steps of sliding layers, or after one.
      slides = slides || window_of(l) != 0;
      const uint32_t total = layer_tokens(copy, l).total;
      const bool maybe_more = l > broken && slides && total == tokens + 1;
      ASSERT_EQ(total, tokens + (l < broken || maybe_more ? 1 : 0)) << "layer " << l;
      seen_->sliding_failures += l == broken && window_of(l) != 0 ? 1 : 0;
    }
    const keyhole_status cut = keyhole_session_truncate(copy, tokens);
    if (cut == KEYHOLE_INVALID_ARGUMENT && can_refuse_truncation_) {
      ASSERT_OK(keyhole_session_truncate(copy, 0));
      s.model.truncate(0);
    } else {
      ASSERT_OK(cut);
    }
    check(s);
    seen_->failures += 1;
  }

  Seen* seen_;
  bool coded_ = false;
  StreamEngine* device_ = nullptr;
};

TEST(RandomStreamCalls, EveryAnswerIsTheTruth) {
  Seen seen;
  const uint64_t seeds = for_random_seeds(unless_sanitized(30, 8), [&](uint64_t seed) {
    RandomStreamCalls calls(seed, seen);
    calls.run();
    return calls.heads_checked();
  });
  std::printf("%" PRIu64 " steps, %" PRIu64 " launches, %" PRIu64 " graphs refused, %" PRIu64
              " failures, %" PRIu64 " checks with codes\n",
              seen.steps, seen.launches, seen.graphs_refused, seen.failures, seen.with_codes);
  if (seeds < 60) return;  // enough for each of them
  EXPECT_GT(seen.launches, 0U);
  EXPECT_GT(seen.failures, 0U);
  EXPECT_GT(seen.sliding_failures, 0U);
  EXPECT_GT(seen.with_codes, 0U);
}

}  // namespace
}  // namespace keyhole::test

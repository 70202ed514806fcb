// Ranks of bench-step that are threads of this process: what they share, and that together they write what one process
// does.
#include "tools/commands/bench_step/step_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "tests/runtime/parallel/thread_ranks.h"
#include "tools/api/handles.h"
#include "tools/commands/bench_step/heads_runner.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

using test::CommunicatorPtr;
using test::ThreadRanks;

constexpr uint64_t kRanksContext = 300;
constexpr uint32_t kTokens = 3;
const StepShape kModel{2, 8, 4, 64};

/// Calls f on a thread for each rank of `size`.
void on_ranks(uint32_t size, bool by_heads, const std::function<void(const StepRanks&)>& f) {
  ThreadRanks threads(size);
  threads.run([&](uint32_t rank) {
    const keyhole_transport transport = threads.transport(rank);
    keyhole_communicator* made = nullptr;
    ASSERT_EQ(keyhole_communicator_create(&transport, nullptr, &made), KEYHOLE_OK);
    const CommunicatorPtr communicator(made);
    f(StepRanks(CacheRanks{made, by_heads, 0}));
  });
}

struct Steps {
  Engine engine;
  Session session;
  StepInputs inputs;
};

/// A session with a context of these heads, and what its steps bring.
Steps steps_of(const StepShape& shape) {
  static std::mutex one_at_a_time;  // rows are made with a BLAS whose threads are the process's
  const std::lock_guard lock(one_at_a_time);
  Steps steps;
  keyhole_engine_config engine;
  keyhole_engine_config_init(&engine);
  engine.layers = shape.layers;
  engine.q_heads = shape.q_heads;
  engine.kv_heads = shape.kv_heads;
  engine.head_dim = shape.head_dim;
  engine.device = KEYHOLE_DEVICE_HOST;
  engine.threads = 1;
  steps.engine = make_engine(engine);
  keyhole_session_config config;
  keyhole_session_config_init(&config);
  config.max_tokens = kRanksContext + kTokens;
  config.sink = 4;
  config.window = 32;
  config.index = "flat";
  config.budget.top_k = 10;
  steps.session = make_session(steps.engine, config);
  steps.inputs = {shape, kTokens,
                  std::vector<uint16_t>(kTokens * shape.layers * shape.token_elements())};
  const auto source = make_synthetic_source(shape.head_dim, 6);
  Team team(1);
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    const LayerData data(*source, shape, TurnKind::permute, 6, layer, kRanksContext, team);
    std::vector<uint16_t> k(kRanksContext * shape.kv_elements()), v(k.size());
    data.rows(0, kRanksContext, k.data(), v.data());
    const int64_t rows[] = {kRanksContext, shape.kv_heads, shape.head_dim};
    const keyhole_tensor tk = keyhole_tensor_host(k.data(), KEYHOLE_F16, 3, rows);
    const keyhole_tensor tv = keyhole_tensor_host(v.data(), KEYHOLE_F16, 3, rows);
    check(keyhole_session_append(steps.session.get(), layer, &tk, &tv, nullptr));
    for (uint32_t t = 0; t < kTokens; ++t) data.step(t, steps.inputs.at(t, layer));
  }
  check(keyhole_session_build(steps.session.get(), nullptr, nullptr));
  return steps;
}

/// What the steps write, and how far that is from exact attention.
struct Answers {
  std::vector<std::vector<uint16_t>> written;
  std::vector<double> errors;
  bool operator==(const Answers&) const = default;
};
Answers answers_of(StepRunner& runner, const Steps& steps, const StepRanks& ranks) {
  Answers answers;
  runner.use(steps.session.get());
  for (uint32_t t = 0; t < kTokens; ++t) {
    EXPECT_EQ(runner.run(steps.session.get(), t, kModel.layers).layers.size(), kModel.layers);
    for (uint32_t layer = 0; layer < kModel.layers; ++layer) {
      answers.written.push_back(runner.output(layer));
      const std::vector<double> errors =
          output_errors(runner, steps.inputs, steps.session.get(), t, layer, ranks);
      answers.errors.insert(answers.errors.end(), errors.begin(), errors.end());
    }
  }
  return answers;
}

TEST(StepRanks, OneProcessHasEverything) {
  const StepRanks alone;
  EXPECT_FALSE(alone.any());
  EXPECT_TRUE(alone.speaks());
  EXPECT_EQ(alone.share(kModel).kv_heads, kModel.kv_heads);
  std::vector<double> sample = {3, 1};
  alone.slowest(sample);
  EXPECT_EQ(sample, (std::vector<double>{3, 1}));
  EXPECT_EQ(alone.description(kModel, 0), "");
  EXPECT_THROW(alone.together([] { throw UsageError("as it is"); }), UsageError);
}

TEST(StepRanks, ThatShareHeadsWriteWhatOneProcessWrites) {
  const Steps all = steps_of(kModel);
  const Answers expected = answers_of(*make_host_runner(all.inputs), all, {});
  ASSERT_EQ(expected.errors.size(), kTokens * kModel.layers * kModel.q_heads);
  EXPECT_GT(expected.errors.front(), 1e-3);  // 10 keys are not everything
  for (const uint32_t size : {1U, 2U, 4U}) {
    on_ranks(size, true, [&](const StepRanks& ranks) {
      const StepShape share = ranks.share(kModel);
      EXPECT_EQ(share.kv_heads * size, kModel.kv_heads);
      EXPECT_EQ(share.first_kv_head, ranks.rank() * share.kv_heads);
      const Steps own = steps_of(share);
      EXPECT_EQ(answers_of(*make_heads_runner(own.inputs, ranks), own, ranks), expected)
          << "rank " << ranks.rank() << " of " << size;
    });
  }
}

TEST(StepRanks, AllFailWhereOneCannotAttend) {
  on_ranks(2, true, [](const StepRanks& ranks) {
    Steps own = steps_of(ranks.share(kModel));
    if (ranks.rank() == 1) own.inputs.at(0, 1)[0] = 0x7e00;  // NaN in a query of layer 1
    const auto runner = make_heads_runner(own.inputs, ranks);
    try {
      (void)runner->run(own.session.get(), 0, kModel.layers);
      ADD_FAILURE() << "rank " << ranks.rank() << " has not failed";
    } catch (const std::runtime_error& e) {
      EXPECT_TRUE(std::string(e.what()).starts_with("rank 1: ")) << e.what();
    }
    // They are in step afterwards.
    std::vector<double> sample = {1.0 + ranks.rank()};
    ranks.slowest(sample);
    EXPECT_EQ(sample.front(), 2);
  });
}

TEST(StepRanks, HeadsThatCannotBeSharedAreRefused) {
  on_ranks(3, true, [](const StepRanks& ranks) {
    try {
      (void)ranks.share(kModel);
      ADD_FAILURE();
    } catch (const UsageError& e) {
      EXPECT_STREQ(e.what(),
                   "--parallel tensor with --kv-heads 4, which 3 ranks cannot share equally; "
                   "allowed: a number of ranks that divides them");
    }
  });
  // Tokens are shared among any number.
  on_ranks(3, false, [](const StepRanks& ranks) {
    EXPECT_EQ(ranks.share(kModel).kv_heads, kModel.kv_heads);
    EXPECT_NO_THROW(ranks.check_context(1024 * 3, 512, 1023));
    EXPECT_THROW(ranks.check_context(1024 * 3, 512, 1024), UsageError);
    EXPECT_THROW(ranks.check_context(1024 * 3, 2048, 100), UsageError);
  });
}

TEST(StepRanks, TheLastHoldsTheFewestTokens) {
  for (uint32_t size = 1; size <= 4; ++size) {
    for (const uint32_t block : {1U, 3U, 8U}) {
      for (uint64_t context = 0; context < 70; ++context) {
        std::vector<uint64_t> held(size);
        for (uint64_t t = 0; t < context; ++t) ++held[t / block % size];
        EXPECT_EQ(fewest_tokens(context, block, size), *std::min_element(held.begin(), held.end()));
      }
    }
  }
}

TEST(StepRanks, TellEachOtherTheirTimes) {
  on_ranks(2, false, [](const StepRanks& ranks) {
    const bool second = ranks.rank() == 1;
    std::vector<double> sample =
        second ? std::vector<double>{1, 9, 4} : std::vector<double>{2, 3, 5};
    ranks.slowest(sample);
    EXPECT_EQ(sample, (std::vector<double>{2, 9, 5}));
    StepTiming timing;
    keyhole_statistics_init(&timing.statistics);
    timing.statistics.attends = second ? 7 : 8;
    timing.statistics.bytes_read = second ? 100 : 20;
    timing.statistics.host_bytes = second ? 5 : 6;
    timing.statistics.search_seconds = second ? 0.5 : 0.25;
    timing.statistics.attend_seconds = second ? 3 : 2;
    timing.statistics.threads = 4;
    timing.busy_bandwidth = second ? 1 : 2;
    ranks.add_up(timing);
    EXPECT_EQ(timing.statistics.attends, 8U);
    EXPECT_EQ(timing.statistics.bytes_read, 120U);
    EXPECT_EQ(timing.statistics.host_bytes, 11U);
    EXPECT_EQ(timing.statistics.search_seconds, 0.75);
    EXPECT_EQ(timing.statistics.attend_seconds, 3);
    EXPECT_EQ(timing.statistics.threads, 4U);
    EXPECT_EQ(timing.busy_bandwidth, 3);
    ASSERT_EQ(timing.ranks.size(), 2U);
    EXPECT_EQ(timing.ranks[0].host, 6U);
    EXPECT_EQ(timing.ranks[1].host, 5U);
  });
}

TEST(StepRanks, JoinTheirAudits) {
  on_ranks(2, true, [](const StepRanks& ranks) {
    keyhole_audit audit;
    keyhole_audit_init(&audit);
    audit.audits = ranks.rank() == 1 ? 30 : 10;
    audit.recall = ranks.rank() == 1 ? 1.0 : 0.5;
    audit.error_max = ranks.rank() == 1 ? 0.5 : 2;
    audit.error_median = 0.1;
    ranks.join(audit);
    EXPECT_EQ(audit.audits, 40U);
    EXPECT_DOUBLE_EQ(audit.recall, 0.875);
    EXPECT_EQ(audit.error_max, 2);
    EXPECT_TRUE(std::isnan(audit.error_median));
  });
}

TEST(StepRanks, FailTogetherWithTheTextOfTheFirst) {
  on_ranks(3, false, [](const StepRanks& ranks) {
    const auto text = [&](const char* own) -> std::string {
      try {
        ranks.together([&] {
          if (ranks.rank() != 0) throw std::runtime_error(own);
        });
      } catch (const std::runtime_error& e) {
        return e.what();
      }
      return "";
    };
    EXPECT_EQ(text("no memory"), "rank 1: no memory");
    EXPECT_EQ(text("rank 7: gone"), "rank 7: gone");  // as the library says it
    EXPECT_EQ(text(std::string(2000, 'x').c_str()), "rank 1: " + std::string(511, 'x'));
  });
}

}  // namespace
}  // namespace keyhole::tools

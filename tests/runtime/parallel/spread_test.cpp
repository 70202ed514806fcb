// A session over several ranks, which are threads here, beside attention in double precision over the whole text; and
// what the others see when a rank fails.
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <filesystem>

#include "keyhole/attention.h"
#include "keyhole/batch.h"
#include "keyhole/save.h"
#include "tests/runtime/fixture.h"
#include "tests/runtime/parallel/thread_ranks.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

CommunicatorPtr make_communicator(ThreadRanks& ranks, uint32_t rank, uint32_t timeout_ms = 0,
                                  uint32_t long_timeout_ms = 0) {
  const keyhole_transport t = ranks.transport(rank);
  keyhole_communicator_config config;
  keyhole_communicator_config_init(&config);
  config.timeout_ms = timeout_ms;
  config.long_timeout_ms = long_timeout_ms;
  keyhole_communicator* c = nullptr;
  EXPECT_OK(keyhole_communicator_create(&t, &config, &c));
  return CommunicatorPtr(c);
}

keyhole_engine_config rank_engine(keyhole_communicator* c, uint32_t block) {
  keyhole_engine_config e = small_engine(1);
  e.communicator = c;
  e.context_block = block;
  return e;
}

/// n new tokens of a layer in one call, beside the model.
void extend_both(keyhole_session* s, Model& model, const Shape& shape, uint32_t layer, uint32_t n,
                 Numbers& numbers, std::vector<float>& answers) {
  const auto k = numbers.many(shape.kv(n)), v = numbers.many(shape.v(n));
  const auto q = numbers.many(shape.q(n));
  std::vector<float> o(shape.o(n)), lse(static_cast<size_t>(n * shape.hq));
  const auto tk = tensor(k, {n, shape.hkv, shape.d}), tv = tensor(v, {n, shape.hkv, shape.dv});
  const auto tq = tensor(q, {n, shape.hq, shape.d}), out = tensor(o, {n, shape.hq, shape.dv});
  if (n == 1) {
    const auto k1 = tensor(k, {shape.hkv, shape.d}), v1 = tensor(v, {shape.hkv, shape.dv});
    const auto q1 = tensor(q, {shape.hq, shape.d}), o1 = tensor(o, {shape.hq, shape.dv});
    ASSERT_OK(keyhole_session_attend(s, layer, &q1, &k1, &v1, &o1, lse.data()));
  } else {
    ASSERT_OK(keyhole_session_extend(s, layer, &tq, &tk, &tv, nullptr, &out, lse.data()));
  }
  for (uint32_t i = 0; i < n; ++i) {
    const auto row = [&](const std::vector<float>& rows, size_t width) {
      const auto at = rows.begin() + static_cast<ptrdiff_t>(i * width);
      return std::vector<float>(at, at + static_cast<ptrdiff_t>(width));
    };
    model.append(layer, row(k, shape.kv(1)), row(v, shape.v(1)));
    std::vector<double> sums;
    const auto truth = model.attend_all(layer, row(q, shape.q(1)), sums);
    expect_near({row(o, shape.o(1)), row(lse, static_cast<size_t>(shape.hq))}, truth, sums);
  }
  answers.insert(answers.end(), o.begin(), o.end());
  answers.insert(answers.end(), lse.begin(), lse.end());
}

/// One rank's part of a random conversation: every rank draws the same. Returns all answers.
std::vector<float> converse(ThreadRanks& ranks, uint32_t rank, uint64_t seed,
                            const std::string& path) {
  Numbers numbers(seed);
  const CommunicatorPtr c = make_communicator(ranks, rank);
  const uint32_t blocks[] = {1, 3, 16, 64, 0};
  keyhole_engine_config config = rank_engine(c.get(), blocks[numbers.below(5)]);
  std::vector<float> sinks;
  if (numbers.below(2) == 0) {
    sinks = numbers.many(size_t{config.layers} * config.q_heads);
    config.sink_logits = sinks.data();
  }
  std::vector<keyhole_layer_config> layers(config.layers);
  if (numbers.below(3) == 0) {
    for (keyhole_layer_config& layer : layers) keyhole_layer_config_init(&layer, &config);
    layers[0].window = 9;
    layers[0].window_slack = 200;
    config.layer_configs = layers.data();
    config.layer_count = config.layers;
  }
  const EnginePtr engine = make_engine(config);
  keyhole_session_config sc = small_session();
  sc.mode = numbers.below(2) == 0 ? KEYHOLE_MODE_EXACT : KEYHOLE_MODE_INDEXED;
  sc.append_mode = KEYHOLE_APPEND_IN_STEP;
  SessionPtr s = make_session(engine.get(), sc);
  Model model(config);
  const Shape shape(config);
  std::vector<float> answers;
  const uint32_t turns = unless_sanitized(14, 7);
  for (uint32_t turn = 0; turn < turns; ++turn) {
    switch (numbers.below(8)) {
      case 0: {
        const uint32_t n = 1 + numbers.below(100);
        for (uint32_t l = 0; l < config.layers; ++l) {
          prefill_both(s.get(), model, shape, l, n, numbers);
        }
        break;
      }
      case 1: EXPECT_OK(keyhole_session_build(s.get(), nullptr, nullptr)); break;
      case 2: {
        const uint32_t held = model.tokens(0);
        const uint32_t n = held - std::min(held, numbers.below(40));
        EXPECT_OK(keyhole_session_truncate(s.get(), n));
        model.truncate(n);
        break;
      }
      case 3: s = fork_of(s.get()); break;
      case 4: {
        EXPECT_OK(keyhole_session_save(s.get(), path.c_str()));
        s = load_of(engine.get(), path);
        break;
      }
      default: {
        const uint32_t n = numbers.below(2) == 0 ? 1 : 1 + numbers.below(20);
        const uint32_t before = model.tokens(0);
        for (uint32_t l = 0; l < config.layers; ++l) {
          extend_both(s.get(), model, shape, l, n, numbers, answers);
        }
        if (n > 1 && numbers.below(2) == 0) {
          const uint32_t m = numbers.below(n + 1);
          EXPECT_OK(keyhole_session_accept(s.get(), m, nullptr));
          model.truncate(before + m);
        }
      }
    }
    EXPECT_EQ(layer_tokens(s.get(), 1).total, model.tokens(1));
    EXPECT_EQ(statistics(s.get()).tokens, model.tokens(1));
    if (testing::Test::HasFatalFailure()) break;
    if (model.tokens(1) != 0) expect_exact(s.get(), model, shape, 1, numbers);
  }
  return answers;
}

TEST(Spread, AnswersAsOneProcessOverTheWholeText) {
  for (uint32_t i = 0; i < cases(24); ++i) {
    const uint64_t seed = 4200 + i;
    SCOPED_TRACE("seed " + std::to_string(seed));
    TemporaryFolder folder;
    ThreadRanks ranks(1 + i % 5);
    std::vector<std::vector<float>> answers(ranks.size());
    ranks.run([&](uint32_t r) { answers[r] = converse(ranks, r, seed, folder / "saved"); });
    // The same bits on all ranks.
    for (const auto& a : answers) ASSERT_EQ(a, answers[0]);
    ASSERT_FALSE(testing::Test::HasFailure());
  }
}

/// What a session of so many ranks answers after a prompt, saved to `path`; or loaded from there where there is one.
std::vector<float> answer_of(uint32_t size, const std::string& path, bool loads) {
  ThreadRanks ranks(size);
  std::vector<float> answer;
  ranks.run([&](uint32_t r) {
    const CommunicatorPtr c = size == 1 ? nullptr : make_communicator(ranks, r);
    const EnginePtr engine = make_engine(rank_engine(c.get(), size == 1 ? 0 : 10 + size));
    Numbers numbers(5);
    const keyhole_engine_config config = small_engine();
    const Shape shape(config);
    Model model(config);
    SessionPtr s;
    if (loads) {
      s = load_of(engine.get(), path);
      numbers = Numbers(6);
    } else {
      s = make_session(engine.get(), small_session());
      for (uint32_t l = 0; l < config.layers; ++l) {
        prefill_both(s.get(), model, shape, l, 333, numbers);
      }
      const int32_t tokens[] = {1, 2, 3};
      EXPECT_OK(keyhole_session_set_identity(s.get(), "a model", tokens, 3));
      EXPECT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
      EXPECT_OK(keyhole_session_save(s.get(), path.c_str()));
      numbers = Numbers(6);
    }
    EXPECT_EQ(layer_tokens(s.get(), 0).total, 333U);
    keyhole_identity identity;
    keyhole_identity_init(&identity);
    EXPECT_OK(keyhole_session_get_identity(s.get(), &identity));
    EXPECT_STREQ(identity.model, "a model");
    const Answer a = attend_only(s.get(), shape, 1, numbers.many(shape.q(1)));
    if (r == 0) {
      answer = a.o;
      answer.insert(answer.end(), a.lse.begin(), a.lse.end());
    }
  });
  return answer;
}

TEST(Spread, LoadsOnAnotherNumberOfRanks) {
  TemporaryFolder folder;
  for (const uint32_t saved : {1U, 2U, 3U}) {
    const std::string path = folder / ("saved by " + std::to_string(saved));
    const std::vector<float> truth = answer_of(saved, path, false);
    for (const uint32_t loaded : {1U, 2U, 4U}) {
      SCOPED_TRACE(std::to_string(saved) + " to " + std::to_string(loaded));
      const std::vector<float> seen = answer_of(loaded, path, true);
      ASSERT_EQ(seen.size(), truth.size());
      if (saved == loaded) {
        ASSERT_EQ(seen, truth);
      }
      for (size_t i = 0; i < seen.size(); ++i) ASSERT_NEAR(seen[i], truth[i], 1e-4);
    }
  }
}

TEST(Spread, TheFilesOfTheRanksLieBesideWhatALinkLeadsTo) {
  TemporaryFolder folder;
  std::filesystem::create_directory(folder / "far");
  std::filesystem::create_symlink("far/saved", folder / "link");
  const std::vector<float> truth = answer_of(2, folder / "link", false);
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(files_in(folder.path()), 2U);
  EXPECT_EQ(files_in(folder / "far"), 3U);
  EXPECT_EQ(answer_of(2, folder / "link", true), truth);
  EXPECT_EQ(answer_of(2, folder / "far" / "saved", true), truth);
}

TEST(Spread, APipeIsNoPlaceForFilesOfRanks) {
  TemporaryFolder folder;
  const std::string path = folder / "fifo";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  ThreadRanks ranks(2);
  ranks.run([&](uint32_t r) {
    const CommunicatorPtr c = make_communicator(ranks, r);
    const EnginePtr engine = make_engine(rank_engine(c.get(), 8));
    const SessionPtr s = make_session(engine.get(), small_session());
    EXPECT_EQ(keyhole_session_save(s.get(), path.c_str()), KEYHOLE_IO);
    expect_error_text("no regular file");
  });
  EXPECT_EQ(files_in(folder.path()), 1U);
}

TEST(Spread, OldFilesGoWhenNewOnesAreThere) {
  TemporaryFolder folder;
  ThreadRanks ranks(3);
  ranks.run([&](uint32_t r) {
    const CommunicatorPtr c = make_communicator(ranks, r);
    const EnginePtr engine = make_engine(rank_engine(c.get(), 8));
    const SessionPtr s = make_session(engine.get(), small_session());
    for (int i = 0; i < 3; ++i)
      EXPECT_OK(keyhole_session_save(s.get(), (folder / "saved").c_str()));
  });
  EXPECT_EQ(files_in(folder.path()), 4U);  // one that names, three that are named
}

TEST(Spread, RefusesByNameWhatARankCannotDo) {
  ThreadRanks ranks(2);
  ranks.run([&](uint32_t r) {
    const CommunicatorPtr c = make_communicator(ranks, r);
    auto config = rank_engine(c.get(), 8);
    config.rope_theta = 10000.0F;
    const EnginePtr engine = make_engine(config);
    keyhole_session_config undone = small_session();
    undone.index = "ivf:rope=undo";
    keyhole_session* none = nullptr;
    EXPECT_EQ(keyhole_session_create(engine.get(), &undone, &none), KEYHOLE_UNSUPPORTED);
    expect_error_text("undoes RoPE");
    const SessionPtr s = make_session(engine.get(), small_session());
    EXPECT_EQ(keyhole_session_set_index(s.get(), "ivf:rope=undo"), KEYHOLE_UNSUPPORTED);
    EXPECT_EQ(keyhole_session_set_extend_pattern(s.get(), "dense", 1), KEYHOLE_UNSUPPORTED);
    const Shape shape(small_engine());
    std::vector<float> q(shape.q(1)), o(shape.o(1));
    const auto tq = tensor(q, {shape.hq, shape.d}), out = tensor(o, {shape.hq, shape.dv});
    EXPECT_EQ(keyhole_session_attend_offloaded(s.get(), 0, &tq, &out, nullptr),
              KEYHOLE_UNSUPPORTED);
    // They are refused whatever the arguments are.
    EXPECT_EQ(keyhole_session_remove(s.get(), 0, 1, 0), KEYHOLE_UNSUPPORTED);
    EXPECT_EQ(keyhole_session_attend_queries(s.get(), 99, nullptr, nullptr, nullptr),
              KEYHOLE_UNSUPPORTED);
    EXPECT_EQ(keyhole_session_attend_offloaded(s.get(), 99, nullptr, nullptr, nullptr),
              KEYHOLE_UNSUPPORTED);
    EXPECT_EQ(keyhole_session_attend_tokens(s.get(), 0, &tq, nullptr, nullptr, 0, &out, nullptr),
              KEYHOLE_UNSUPPORTED);
    EXPECT_EQ(keyhole_session_search_tokens(s.get(), 0, &tq, 0, nullptr, nullptr, nullptr),
              KEYHOLE_UNSUPPORTED);
    // The next call still finds all ranks together.
    Model model(small_engine());
    Numbers numbers(1);
    prefill_both(s.get(), model, shape, 0, 50, numbers);
    expect_exact(s.get(), model, shape, 0, numbers);
  });
}

TEST(Spread, AnErrorOfOneRankIsEveryRanksAndIsTakenBack) {
  ThreadRanks ranks(3);
  ranks.run([&](uint32_t r) {
    const CommunicatorPtr c = make_communicator(ranks, r);
    const EnginePtr engine = make_engine(rank_engine(c.get(), 8));
    keyhole_session_config sc = small_session();
    if (r == 1) sc.host_memory_limit = size_t{6} << 20;  // for some thousand tokens of it
    sc.max_tokens = 100000;
    sc.mode = KEYHOLE_MODE_EXACT;
    const SessionPtr s = make_session(engine.get(), sc);
    const Shape shape(small_engine());
    Model model(small_engine());
    Numbers numbers(1);
    prefill_both(s.get(), model, shape, 0, 70, numbers);
    const uint32_t n = 40000;
    const std::vector<float> rows(shape.kv(n), 1.0F);
    const auto t = tensor(rows, {n, shape.hkv, shape.d});
    EXPECT_EQ(keyhole_session_append(s.get(), 0, &t, &t, nullptr), KEYHOLE_OUT_OF_MEMORY);
    EXPECT_TRUE(std::string(keyhole_last_error()).starts_with("rank 1: ")) << keyhole_last_error();
    EXPECT_EQ(layer_tokens(s.get(), 0).total, 70U);
    expect_exact(s.get(), model, shape, 0, numbers);
    std::vector<float> answers;
    extend_both(s.get(), model, shape, 0, 30, numbers, answers);
  });
}

TEST(Spread, RefusesBlocksThatAreTooLong) {
  ThreadRanks ranks(1);
  const CommunicatorPtr c = make_communicator(ranks, 0);
  const keyhole_engine_config config = rank_engine(c.get(), (1U << 30) + 1);
  keyhole_engine* engine = nullptr;
  EXPECT_EQ(keyhole_engine_create(&config, &engine), KEYHOLE_INVALID_ARGUMENT);
  expect_error_text("context_block is 1073741825");
}

TEST(Spread, RanksWithOtherSettingsAreRefused) {
  ThreadRanks ranks(2);
  ranks.run([&](uint32_t r) {
    const CommunicatorPtr c = make_communicator(ranks, r);
    const EnginePtr engine = make_engine(rank_engine(c.get(), 8));
    keyhole_session_config sc = small_session();
    sc.budget.top_k = 100 + r;
    keyhole_session* s = nullptr;
    EXPECT_EQ(keyhole_session_create(engine.get(), &sc, &s), KEYHOLE_INVALID_ARGUMENT);
    EXPECT_EQ(s, nullptr);
    expect_error_text("other settings");
  });
}

/// A conversation with a save before and one after; the statuses of its calls up to the first failure.
keyhole_status converse_until_failure(keyhole_communicator* c, const std::string& path) {
  const EnginePtr engine = make_engine(rank_engine(c, 8));
  keyhole_session* made = nullptr;
  const keyhole_session_config sc = small_session();
  keyhole_status status = keyhole_session_create(engine.get(), &sc, &made);
  const SessionPtr s(made);
  const Shape shape(small_engine());
  const std::vector<float> rows(shape.q(40), 0.25F);
  std::vector<float> o(shape.o(40));
  const auto kv = tensor(rows, {40, shape.hkv, shape.d}), q = tensor(rows, {40, shape.hq, shape.d});
  const auto out = tensor(o, {40, shape.hq, shape.dv});
  const auto q1 = tensor(rows, {shape.hq, shape.d}), k1 = tensor(rows, {shape.hkv, shape.d});
  const auto o1 = tensor(o, {shape.hq, shape.dv});
  const auto call = [&](auto&& f) {
    if (status == KEYHOLE_OK) status = f();
  };
  for (uint32_t turn = 0; turn < 2; ++turn) {
    for (uint32_t l = 0; l < 2; ++l) {
      call([&] { return keyhole_session_append(s.get(), l, &kv, &kv, nullptr); });
    }
    call([&] { return keyhole_session_build(s.get(), nullptr, nullptr); });
    for (uint32_t l = 0; l < 2; ++l) {
      call(
          [&] { return keyhole_session_extend(s.get(), l, &q, &kv, &kv, nullptr, &out, nullptr); });
      call([&] { return keyhole_session_attend(s.get(), l, &q1, &k1, &k1, &o1, nullptr); });
    }
    call([&] { return keyhole_session_save(s.get(), path.c_str()); });
  }
  return status;
}

TEST(Spread, ARankThatDiesEndsInAStatusOnAllOthersAndTheLastSaveLoads) {
  // As long as there are messages to die at.
  for (uint32_t message = 0;; message += unless_sanitized(1, 5)) {
    SCOPED_TRACE("rank 1 dies at its message " + std::to_string(message));
    TemporaryFolder folder;
    const std::string path = folder / "saved";
    ThreadRanks ranks(3);
    ranks.kill_at(1, message);
    keyhole_status statuses[3];
    ranks.run([&](uint32_t r) {
      const CommunicatorPtr c = make_communicator(ranks, r);
      statuses[r] = converse_until_failure(c.get(), path);
      if (statuses[r] == KEYHOLE_OK) return;
      EXPECT_NE(std::string(keyhole_last_error()), "");
      // Nothing waits a second time.
      char own = 0, all[3];
      EXPECT_EQ(keyhole_communicator_gather(c.get(), &own, all, 1), statuses[r]);
    });
    if (statuses[1] == KEYHOLE_OK) {
      EXPECT_GT(message, 20U);
      break;
    }
    EXPECT_EQ(statuses[1], KEYHOLE_RANK_FAILED);
    EXPECT_EQ(statuses[0], KEYHOLE_TIMEOUT);
    EXPECT_EQ(statuses[2], KEYHOLE_TIMEOUT);
    if (!std::filesystem::exists(path)) continue;
    const EnginePtr engine = make_engine(small_engine());
    const SessionPtr s = load_of(engine.get(), path);
    const uint32_t tokens = layer_tokens(s.get(), 0).total;
    EXPECT_TRUE(tokens == 81 || tokens == 162) << tokens;
  }
}

TEST(Spread, RanksThatMakeDifferentCallsAreTold) {
  ThreadRanks ranks(2);
  ranks.run([&](uint32_t r) {
    const CommunicatorPtr c = make_communicator(ranks, r);
    const EnginePtr engine = make_engine(rank_engine(c.get(), 8));
    const SessionPtr s = make_session(engine.get(), small_session());
    const Shape shape(small_engine());
    const std::vector<float> rows(shape.kv(9), 0.5F);
    const auto t = tensor(rows, {9, shape.hkv, shape.d});
    EXPECT_EQ(r == 0 ? keyhole_session_append(s.get(), 0, &t, &t, nullptr)
                     : keyhole_session_build(s.get(), nullptr, nullptr),
              KEYHOLE_RANK_FAILED);
    expect_error_text("the same calls");
  });
}

TEST(Communicator, SumsInTheOrderOfTheRanks) {
  ThreadRanks ranks(3);
  const float parts[] = {1e8F, 1.0F, -1e8F};  // any other order gives another sum
  ranks.run([&](uint32_t r) {
    const CommunicatorPtr c = make_communicator(ranks, r);
    EXPECT_EQ(keyhole_communicator_get_rank(c.get()), r);
    EXPECT_EQ(keyhole_communicator_get_size(c.get()), 3U);
    std::vector<float> values(300001, parts[r]);
    EXPECT_OK(keyhole_communicator_sum(c.get(), values.data(), values.size()));
    EXPECT_EQ(values.front(), (1e8F + 1.0F) - 1e8F);
    EXPECT_EQ(values.back(), values.front());
    uint32_t word = 7 * r;
    EXPECT_OK(keyhole_communicator_broadcast(c.get(), &word, sizeof word, 2));
    EXPECT_EQ(word, 14U);
    EXPECT_EQ(keyhole_communicator_broadcast(c.get(), &word, sizeof word, 3),
              KEYHOLE_INVALID_ARGUMENT);
  });
}

TEST(Communicator, WaitsForNoRankLongerThanItsSettingsSay) {
  // The second rank never comes. Each setting alone is short: with the other one the test would take a minute.
  constexpr uint32_t kShort = 20, kLong = 60000;
  ThreadRanks ranks(2), others(2);
  const CommunicatorPtr of_steps = make_communicator(ranks, 0, kShort, kLong);
  char own = 0, all[2];
  EXPECT_EQ(keyhole_communicator_gather(of_steps.get(), &own, all, 1), KEYHOLE_TIMEOUT);
  const CommunicatorPtr of_work = make_communicator(others, 0, kLong, kShort);
  EXPECT_EQ(keyhole_communicator_broadcast(of_work.get(), &own, 1, 1), KEYHOLE_TIMEOUT);
}

TEST(Communicator, RefusesWhatIsNoTransportAndReleasesIt) {
  static std::atomic<int> released;
  released = 0;
  keyhole_transport t;
  keyhole_transport_init(&t);
  t.release = [](void*) { ++released; };
  keyhole_communicator* c = nullptr;
  const auto refused = [&](const char* text) {
    EXPECT_EQ(keyhole_communicator_create(&t, nullptr, &c), KEYHOLE_INVALID_ARGUMENT);
    expect_error_text(text);
  };
  refused("size is 0");
  t.size = 2;
  refused("all_gather");
  t.rank = 2;
  refused("rank is 2");
  EXPECT_EQ(released, 3);
  EXPECT_EQ(keyhole_communicator_get_size(nullptr), 1U);
}

}  // namespace
}  // namespace keyhole::test

// Sentences of the public headers that one call alone keeps: what it refuses, and what it says.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "keyhole/attention.h"
#include "keyhole/batch.h"
#include "keyhole/index.h"
#include "keyhole/parallel.h"
#include "keyhole/prefill.h"
#include "keyhole/stream.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

void expect_refusal(keyhole_status status, const char* text,
                    keyhole_status expected = KEYHOLE_INVALID_ARGUMENT) {
  EXPECT_EQ(status, expected) << keyhole_last_error();
  expect_error_text(text);
}

TEST(Promises, AnIndexGetsNoSpecThatCreateRefuses) {
  const EnginePtr engine = make_engine(small_engine());  // which knows of no RoPE
  keyhole_index* made = nullptr;
  expect_refusal(keyhole_index_create(engine.get(), "ivf:rope=undo", 0, 0, &made), "undoes RoPE");
  ASSERT_OK(keyhole_index_create(engine.get(), "flat", 0, 0, &made));
  const std::unique_ptr<keyhole_index, void (*)(keyhole_index*)> index(made, keyhole_index_destroy);
  expect_refusal(keyhole_index_set_spec(made, "ivf:rope=undo"), "undoes RoPE");
  keyhole_index_info info;
  keyhole_index_info_init(&info);
  ASSERT_OK(keyhole_index_get_info(made, &info));
  EXPECT_STREQ(info.params, "flat");
}

TEST(Promises, CodesOnTheDeviceNeedOne) {
  keyhole_engine_config ec = small_engine();
  const EnginePtr engine = make_engine(ec);
  keyhole_session_config sc;
  keyhole_session_config_init(&sc);
  sc.offload_placement = KEYHOLE_PLACE_DEVICE;
  keyhole_session* s = nullptr;
  expect_refusal(keyhole_session_create(engine.get(), &sc, &s), "device is the host");
  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  expect_refusal(keyhole_plan(&ec, &sc, 10000, 0, 0, &plan), "device is the host");
  ec.device = KEYHOLE_DEVICE_CUDA;
  EXPECT_OK(keyhole_plan(&ec, &sc, 10000, 0, 0, &plan));
}

TEST(Promises, APlanRefusesWhatNoEngineHas) {
  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  keyhole_engine_config ec = small_engine();
  ec.device = 9;
  expect_refusal(keyhole_plan(&ec, nullptr, 1000, 0, 0, &plan), "device is 9, allowed");
  ec = small_engine();
  for (const uint32_t threads : {1025U, 5000U}) {
    ec.threads = threads;
    const std::string text =
        "threads is " + std::to_string(threads) + ", allowed: 0 (one per core)..1024";
    expect_refusal(keyhole_plan(&ec, nullptr, 1000, 0, 0, &plan), text.c_str());
    keyhole_engine* e = nullptr;
    expect_refusal(keyhole_engine_create(&ec, &e), text.c_str());
  }
}

TEST(Promises, APlansIndexEndsAtAWholeSetting) {
  const keyhole_engine_config ec = small_engine();
  keyhole_session_config sc;
  keyhole_session_config_init(&sc);
  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  sc.index = "ivf:C=1024,probe=128,train=segmented,segment=16384,iters=10,seed=1234";
  ASSERT_OK(keyhole_plan(&ec, &sc, 1000, 0, 0, &plan));
  EXPECT_STREQ(plan.index, "ivf:C=1024,probe=128,train=segmented,segment=16384,iters=10,...");
  sc.index = "ivf:C=1024,probe=128";
  ASSERT_OK(keyhole_plan(&ec, &sc, 1000, 0, 0, &plan));
  EXPECT_STREQ(plan.index, sc.index);
}

TEST(Promises, NoIdIsReadBehindACountOfMoreThanThereAreTokens) {
  const keyhole_engine_config ec = small_engine();
  const Shape shape(ec);
  const EnginePtr engine = make_engine(ec);
  const SessionPtr s = make_session(engine.get(), small_session());
  Numbers numbers(3);
  Model model(ec);
  prefill_both(s.get(), model, shape, 0, 100, numbers);
  const auto q = numbers.many(shape.q(1));
  std::vector<float> o(shape.q(1)), lse(ec.q_heads);
  const auto tq = tensor(q, {shape.hq, shape.d}), out = tensor(o, {shape.hq, shape.d});
  const std::vector<uint32_t> ids = {1, 2, 3};  // a sanitizer sees who reads a fourth
  for (const uint32_t count : {101U, 0xFFFFFFFFU}) {
    for (const uint32_t head : {0U, 1U}) {
      uint32_t counts[2] = {0, 0};
      counts[head] = count;
      const std::string text =
          "counts[" + std::to_string(head) + "] is " + std::to_string(count) + ", allowed: 0..100";
      expect_refusal(
          keyhole_session_attend_tokens(s.get(), 0, &tq, ids.data(), counts, 0, &out, lse.data()),
          text.c_str());
    }
  }
  const uint32_t counts[2] = {2, 1};
  EXPECT_OK(
      keyhole_session_attend_tokens(s.get(), 0, &tq, ids.data(), counts, 0, &out, lse.data()));
}

keyhole_status alone(void* /*context*/, const void* own, void* all, size_t bytes,
                     uint32_t /*timeout_ms*/, char* /*text*/) {
  std::memcpy(all, own, bytes);
  return KEYHOLE_OK;
}

TEST(Promises, AGatherOfTooManyBytesLosesNobody) {
  keyhole_transport t;
  keyhole_transport_init(&t);
  t.size = 1;
  t.all_gather = alone;
  keyhole_communicator* made = nullptr;
  ASSERT_OK(keyhole_communicator_create(&t, nullptr, &made));
  const std::unique_ptr<keyhole_communicator, void (*)(keyhole_communicator*)> c(
      made, keyhole_communicator_destroy);
  const char own[] = "payload";
  char all[sizeof own] = {};
  // More than there are addresses, also where a header before it makes the sum small again.
  for (const size_t bytes : {SIZE_MAX, SIZE_MAX - 16, SIZE_MAX - 64, SIZE_MAX / 2}) {
    expect_refusal(keyhole_communicator_gather(made, own, all, bytes), "bytes of each of 1 ranks");
  }
  if (!kSanitized) {  // whose operator new ends the process
    expect_refusal(keyhole_communicator_gather(made, own, all, size_t{1} << 60), "",
                   KEYHOLE_OUT_OF_MEMORY);
  }
  ASSERT_OK(keyhole_communicator_gather(made, own, all, sizeof own));
  EXPECT_STREQ(all, own);
}

TEST(Promises, AForkThatFailsLeavesNoPointer) {
  const EnginePtr engine = make_engine(small_engine());
  const SessionPtr s = make_session(engine.get(), small_session());
  auto* const stale = reinterpret_cast<keyhole_session*>(uintptr_t{64});
  keyhole_session* out = stale;
  EXPECT_EQ(keyhole_session_fork(nullptr, &out), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(out, nullptr);
  const Shape shape(small_engine());
  const std::vector<float> x(shape.q(1), 1.0F);
  const auto q = tensor(x, {shape.hq, shape.d}), k = tensor(x, {shape.hkv, shape.d});
  ASSERT_OK(keyhole_session_attend_begin(s.get(), 0, &q, &k, &k));
  out = stale;
  EXPECT_EQ(keyhole_session_fork(s.get(), &out), KEYHOLE_BUSY);
  EXPECT_EQ(out, nullptr);
}

TEST(Promises, AnEngineTellsWhatAutoMeansOfRope) {
  keyhole_engine_config ec = small_engine();
  ec.rope_theta = 10000;
  ec.rope_scaling = KEYHOLE_ROPE_YARN;
  ec.rope_factor = 4;
  ec.rope_original_context = 4096;
  const auto read = [](const keyhole_engine_config& c) {
    const EnginePtr engine = make_engine(c);
    keyhole_engine_config seen;
    keyhole_engine_config_init(&seen);
    EXPECT_OK(keyhole_engine_get_config(engine.get(), &seen));
    if (seen.layer_configs == nullptr)
      return std::vector<float>{static_cast<float>(seen.rope_dim), seen.rope_beta_fast,
                                seen.rope_beta_slow, static_cast<float>(seen.rope_whole_pairs)};
    const keyhole_layer_config& last = seen.layer_configs[1];
    return std::vector<float>{static_cast<float>(last.rope_dim), last.rope_beta_fast,
                              last.rope_beta_slow, static_cast<float>(last.rope_whole_pairs)};
  };
  EXPECT_EQ(read(ec), (std::vector<float>{64, 32, 1, 1}));
  std::vector<keyhole_layer_config> layers(2);
  for (keyhole_layer_config& layer : layers) keyhole_layer_config_init(&layer, &ec);
  layers[1].head_dim = 128;
  layers[1].rope_beta_fast = 20;
  layers[1].rope_whole_pairs = -1;
  ec.layer_configs = layers.data();
  ec.layer_count = 2;
  EXPECT_EQ(read(ec), (std::vector<float>{128, 20, 1, -1}));
}

TEST(Promises, APromptsPatternIsTextAsCreateTakesIt) {
  const TemporaryFolder folder;
  const std::string path = folder / "budgets.json";
  std::ofstream(path) << R"({"keyhole_budgets": 1,
    "model": {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 64},
    "heads": [{"layer": 1, "q_head": 2, "pattern": "a-shape:first=64,near=64"}]})";
  const EnginePtr engine = make_engine(small_engine());
  keyhole_prompt* made = nullptr;
  ASSERT_OK(keyhole_prompt_create(engine.get(), "dense", &made));
  const std::unique_ptr<keyhole_prompt, void (*)(keyhole_prompt*)> p(made, keyhole_prompt_destroy);
  // Of the heads that it is for: blocks are counted of those that are not dense.
  const auto seen_by = [&](uint32_t layer) {
    const std::vector<float> q(size_t{300} * 4 * 64, 0.1F), k(size_t{300} * 2 * 64, 0.1F);
    std::vector<float> o(q.size());
    const auto tq = tensor(q, {300, 4, 64}), tk = tensor(k, {300, 2, 64}),
               out = tensor(o, {300, 4, 64});
    EXPECT_OK(keyhole_prompt_attend(made, layer, &tq, &tk, &tk, &out, nullptr, nullptr));
    uint64_t attended = 0, seen = 0;
    EXPECT_OK(keyhole_prompt_get_blocks(made, &attended, &seen));
    return seen;
  };
  ASSERT_OK(keyhole_prompt_set_pattern(made, 0, KEYHOLE_ALL, ("budgets:" + path).c_str()));
  EXPECT_EQ(seen_by(1), 0U);
  ASSERT_OK(keyhole_prompt_set_pattern(made, KEYHOLE_ALL, 2, ("budgets:" + path).c_str()));
  EXPECT_EQ(seen_by(0), 0U);
  EXPECT_GT(seen_by(1), 0U);
  expect_refusal(keyhole_prompt_set_pattern(made, 0, 0, "budgets:/none"), "none", KEYHOLE_IO);
}

// keyhole_session_remove puts another session in the place of the one that a batch is about to enter. ThreadSanitizer
// sees who looks at it before.
TEST(Promises, ABatchTouchesNoSessionBeforeItHasEnteredIt) {
  keyhole_engine_config ec = small_engine(1);
  ec.layers = 1;
  const Shape shape(ec);
  const EnginePtr engine = make_engine(ec);
  const SessionPtr s = make_session(engine.get(), small_session());
  const std::vector<float> x(20 * shape.q(1), 1.0F);
  const auto twenty = tensor(x, {20, shape.hkv, shape.d});
  ASSERT_OK(keyhole_session_append(s.get(), 0, &twenty, &twenty, nullptr));
  std::atomic<bool> ends = false;
  std::thread other([&] {
    for (int done = 0; done < 100;) {
      if (keyhole_session_append(s.get(), 0, &twenty, &twenty, nullptr) == KEYHOLE_OK &&
          keyhole_session_remove(s.get(), 5, 19, 0) == KEYHOLE_OK) {
        done += 1;
      }
      (void)!keyhole_session_truncate(s.get(), 200);
    }
    ends = true;
  });
  const auto q = tensor(x, {1, shape.hq, shape.d}), k = tensor(x, {1, shape.hkv, shape.d});
  std::vector<float> o(shape.q(1));
  const auto out = tensor(o, {1, shape.hq, shape.d});
  keyhole_session* const members[] = {s.get()};
  const uint32_t start[] = {0, 1};
  while (!ends) {
    keyhole_status status = KEYHOLE_OK;
    const keyhole_status all =
        keyhole_session_extend_batch(members, 1, 0, &q, &k, &k, start, &out, nullptr, &status);
    EXPECT_TRUE(all == KEYHOLE_OK || all == KEYHOLE_BUSY) << keyhole_last_error();
    if (HasFailure()) break;
  }
  other.join();
}

}  // namespace
}  // namespace keyhole::test

// Which estimates a plan for a card gives: by the kernels that a card of its compute capability has.
#include "tools/commands/plan/card_report.h"

#include <gtest/gtest.h>
#include <keyhole/inspect.h>
#include <keyhole/keyhole.h>

#include <string>
#include <vector>

#include "tools/commands/plan/speed.h"

namespace keyhole::tools {
namespace {

constexpr uint64_t kLongContext = 262144;
constexpr uint32_t kLayers = 8;  // what a session has for all of them is little beside their codes

struct Heads {
  uint32_t q_heads = 32, kv_heads = 8, dim = 128;
};

/// The estimate of a layer with an index whose memory is no matter.
CardEstimate estimate(const std::string& card, const std::string& index, const Heads& heads = {},
                      uint64_t tokens = kLongContext) {
  CardQuestion question;
  question.card = find_card(card);
  keyhole_engine_config_init(&question.engine);
  question.engine.layers = question.full_layers = kLayers;
  question.engine.q_heads = heads.q_heads;
  question.engine.kv_heads = heads.kv_heads;
  question.engine.head_dim = heads.dim;
  question.engine.kv_dtype = KEYHOLE_F16;
  question.engine.device = KEYHOLE_DEVICE_CUDA;
  question.context = tokens;
  keyhole_session_config session;
  keyhole_session_config_init(&session);
  session.index = index.c_str();
  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  EXPECT_EQ(keyhole_plan(&question.engine, &session, tokens, 0, 0, &plan), KEYHOLE_OK)
      << keyhole_last_error();
  EXPECT_EQ(plan.code_layers, kLayers);
  return estimate_codes(question, index, plan);
}

/// Seconds of a layer, for which there is an estimate.
double seconds(const std::string& card, const std::string& index, const Heads& heads = {},
               uint64_t tokens = kLongContext) {
  const CardEstimate e = estimate(card, index, heads, tokens);
  EXPECT_EQ(e.why_not, "") << card << ' ' << index;
  return e.layer;
}

TEST(CardReport, ReadsAllCodesWhereACardHasNoLists) {
  for (const char* card : {"RTX 3090", "RTX 4090", "A100 80GB", "L4", "24GiB,1008GB,25GB"}) {
    const double all = seconds(card, "codes:k=4,v=4");
    EXPECT_NEAR(seconds(card, "codes:k=4,v=4,lists=64"), all, 0.05 * all) << card;
  }
  for (const char* card : {"H100", "RTX 5090", "24GiB,1008GB,25GB,9.0"}) {
    const double all = seconds(card, "codes:k=4,v=4");
    EXPECT_LT(seconds(card, "codes:k=4,v=4,lists=64"), 0.8 * all) << card;
    EXPECT_NEAR(seconds(card, "codes:k=4,v=4,lists=0"), all, 1e-9) << card;
  }
}

TEST(CardReport, ReadsAllCodesWhereThePlanHasNoLists) {
  const Heads wide{32, 8, 512};
  const double all = seconds("H100", "codes:k=4,v=4", wide);
  EXPECT_NEAR(seconds("H100", "codes:k=4,v=4,lists=64", wide), all, 0.05 * all);
  const double early = seconds("H100", "codes:k=4,v=4");
  EXPECT_NEAR(seconds("H100", "codes:k=4,v=4,lists=64,from=300000"), early, 0.05 * early);
}

TEST(CardReport, TakesTheBitsOfTheSpec) {
  for (const char* card : {"RTX 4090", "H100"}) {
    const double two = seconds(card, "codes:k=2,v=2,lists=64");
    EXPECT_LT(two, 0.95 * seconds(card, "codes:k=4,v=4,lists=64")) << card;
    EXPECT_EQ(seconds(card, "codes:lists=64"), two) << "2 bits are the usual ones";
    EXPECT_EQ(seconds(card, "codes:lists=64,v=2,k=2"), two);
  }
  const double all = seconds("RTX 4090", "codes:k=2,v=2");
  EXPECT_NEAR(seconds("RTX 4090", "codes:lists=64"), all, 0.05 * all);
}

TEST(CardReport, EstimatesNoCodesWhereACardHasTooLittleSharedMemory) {
  const Heads wide{32, 8, 512};
  for (const char* card : {"RTX 4090", "RTX 5090", "A100 80GB", "24GiB,1008GB,25GB"}) {
    const std::string why = estimate(card, "codes:k=4,v=4", wide).why_not;
    EXPECT_NE(why.find("for heads of 512"), std::string::npos) << card << ": " << why;
  }
  EXPECT_GT(seconds("H200", "codes:k=4,v=4", wide), 0.0);
  // docs/embedding.md, "Codes on the device": 99 KiB are too few for many query heads of a KV head.
  const Heads of_256{24, 4, 256}, many_of_256{32, 2, 256}, of_128{32, 2, 128};
  EXPECT_EQ(estimate("RTX 4090", "codes:k=2,v=2", of_256).why_not, "");
  EXPECT_NE(estimate("RTX 4090", "codes:k=4,v=4", of_256).why_not, "");
  EXPECT_NE(estimate("RTX 4090", "codes:k=2,v=2", many_of_256).why_not, "");
  EXPECT_EQ(estimate("RTX 4090", "codes:k=2,v=2", of_128).why_not, "");
  EXPECT_NE(estimate("RTX 4090", "codes:k=4,v=4", of_128).why_not, "");
  EXPECT_EQ(estimate("A100 80GB", "codes:k=4,v=4", of_128).why_not, "");
  EXPECT_EQ(estimate("H100", "codes:k=4,v=4", many_of_256).why_not, "");
}

TEST(CardReport, SaysWhatItKnowsOfTheCard) {
  CardQuestion question;
  keyhole_engine_config_init(&question.engine);
  question.engine.q_heads = 32;
  question.engine.kv_heads = 8;
  question.engine.head_dim = 128;
  question.card = find_card("RTX 4090");
  EXPECT_NE(card_text(question, {}, {}).find("8.9 have no lists"), std::string::npos);
  EXPECT_EQ(card_json(question, {})["compute_capability"], "8.9");
  EXPECT_EQ(card_json(question, {})["shared_memory"], 99 * 1024);
  question.card = find_card("H100");
  EXPECT_NE(card_text(question, {}, {}).find("codes in lists at"), std::string::npos);
}

}  // namespace
}  // namespace keyhole::tools

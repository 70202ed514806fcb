// Which estimates a plan for a card gives: by the kernels that a card of its compute capability has.
#include "tools/commands/plan/card_report.h"

#include <gtest/gtest.h>
#include <keyhole/inspect.h>
#include <keyhole/keyhole.h>

#include <string>
#include <vector>

#include "tools/commands/plan/plan_rows.h"
#include "tools/commands/plan/speed.h"

namespace keyhole::tools {
namespace {

constexpr uint64_t kLongContext = 262144;
constexpr uint32_t kLayers = 8;  // what a session has for all of them is little beside their codes

struct Heads {
  uint32_t q_heads = 32, kv_heads = 8, dim = 128;
};

CardQuestion question_of(const std::string& card, const Heads& heads) {
  CardQuestion question;
  keyhole_engine_config_init(&question.engine);
  question.engine.q_heads = heads.q_heads;
  question.engine.kv_heads = heads.kv_heads;
  question.engine.head_dim = heads.dim;
  question.card = find_card(card);
  return question;
}

/// The estimate of a layer with an index whose memory is no matter.
CardEstimate estimate(const std::string& card, const std::string& index, const Heads& heads = {},
                      uint64_t tokens = kLongContext) {
  CardQuestion question = question_of(card, heads);
  question.engine.layers = question.full_layers = kLayers;
  question.engine.kv_dtype = KEYHOLE_F16;
  question.engine.device = KEYHOLE_DEVICE_CUDA;
  question.engine.device_capability =
      static_cast<uint32_t>(10 * question.card.compute_major + question.card.compute_minor);
  question.context = tokens;
  PlanRequest request;
  request.engine = question.engine;
  request.full_layers = kLayers;
  request.context = tokens;
  request.card = question.card;
  const PlanRow row = plan_row(request, {}, index);
  EXPECT_EQ(row.plan.code_layers, kLayers);
  return estimate_codes(question, index, row.plan, row.codes);
}

/// Seconds of a layer, for which there is an estimate.
double seconds(const std::string& card, const std::string& index, const Heads& heads = {},
               uint64_t tokens = kLongContext) {
  const CardEstimate e = estimate(card, index, heads, tokens);
  EXPECT_EQ(e.why_not, "") << card << ' ' << index;
  return e.layer;
}

TEST(CardReport, ReadsListsOnEveryCard) {
  const Heads few{16, 4, 128};
  for (const char* card : {"RTX 3090", "RTX 4090", "A100 80GB", "L4", "24GiB,1008GB,25GB", "H100",
                           "RTX 5090", "24GiB,1008GB,25GB,9.0"}) {
    const double all = seconds(card, "codes:k=4,v=4", few);
    EXPECT_LT(seconds(card, "codes:k=4,v=4,lists=64", few), 0.8 * all) << card;
    EXPECT_NEAR(seconds(card, "codes:k=4,v=4,lists=0", few), all, 1e-9) << card;
  }
}

/// 8 KV heads want 64 multiprocessors of a card without clusters: 58 are too few, 72 enough.
TEST(CardReport, ReadsAllCodesOnCardsWithTooFewMultiprocessors) {
  for (const char* card : {"L4", "RTX 3060", "RTX 4060", "RTX 4070 Ti", "A30"}) {
    const double all = seconds(card, "codes:k=4,v=4");
    EXPECT_NEAR(seconds(card, "codes:k=4,v=4,lists=64"), all, 0.01 * all) << card;
  }
  for (const char* card : {"A10", "RTX 3080", "RTX A5000", "24GiB,300GB,25GB,8.9", "RTX 5070"}) {
    EXPECT_LT(seconds(card, "codes:k=4,v=4,lists=64"), 0.8 * seconds(card, "codes:k=4,v=4"))
        << card;
  }
}

TEST(CardReport, ReadsAllCodesWhereThePlanHasNoLists) {
  const Heads wide{32, 8, 512};
  EXPECT_EQ(seconds("H100", "codes:k=4,v=4,lists=64", wide),
            seconds("H100", "codes:k=4,v=4", wide));
  EXPECT_EQ(seconds("H100", "codes:k=4,v=4,lists=64,from=300000"),
            seconds("H100", "codes:k=4,v=4"));
  // Where work space is most of the memory, and where codes of a row end within a word.
  EXPECT_EQ(seconds("H100", "codes:k=4,v=4,lists=64", {}, 2048),
            seconds("H100", "codes:k=4,v=4", {}, 2048));
  const std::string late = "codes:k=2,v=2,lists=64,from=300000";
  EXPECT_EQ(seconds("RTX 3090", late, {32, 8, 80}),
            seconds("RTX 3090", "codes:k=2,v=2", {32, 8, 80}));
}

TEST(CardReport, TakesTheBitsOfTheSpec) {
  for (const char* card : {"RTX 4090", "H100"}) {
    const double two = seconds(card, "codes:k=2,v=2,lists=64");
    EXPECT_LT(two, 0.95 * seconds(card, "codes:k=4,v=4,lists=64")) << card;
    EXPECT_EQ(seconds(card, "codes:lists=64"), two) << "2 bits are the usual ones";
    EXPECT_EQ(seconds(card, "codes:lists=64,v=2,k=2"), two);
  }
}

TEST(CardReport, EstimatesCodesOfEveryShapeOnEveryCard) {
  for (const char* card : {"RTX 3090", "RTX 4090", "RTX 5090", "A100 80GB", "H100"}) {
    for (const Heads& heads : {Heads{32, 8, 512}, Heads{32, 2, 512}, Heads{24, 4, 256},
                               Heads{32, 2, 256}, Heads{32, 2, 128}}) {
      for (const char* index : {"codes:k=4,v=4", "codes:k=2,v=2"}) {
        EXPECT_GT(seconds(card, index, heads), 0.0) << card << ' ' << heads.dim;
      }
    }
  }
}

// docs/embedding.md, "Codes on the device": in 99 KiB a thread block has 8 query heads of 512 components.
TEST(CardReport, ReadsCodesTwiceForManyHeadsOf512OnDesktops) {
  const Heads few{16, 2, 512}, many{32, 2, 512};
  for (const char* card : {"RTX 3090", "RTX 4090", "RTX 5090"}) {
    EXPECT_GT(seconds(card, "codes:k=4,v=4", many), 1.8 * seconds(card, "codes:k=4,v=4", few))
        << card;
    EXPECT_GT(seconds(card, "codes:k=4,v=4,lists=64", many),
              1.8 * seconds(card, "codes:k=4,v=4,lists=64", few))
        << card;
  }
  for (const char* card : {"A100 80GB", "H100"}) {
    EXPECT_LT(seconds(card, "codes:k=4,v=4", many), 1.5 * seconds(card, "codes:k=4,v=4", few))
        << card;
  }
}

/// Of 512 components there are none. In 99 KiB of shared memory 16 heads of 128 are attended 8 at a time, and those of
/// 256 4.
TEST(CardReport, HasNoListsOfHeadsThatAreTooLong) {
  const Heads of_256{24, 4, 256}, of_128{64, 4, 128}, of_512{32, 4, 512};
  for (const char* card : {"RTX 4090", "RTX 5090"}) {
    const std::string all = "codes:k=4,v=4", lists = all + ",lists=64,from=32768";
    const double read = seconds(card, all, of_512);
    EXPECT_NEAR(seconds(card, lists, of_512), read, 0.05 * read) << card;
    EXPECT_LT(seconds(card, lists, of_128), 0.9 * seconds(card, all, of_128)) << card;
    EXPECT_LT(seconds(card, lists, of_256), 0.9 * seconds(card, all, of_256)) << card;
  }
}

TEST(CardReport, SaysWhatItKnowsOfTheCard) {
  CardQuestion question = question_of("RTX 4090", {});
  EXPECT_EQ(card_json(question, {})["compute_capability"], "8.9");
  EXPECT_EQ(card_json(question, {})["shared_memory"], 99 * 1024);
  EXPECT_EQ(card_json(question, {})["multiprocessors"], 128);
  question.card = find_card("24GiB,1008GB,25GB,8.9");
  EXPECT_TRUE(card_json(question, {})["multiprocessors"].is_null());
  question.card = find_card("H100");
  EXPECT_EQ(card_text(question, {}, {}).find("lists"), std::string::npos) << "nobody asks for some";
  EXPECT_EQ(card_text(question, {}, {}).find("1900 GB/s"), std::string::npos);
  question.engine.head_dim = 512;
  EXPECT_NE(card_text(question, {}, {}).find("2350 GB/s and 1900 GB/s"), std::string::npos);
}

TEST(CardReport, SaysWhatListsTakeForGranted) {
  const auto says = [](const char* card, const Heads& heads, const std::string& part) {
    CardQuestion question = question_of(card, heads);
    CardEstimate lists, all;
    lists.asks_for_lists = true;
    lists.list_share = 0.12;
    return card_text(question, {all, lists}, {}).find(part) != std::string::npos;
  };
  const std::string needs = "if the card has 8 multiprocessors for each KV head";
  const char *own_8 = "24GiB,1008GB,25GB,8.9", *own_12 = "24GiB,1008GB,25GB,12.0";
  EXPECT_TRUE(says(own_8, {}, needs));
  EXPECT_FALSE(says("RTX 4090", {}, needs)) << "it has them";
  EXPECT_FALSE(says(own_12, {}, needs)) << "clusters choose";
  EXPECT_FALSE(says(own_12, {64, 8, 256}, needs));
  EXPECT_TRUE(says(own_12, {72, 8, 256}, needs)) << "for 9 heads of 256 there are no clusters";
  EXPECT_FALSE(says("H100", {72, 8, 256}, needs));
  EXPECT_TRUE(
      says("L4", {}, "want 64 multiprocessors on this card, 8 for each KV head, and it has 58"));
  EXPECT_FALSE(says("L4", {}, "lists 12 % are read"));
  EXPECT_TRUE(says("L4", {16, 4, 128}, "lists 12 % are read"));
  EXPECT_TRUE(says("RTX 4090", {24, 4, 256}, "12 % are read, with 4 bits 2 times"));
  EXPECT_FALSE(says("H100", {24, 4, 256}, "with 4 bits 2 times"));
}

/// read=: percent of the rows that a step reads; lists=: rows of a list, for each of which there is a mean key.
TEST(CardReport, TakesTheListsOfTheSpec) {
  const std::string lists = "codes:k=4,v=4,lists=64";
  const double usual = seconds("H100", lists), more = seconds("H100", lists + ",read=30");
  EXPECT_EQ(seconds("H100", lists + ",read=12"), usual);
  // 18 % more of the rows, of 134 bytes for each of 8 KV heads, at 2832 GB/s.
  const double bytes = 0.18 * kLongContext * 8 * 134;
  EXPECT_NEAR(more - usual, bytes / 2832e9, 0.05 * bytes / 2832e9);
  EXPECT_LT(usual, seconds("H100", "codes:k=4,v=4,lists=32")) << "twice the mean keys";
  EXPECT_GT(usual, seconds("H100", "codes:k=4,v=4,lists=128"));
}

TEST(CardReport, SaysWhichSharesOfListsAreRead) {
  CardQuestion question = question_of("H100", {});
  std::vector<CardEstimate> estimates(3);
  estimates[0].asks_for_lists = estimates[1].asks_for_lists = true;
  const auto text = [&] { return card_text(question, estimates, {}); };
  EXPECT_EQ(text().find("lists"), std::string::npos) << "none of them has some";
  estimates[0].list_share = 0.3;
  EXPECT_NE(text().find("of codes in lists 30 % are read"), std::string::npos) << text();
  estimates[1].list_share = 0.12;
  EXPECT_NE(text().find("of codes in lists 12 % and 30 % are read"), std::string::npos) << text();
}

}  // namespace
}  // namespace keyhole::tools

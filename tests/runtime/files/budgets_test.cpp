// Files of budgets: what is written is read again; everything else is refused with the path of what is wrong.
#include "runtime/files/budgets.h"

#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "runtime/files/mapped_file.h"
#include "tests/temporary_folder.h"

namespace keyhole {
namespace {

BudgetsFile parse(const std::string& text) {
  // A copy of exactly this size, so that AddressSanitizer sees every byte read beyond it.
  const std::vector<char> bytes(text.begin(), text.end());
  return parse_budgets(std::as_bytes(std::span(bytes)));
}

std::string with_heads(const std::string& heads, const std::string& more = "") {
  return R"({"keyhole_budgets": 1, "model": {"layers": 3, "q_heads": 8, "kv_heads": 2,
            "head_dim": 64}, )" +
         more + R"("heads": [)" + heads + "]}";
}

std::string refusal(const std::string& text) {
  try {
    (void)parse(text);
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return "";
}

#define EXPECT_REFUSED(text, part) \
  EXPECT_NE(refusal(text).find(part), std::string::npos) << text << "\n" << refusal(text)

TEST(BudgetsFile, ReadsEveryField) {
  const BudgetsFile file = parse(with_heads(
      R"({"layer": "all", "kv_head": 1, "index": "ivf:probe=32", "top_k": 7, "attend": "weight",
          "min_weight": 1e-3, "tail": "centroid", "error_target": 0.05, "mass_target": 0.9,
          "min_keys": 4, "max_keys": 900, "dense": false, "measured": {"us": 12.5}},
         {"layer": 2, "kv_head": "all", "dense": true})",
      R"("tail_partition": 32, "target": {"error": 0.05}, "machine": "m", "made_by": "x",)"));
  EXPECT_EQ(file.layers, 3U);
  EXPECT_EQ(file.q_heads, 8U);
  EXPECT_EQ(file.kv_heads, 2U);
  EXPECT_EQ(file.head_dim, 64U);
  EXPECT_EQ(file.tail_partition, 32U);
  EXPECT_EQ(file.target.at("error"), 0.05);
  EXPECT_EQ(file.machine, "m");
  ASSERT_EQ(file.heads.size(), 2U);
  const BudgetsFile::Entry& a = file.heads[0];
  EXPECT_FALSE(a.layer);
  EXPECT_EQ(a.kv_head, 1U);
  EXPECT_EQ(a.index, "ivf:probe=32");
  EXPECT_EQ(a.budget.get(&keyhole_budget::top_k), 7U);
  EXPECT_EQ(a.budget.get(&keyhole_budget::attend), KEYHOLE_ATTEND_WEIGHT);
  EXPECT_EQ(a.budget.get(&keyhole_budget::min_weight), 1e-3F);
  EXPECT_EQ(a.budget.get(&keyhole_budget::tail), KEYHOLE_TAIL_CENTROID);
  EXPECT_EQ(a.budget.get(&keyhole_budget::error_target), 0.05F);
  EXPECT_EQ(a.budget.get(&keyhole_budget::mass_target), 0.9F);
  EXPECT_EQ(a.budget.get(&keyhole_budget::min_keys), 4U);
  EXPECT_EQ(a.budget.get(&keyhole_budget::max_keys), 900U);
  EXPECT_EQ(a.dense, false);
  EXPECT_EQ(a.measured.at("us"), 12.5);
  const BudgetsFile::Entry& b = file.heads[1];
  EXPECT_EQ(b.layer, 2U);
  EXPECT_FALSE(b.kv_head);
  EXPECT_EQ(b.dense, true);
  EXPECT_FALSE(b.index);
  EXPECT_TRUE(b.budget.empty());
}

TEST(BudgetsFile, PatternsAreOfQueryHeads) {
  const std::string heads =
      R"({"layer": 1, "q_head": 7, "pattern": "a-shape:near=64", "measured": {"share": 0.25}},
         {"layer": "all", "q_head": "all", "pattern": "dense"}, {"layer": 1, "kv_head": 0, "top_k": 3})";
  BudgetsFile file = parse(with_heads(heads));
  for (int round = 0; round < 2; ++round) {
    ASSERT_EQ(file.heads.size(), 3U);
    EXPECT_EQ(file.heads[0].layer, 1U);
    EXPECT_EQ(file.heads[0].q_head, 7U);
    EXPECT_EQ(file.heads[0].pattern, "a-shape:near=64");
    EXPECT_EQ(file.heads[0].measured.at("share"), 0.25);
    EXPECT_FALSE(file.heads[1].layer);
    EXPECT_FALSE(file.heads[1].q_head);
    EXPECT_EQ(file.heads[1].pattern, "dense");
    EXPECT_FALSE(file.heads[2].pattern);
    EXPECT_EQ(file.heads[2].kv_head, 0U);
    file = parse(budgets_text(file));
  }
  EXPECT_REFUSED(with_heads(R"({"layer": 0, "q_head": 8, "pattern": "dense"})"),
                 "heads[0].q_head is 8; allowed: a whole number from 0 to 7");
  EXPECT_REFUSED(with_heads(R"({"layer": 0, "q_head": 1})"), "the key \"pattern\" is missing");
  EXPECT_REFUSED(with_heads(R"({"layer": 0, "q_head": 1, "pattern": 3})"),
                 "heads[0].pattern is 3; allowed: a string");
  EXPECT_REFUSED(with_heads(R"({"layer": 0, "q_head": 1, "pattern": "dense", "top_k": 3})"),
                 "the key \"top_k\" is unknown; allowed: layer, q_head, pattern, measured");
  EXPECT_REFUSED(with_heads(R"({"layer": 0, "q_head": 1, "kv_head": 0, "pattern": "dense"})"),
                 "the key \"kv_head\" is unknown");
  EXPECT_REFUSED(with_heads(R"({"layer": 0, "kv_head": 1, "pattern": "dense"})"),
                 "the key \"pattern\" is unknown");
  EXPECT_REFUSED(with_heads(R"({"layer": 0, "q_head": 1, "pattern": "dense"},
                               {"layer": 0, "q_head": 1, "pattern": "dense"})"),
                 "heads[1] is of layer 0, q_head 1, as is heads[0]");
}

TEST(BudgetsFile, WhatIsWrittenIsReadAgain) {
  std::mt19937 random(7);
  const auto maybe = [&](auto value) {
    return random() % 2 == 0 ? std::optional(value) : std::nullopt;
  };
  for (int round = 0; round < 50; ++round) {
    BudgetsFile file;
    file.layers = 1 + random() % 40;
    file.kv_heads = 1 + random() % 8;
    file.q_heads = file.kv_heads * 4;
    file.head_dim = 128;
    file.tail_partition = maybe(4U + random() % 1000);
    file.machine = "a \"quoted\" machine";
    file.target["error"] = 0.05;
    for (uint32_t l = 0; l < file.layers; ++l) {
      BudgetsFile::Entry e;
      e.layer = l;
      e.kv_head = maybe(random() % file.kv_heads);
      e.index = maybe(std::string("hnsw:M=8"));
      const auto number = [&] { return static_cast<uint32_t>(random()); };
      for (const Setting& s : kBudgetSettings) {
        if (random() % 2 == 0) continue;
        keyhole_budget& values = e.budget.name(s);
        switch (s.kind) {
          case SettingKind::count: field<uint32_t>(s, &values) = number() | 1U; break;
          case SettingKind::word:
            field<int32_t>(s, &values) = static_cast<int32_t>(number() % s.words.size());
            break;
          default: field<float>(s, &values) = static_cast<float>(number() % 1000) / 7777.0F;
        }
      }
      e.dense = maybe(random() % 2 == 0);
      if (random() % 2 == 0) e.measured["error_p95"] = 0.125;
      file.heads.push_back(e);
    }
    const BudgetsFile again = parse(budgets_text(file));
    EXPECT_EQ(again.layers, file.layers);
    EXPECT_EQ(again.tail_partition, file.tail_partition);
    EXPECT_EQ(again.machine, file.machine);
    EXPECT_EQ(again.target, file.target);
    ASSERT_EQ(again.heads.size(), file.heads.size());
    for (size_t i = 0; i < file.heads.size(); ++i) {
      const BudgetsFile::Entry& a = again.heads[i];
      const BudgetsFile::Entry& b = file.heads[i];
      EXPECT_EQ(a.layer, b.layer);
      EXPECT_EQ(a.kv_head, b.kv_head);
      EXPECT_EQ(a.index, b.index);
      for (const Setting& setting : kBudgetSettings) {
        ASSERT_EQ(a.budget.has(setting), b.budget.has(setting)) << setting.name;
        visit_number(setting, &a.budget.values(), [&](const auto& x) {  // the same bits
          using Number = std::remove_cvref_t<decltype(x)>;
          EXPECT_EQ(x, field<Number>(setting, &b.budget.values())) << setting.name;
        });
      }
      EXPECT_EQ(a.dense, b.dense);
      EXPECT_EQ(a.measured, b.measured);
    }
  }
}

TEST(BudgetsFile, NamesThePathOfWhatIsWrong) {
  EXPECT_REFUSED("", "not valid JSON");
  EXPECT_REFUSED("[]", "not an object");
  EXPECT_REFUSED("{}", "keyhole_budgets");
  EXPECT_REFUSED(R"({"keyhole_budgets": "1"})", "keyhole_budgets is \"1\"");
  EXPECT_REFUSED(R"({"keyhole_budgets": 1})", "\"model\" is missing");
  EXPECT_REFUSED(R"({"keyhole_budgets": 1, "keyhole_budgets": 1})", "twice");
  EXPECT_REFUSED(with_heads("", R"("budget": 1,)"), "\"budget\" is unknown");
  EXPECT_REFUSED(with_heads("", R"("tail_partition": 3,)"), "tail_partition is 3");
  EXPECT_REFUSED(with_heads("", R"("target": {"error": "low"},)"), "target.\"error\"");
  EXPECT_REFUSED(with_heads("", R"("machine": 1,)"), "machine is 1");
  EXPECT_REFUSED(R"({"keyhole_budgets": 1, "model": {"layers": 0, "q_heads": 1, "kv_heads": 1,
                     "head_dim": 64}, "heads": []})",
                 "model.layers is 0");
  EXPECT_REFUSED(R"({"keyhole_budgets": 1, "model": {"layers": 1, "q_heads": 1, "kv_heads": 1,
                     "head_dim": 64}, "heads": {}})",
                 "heads is {}");
  EXPECT_REFUSED(with_heads("7"), "heads[0] is 7");
  EXPECT_REFUSED(with_heads(R"({"kv_head": 0})"), "heads[0]: the key \"layer\" is missing");
  const auto entry = [](const std::string& fields) {
    return with_heads(R"({"layer": 0, "kv_head": 0},
                         {"layer": 1, "kv_head": 1)" +
                      fields + "}");
  };
  EXPECT_REFUSED(entry(R"(, "k": 5)"), "heads[1]: the key \"k\" is unknown");
  EXPECT_REFUSED(entry(R"(, "top_k": 0)"), "heads[1].top_k is 0");
  EXPECT_REFUSED(entry(R"(, "top_k": -5)"), "heads[1].top_k is -5");
  EXPECT_REFUSED(entry(R"(, "top_k": 1.5)"), "heads[1].top_k is 1.5");
  EXPECT_REFUSED(entry(R"(, "top_k": 4294967296)"), "heads[1].top_k is 4294967296");
  EXPECT_REFUSED(entry(R"(, "attend": "all")"), "heads[1].attend is \"all\"; allowed: one of topk");
  EXPECT_REFUSED(entry(R"(, "tail": 2)"), "heads[1].tail is 2");
  EXPECT_REFUSED(entry(R"(, "index": ["flat"])"), "heads[1].index is");
  EXPECT_REFUSED(entry(R"(, "error_target": "0.05")"), "heads[1].error_target");
  EXPECT_REFUSED(entry(R"(, "error_target": 1e300)"), "heads[1].error_target");
  EXPECT_REFUSED(entry(R"(, "error_target": 1e999)"), "not valid JSON");
  EXPECT_REFUSED(entry(R"(, "dense": 1)"), "heads[1].dense is 1");
  EXPECT_REFUSED(entry(R"(, "measured": {"us": null})"), "heads[1].measured.\"us\" is null");
  EXPECT_REFUSED(entry(R"(, "measured": {"us": {"p95": 1}})"), "heads[1].measured.\"us\"");
  EXPECT_REFUSED(entry(R"(, "measured": [[[[[[1]]]]]])"), "nested");
  EXPECT_REFUSED(entry(R"(}, {"layer": 1, "kv_head": 1)"), "heads[2] is of layer 1, kv_head 1");
  EXPECT_REFUSED(entry(R"(}, {"layer": 3, "kv_head": 1)"), "heads[2].layer is 3");
  EXPECT_REFUSED(entry(R"(}, {"layer": 1, "kv_head": 2)"), "heads[2].kv_head is 2");
  EXPECT_REFUSED(entry(R"(}, {"layer": "any", "kv_head": 1)"), "heads[2].layer is \"any\"");
  EXPECT_REFUSED(with_heads(R"({"layer": 1, "kv_head": "all"}, {"layer": 1, "kv_head": "all"})"),
                 "heads[1] is of layer 1, kv_head all");
  EXPECT_EQ(refusal(entry("")), "");
}

TEST(BudgetsFile, AnotherFormatIsToldApart) {
  // Whatever else it may hold.
  EXPECT_THROW((void)parse(R"({"keyhole_budgets": 2, "novelty": [[1]]})"), AnotherFormat);
}

TEST(BudgetsFile, DepthAndSizeAreBounded) {
  EXPECT_REFUSED(R"({"keyhole_budgets": 1, "heads": )" + std::string(1 << 20, '['), "nested");
  const std::vector<std::byte> huge(kMaxBudgetsBytes + 1, std::byte{' '});
  EXPECT_THROW((void)parse_budgets(huge), std::runtime_error);
}

TEST(BudgetsFile, TextsOfFilesBeginWithTheirName) {
  const TemporaryFolder folder;
  EXPECT_THROW((void)read_budgets(folder / "nothing"), CannotRead);
  const auto path = folder / "bad.json";
  std::ofstream(path) << "{}";
  try {
    (void)read_budgets(path);
    FAIL();
  } catch (const std::runtime_error& e) {
    EXPECT_EQ(std::string(e.what()).find(path.string()), 0U);
  }
}

// Each mutation is refused with a text, or gives a file that can be written and read again.
TEST(BudgetsFile, MutationsAreRefusedOrSound) {
  const std::string seed = with_heads(
      R"({"layer": "all", "kv_head": 1, "index": "flat", "top_k": 7, "attend": "weight",
          "min_weight": 1e-3, "tail": "mean", "error_target": 0.05, "dense": false},
         {"layer": 2, "kv_head": 0, "measured": {"us": 12.5}})",
      R"("tail_partition": 32, "target": {"error": 0.05},)");
  const std::string tokens[] = {"0",  "-1",      "4294967296", "1e99", "null",   "true", "[]",
                                "{}", "\"\"",    "[[[[[[",     ",",    ":",      "}",    "]",
                                "\"", "\"all\"", "\"heads\"",  "\xff", "\\u0000"};
  size_t sound = 0;
  for (uint32_t i = 0; i < 6000; ++i) {
    std::mt19937 random(i);
    std::string text = seed;
    for (uint32_t edits = 0; edits <= random() % 3; ++edits) {
      const size_t at = random() % text.size();
      switch (random() % 4) {
        case 0: text[at] = static_cast<char>(random()); break;
        case 1: text.erase(at, 1 + random() % 12); break;
        case 2: text.insert(at, tokens[random() % std::size(tokens)]); break;
        default: text.replace(at, random() % 6, tokens[random() % std::size(tokens)]); break;
      }
      if (text.empty()) text = " ";
    }
    try {
      const BudgetsFile file = parse(text);
      const std::string again = budgets_text(file);
      EXPECT_EQ(budgets_text(parse(again)), again) << "mutation " << i;
      ++sound;
    } catch (const std::runtime_error& e) {
      EXPECT_STRNE(e.what(), "") << "mutation " << i;
    }
  }
  EXPECT_GT(sound, 40U);
  for (size_t size = 0; size < seed.size(); ++size) {
    EXPECT_NE(refusal(seed.substr(0, size)), "") << size << " bytes";
  }
}

}  // namespace
}  // namespace keyhole

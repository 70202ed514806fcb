// Specs of rivals: what is taken, what is refused and how the refusal helps.
#include <gtest/gtest.h>

#include "tests/tools/rivals/rival_case.h"
#include "tools/rivals/rivals.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

RivalSpec parse(const std::string& text) { return RivalSpec::parse(text, rival_types()); }

void refused(const std::string& text, const std::vector<std::string>& parts) {
  try {
    (void)parse(text);
    ADD_FAILURE() << text << " was taken";
  } catch (const UsageError& e) {
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << text << ": " << e.what();
    }
  }
}

TEST(RivalParams, ReadsWhatTextWrites) {
  for (const RivalType* type : rival_types()) {
    if (type->needs != nullptr) continue;
    const RivalSpec defaults = parse(type->name);
    EXPECT_EQ(defaults.text(), RivalSpec(*type).text());
    for (size_t i = 0; i < type->params.size(); ++i) {
      const RivalParam& param = type->params[i];
      for (const int64_t value : {param.lowest, param.highest}) {
        const RivalSpec spec =
            parse(std::string(type->name) + ":" + param.name + "=" + std::to_string(value));
        EXPECT_EQ(spec[i], value);
        EXPECT_EQ(parse(spec.text()).text(), spec.text());
        // Whether it must be built anew is what the table says.
        const bool serves = param.stage == RivalStage::search || value == param.fallback;
        EXPECT_EQ(spec.built_alike(defaults), serves) << spec.text();
      }
      for (const int64_t value : {param.lowest - 1, param.highest + 1}) {
        refused(std::string(type->name) + ":" + param.name + "=" + std::to_string(value),
                {param.name, std::to_string(value), std::to_string(param.lowest) + ".."});
      }
    }
  }
  EXPECT_FALSE(parse("pages").built_alike(parse("random")));
}

TEST(RivalParams, RefusesWithWhatIsAllowed) {
  refused("annoy", {"annoy", "faiss-ivf", "hnswlib", "lsh", "pages", "blocks", "random"});
  refused("", {"faiss-ivf"});
  refused("pages:leaves=3", {"leaves=3", "size=", "budget="});
  refused("pages:size", {"'size'", "size=", "budget="});
  refused("pages:", {"size=", "budget="});
  refused("pages:size=4,", {"size=", "budget="});
  refused("pages:size=4,size=4", {"size is given twice"});
  for (const char* value : {"", "x", "4x", "1.5", " 4", "99999999999999999999"}) {
    refused(std::string("pages:size=") + value, {"size=", "1..4096"});
  }
}

TEST(RivalParams, HelpNamesEveryRivalAndParameter) {
  const std::string help = describe_rivals(rival_types());
  for (const RivalType* type : rival_types()) {
    EXPECT_NE(help.find(std::string(type->name) + ": " + type->meaning), std::string::npos)
        << type->name;
    for (const RivalParam& param : type->params) {
      EXPECT_NE(
          help.find("\n    " + std::string(param.name) + "=" + std::to_string(param.fallback)),
          std::string::npos)
          << param.name;
      EXPECT_LE(param.lowest, param.fallback);
      EXPECT_LE(param.fallback, param.highest);
    }
  }
}

TEST(RivalParams, SaysWhatToInstall) {
  const RivalType absent = {
      .name = "absent", .meaning = "", .params = {}, .needs = "libabsent-dev"};
  const RivalType* const types[] = {&absent};
  try {
    (void)RivalSpec::parse("absent", types);
    ADD_FAILURE();
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("install libabsent-dev"), std::string::npos) << e.what();
  }
  EXPECT_NE(describe_rivals(types).find("lacks libabsent-dev"), std::string::npos);
}

TEST(RivalParams, WhatKeysDoNotAllowIsRefusedBeforeTheBuild) {
  const auto check = [](const std::string& text, const RivalShape& shape, const std::string& part) {
    const std::string name = text.substr(0, text.find(':'));
    for (const RivalType* type : rival_types()) {
      if (type->name != name || type->needs != nullptr) continue;
      ASSERT_NE(type->check, nullptr) << name;
      try {
        type->check(parse(text), shape);
        ADD_FAILURE() << text;
      } catch (const UsageError& e) {
        EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
      }
    }
  };
  check("blocks", {100, 8, 2, 0}, "--training");
  check("blocks:size=2,representatives=3", {100, 8, 2, 4}, "representatives=3");
  check("faiss-ivf:lists=101", {100, 8, 2, 0}, "only 100 keys");
  check("faiss-ivfpq:lists=101", {100, 8, 2, 0}, "only 100 keys");
  check("faiss-ivfpq:m=3", {100, 8, 2, 0}, "m=3");
  check("faiss-ivfpq", {100, 9, 2, 0}, "m=");
  check("faiss-ivfpq:lists=2", {15, 8, 2, 0}, "16");
}

}  // namespace
}  // namespace keyhole::tools

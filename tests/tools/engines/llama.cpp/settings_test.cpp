#include "tools/engines/llama.cpp/settings.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace keyhole::llama_cpp {
namespace {

std::string complaint(const std::string& text) {
  try {
    (void)parse_settings(text);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(LlamaCppSettings, NothingIsTheDefaults) {
  const Settings settings = parse_settings("");
  EXPECT_EQ(settings.index, "auto");
  EXPECT_EQ(settings.sink, 128U);
  EXPECT_EQ(settings.window, 512U);
  EXPECT_FALSE(settings.copy.has_value());
  EXPECT_EQ(settings.card, 16384U);
  EXPECT_TRUE(settings.rows_on_card);
  EXPECT_TRUE(settings.graphs);
  EXPECT_TRUE(settings.together);
  EXPECT_FALSE(settings.int8);
}

TEST(LlamaCppSettings, EachKeySetsItsMember) {
  const Settings settings = parse_settings(
      "index=ivf:C=64,probe=8;tail=second;top_k=50;sink=4;window=256;kv=int8;threads=2;copy=off;"
      "card=100;rows=host;graphs=off;together=off;prompt=none;prompt_from=64;budgets=/"
      "a=b;plan=on;");
  EXPECT_EQ(settings.index, "ivf:C=64,probe=8");
  EXPECT_EQ(settings.tail, "second");
  EXPECT_EQ(settings.top_k, 50U);
  EXPECT_EQ(settings.sink, 4U);
  EXPECT_EQ(settings.window, 256U);
  EXPECT_TRUE(settings.int8);
  EXPECT_EQ(settings.threads, 2U);
  EXPECT_EQ(settings.copy, false);
  EXPECT_EQ(settings.card, 100U);
  EXPECT_FALSE(settings.rows_on_card);
  EXPECT_FALSE(settings.graphs);
  EXPECT_FALSE(settings.together);
  EXPECT_EQ(settings.prompt, "none");
  EXPECT_EQ(settings.prompt_from, 64U);
  EXPECT_EQ(settings.budgets, "/a=b");
  EXPECT_TRUE(settings.plan);
}

TEST(LlamaCppSettings, WhatIsWrongIsNamedWithWhatIsAllowed) {
  EXPECT_NE(complaint("sinc=4").find("unknown key 'sinc'"), std::string::npos);
  EXPECT_NE(complaint("sinc=4").find("sink"), std::string::npos);
  EXPECT_NE(complaint("sink").find("sink has no value"), std::string::npos);
  EXPECT_NE(complaint("sink=").find("sink has no value"), std::string::npos);
  EXPECT_NE(complaint("sink=4;sink=5").find("sink is there twice"), std::string::npos);
  EXPECT_NE(complaint("window=0").find("window=0: allowed are whole numbers from 1"),
            std::string::npos);
  EXPECT_NE(complaint("window=4x").find("window=4x"), std::string::npos);
  EXPECT_NE(complaint("window=-1").find("window=-1"), std::string::npos);
  EXPECT_NE(complaint("kv=int4").find("kv=int4: allowed are same, int8"), std::string::npos);
  EXPECT_NE(complaint("tail=last").find("tail=last: allowed are none, mean"), std::string::npos);
}

}  // namespace
}  // namespace keyhole::llama_cpp

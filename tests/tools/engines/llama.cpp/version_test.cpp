#include "tools/engines/llama.cpp/version.h"

#include <gtest/gtest.h>

#include <string>

namespace keyhole::llama_cpp {
namespace {

TEST(LlamaCppVersion, TheOneThatItWasBuiltForIsTaken) {
  EXPECT_EQ(version_error("0.25.3", "0.25.3"), "");
  EXPECT_EQ(version_error("", "0.25.3"), "");
}

TEST(LlamaCppVersion, AnotherOneIsRefusedWithBothNames) {
  for (const char* running : {"0.25.2", "0.25.30", "1.25.3", ""}) {
    const std::string error = version_error("0.25.3", running);
    EXPECT_NE(error.find("ggml 0.25.3,"), std::string::npos) << error;
    EXPECT_NE(error.find(std::string("ggml ") + running + " has loaded it"), std::string::npos)
        << error;
  }
}

}  // namespace
}  // namespace keyhole::llama_cpp

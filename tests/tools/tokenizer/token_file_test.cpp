// Token ids from files.
#include "tools/tokenizer/token_file.h"

#include <gtest/gtest.h>

#include "tests/temporary_folder.h"

namespace keyhole::tools {
namespace {

TEST(TokenFile, ReadsNumbersBetweenSpacesCommasAndLines) {
  const TemporaryFolder folder;
  write_file(folder / "ids", std::string(" 1, 2\n3\t 4294967295\r\n"));
  EXPECT_EQ(read_token_file(folder / "ids"), (std::vector<uint32_t>{1, 2, 3, 4294967295U}));
  write_file(folder / "empty", std::string());
  EXPECT_TRUE(read_token_file(folder / "empty").empty());
}

TEST(TokenFile, NamesWhatIsNoTokenId) {
  const TemporaryFolder folder;
  for (const char* text : {"1 2 x3", "1 2 -3", "1 2 3.5", "1 2 4294967296"}) {
    write_file(folder / "ids", std::string(text));
    const std::string error = error_of([&] { (void)read_token_file(folder / "ids"); });
    EXPECT_NE(error.find("token 2"), std::string::npos) << error;
  }
  EXPECT_NE(error_of([] { (void)read_token_file("/nonexistent"); }).find("/nonexistent"),
            std::string::npos);
}

}  // namespace
}  // namespace keyhole::tools

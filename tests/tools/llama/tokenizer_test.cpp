// Bytes as tokens, and token ids from files.
#include "tools/llama/tokenizer.h"

#include <gtest/gtest.h>

#include "tests/temporary_folder.h"

namespace keyhole::tools {
namespace {

LlamaConfig byte_config() {
  LlamaConfig config;
  config.vocab_size = 264;
  config.bos_token = 256;
  config.eos_tokens = {257};
  return config;
}

TEST(ByteTokenizer, EveryByteThereAndBack) {
  const ByteTokenizer tokenizer(byte_config());
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text.push_back(static_cast<char>(byte));
  const std::vector<uint32_t> tokens = tokenizer.encode_prompt(text);
  ASSERT_EQ(tokens.size(), 257U);
  EXPECT_EQ(tokens.front(), ByteTokenizer::kBos);
  for (uint32_t byte = 0; byte < 256; ++byte) EXPECT_EQ(tokens[byte + 1], byte);
  EXPECT_EQ(tokenizer.decode(tokens), text);  // BOS gives nothing
}

TEST(ByteTokenizer, RefusesOtherVocabularies) {
  LlamaConfig config = byte_config();
  config.vocab_size = 128256;
  const std::string error = error_of([&] { ByteTokenizer{config}; });
  EXPECT_NE(error.find("128256"), std::string::npos) << error;
  EXPECT_NE(error.find("--tokens"), std::string::npos) << error;
  config = byte_config();
  config.bos_token.reset();
  EXPECT_FALSE(ByteTokenizer::fits(config));
  config = byte_config();
  config.eos_tokens = {2};
  EXPECT_FALSE(ByteTokenizer::fits(config));
}

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

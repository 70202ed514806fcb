// Bytes as tokens, and which models have them.
#include "tools/tokenizer/byte_tokenizer.h"

#include <gtest/gtest.h>

#include "tests/temporary_folder.h"
#include "tests/tools/tokenizer/byte_model.h"

namespace keyhole::tools {
namespace {

TEST(ByteTokenizer, EveryByteThereAndBack) {
  const ByteTokenizer tokenizer(kByteModel);
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text.push_back(static_cast<char>(byte));
  const std::vector<uint32_t> tokens = tokenizer.encode_prompt(text);
  ASSERT_EQ(tokens.size(), 257U);
  EXPECT_EQ(tokens.front(), ByteTokenizer::kBos);
  for (uint32_t byte = 0; byte < 256; ++byte) EXPECT_EQ(tokens[byte + 1], byte);
  EXPECT_EQ(tokenizer.decode(tokens), text);  // BOS gives nothing
}

TEST(ByteTokenizer, NamesItsSpecialTokens) {
  const ByteTokenizer tokenizer(kByteModel);
  EXPECT_EQ(tokenizer.token_id("<s>"), 256U);
  EXPECT_EQ(tokenizer.token_id("</s>"), 257U);
  EXPECT_EQ(tokenizer.token_id("a"), uint32_t{'a'});
  EXPECT_EQ(tokenizer.token_id("ab"), std::nullopt);
  EXPECT_TRUE(tokenizer.ends(257));
  EXPECT_FALSE(tokenizer.ends(256));
  EXPECT_TRUE(tokenizer.is_special(256));
  EXPECT_FALSE(tokenizer.is_special(255));
  EXPECT_EQ(tokenizer.encode("</s>", Specials::parsed).size(), 4U);
}

TEST(ByteTokenizer, OtherVocabulariesAreNotBytes) {
  ModelTokens model = kByteModel;
  model.vocab_size = 128256;
  EXPECT_FALSE(ByteTokenizer::fits(model));
  model = kByteModel;
  model.bos.reset();
  EXPECT_FALSE(ByteTokenizer::fits(model));
  model = kByteModel;
  model.end_tokens = {2};
  EXPECT_FALSE(ByteTokenizer::fits(model));
}

TEST(LoadTokenizer, SaysWhatAFolderWithoutOneNeeds) {
  const TemporaryFolder folder;
  EXPECT_NE(load_tokenizer(folder.path(), kByteModel), nullptr);
  const ModelTokens other{.vocab_size = 128256, .bos = 1, .end_tokens = {2}};
  EXPECT_EQ(find_tokenizer(folder.path(), other), nullptr);
  const std::string error = error_of([&] { (void)load_tokenizer(folder.path(), other); });
  for (const char* part : {"tokenizer.json", "128256", "--tokens"}) {
    EXPECT_NE(error.find(part), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace keyhole::tools

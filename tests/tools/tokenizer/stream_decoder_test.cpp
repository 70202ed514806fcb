// Text as its tokens come: never half a character, nothing lost.
#include <gtest/gtest.h>

#include "tests/tools/tokenizer/byte_model.h"

namespace keyhole::tools {
namespace {

TEST(StreamDecoder, GivesCharactersWhole) {
  const ByteTokenizer tokenizer(kByteModel);
  StreamDecoder stream(tokenizer);
  const std::string text =
      "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z";  // a, e acute, euro sign, a face, z
  std::vector<std::string> pieces;
  for (const uint32_t token : tokenizer.encode(text)) {
    if (std::string piece = stream.push(token); !piece.empty()) pieces.push_back(piece);
  }
  EXPECT_EQ(pieces,
            (std::vector<std::string>{"a", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "z"}));
  EXPECT_EQ(stream.finish(), "");
}

TEST(StreamDecoder, KeepsBytesThatAreNoCharacters) {
  const ByteTokenizer tokenizer(kByteModel);
  // A continuation alone, bytes that UTF-8 never has, a beginning that another beginning follows.
  for (const std::string text :
       {"\x80\x80\x80\x80\x80", "\xFF\xFE!", "\xC0\xAF", "\xE2\xC3\xA9", "\xF0\x9F", "\xF5\x80"}) {
    StreamDecoder stream(tokenizer);
    std::string all;
    for (const uint32_t token : tokenizer.encode(text)) all += stream.push(token);
    EXPECT_EQ(all + stream.finish(), text);
  }
}

TEST(StreamDecoder, HoldsAtMostThreeBytes) {
  EXPECT_EQ(complete_utf8(""), 0U);
  EXPECT_EQ(complete_utf8("abc"), 3U);
  EXPECT_EQ(complete_utf8("ab\xC3"), 2U);
  EXPECT_EQ(complete_utf8("ab\xE2\x82"), 2U);
  EXPECT_EQ(complete_utf8("\xF0\x9F\x98"), 0U);
  EXPECT_EQ(complete_utf8("\xF0\x9F\x98\x80"), 4U);
  EXPECT_EQ(complete_utf8("\xE2\x82\xAC\x80"), 4U);
  EXPECT_EQ(complete_utf8("\x80\x80\x80\x80"), 4U);
}

}  // namespace
}  // namespace keyhole::tools

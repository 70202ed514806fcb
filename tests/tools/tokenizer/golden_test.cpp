// Tokenizers of every style against what Hugging Face's library makes of the same files and texts: see golden/make.py.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "runtime/files/json.h"
#include "tests/temporary_folder.h"
#include "tools/tokenizer/tokenizer_json.h"
#include "tools/tokenizer/unicode.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using Ids = std::vector<uint32_t>;

std::filesystem::path golden_folder() {
  const char* other = std::getenv("KEYHOLE_TOKENIZER_GOLDEN");
  return other != nullptr ? other : KEYHOLE_GOLDEN;
}

json read(const std::string& name) { return json::parse(read_file(golden_folder() / name)); }

std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

class Golden : public ::testing::TestWithParam<std::string> {
 protected:
  Golden()
      : root_(read(GetParam() + ".json")),
        expected_(read(GetParam() + ".expected.json")),
        lines_(read("lines.json")),
        tokenizer_(JsonPart(root_, GetParam() + ".json: "),
                   {.vocab_size = 1 << 20, .bos = {}, .end_tokens = {}}) {}

  std::string line(size_t i) const { return lines_.at("lines").at(i).get<std::string>(); }
  size_t lines() const { return lines_.at("lines").size(); }
  Ids as_text(size_t i) const {
    const json& differing = expected_.at("as_text");
    const auto it = differing.find(std::to_string(i));
    return it != differing.end() ? it->get<Ids>() : expected_.at("parsed").at(i).get<Ids>();
  }
  std::string decoded(size_t i) const {
    const json& differing = expected_.at("decoded");
    const auto it = differing.find(std::to_string(i));
    return it != differing.end() ? it->get<std::string>() : line(i);
  }

  json root_, expected_, lines_;
  JsonTokenizer tokenizer_;
};

TEST_P(Golden, TokensAreTheLibrarys) {
  ASSERT_GE(lines(), 100U);
  size_t wrong = 0;
  for (size_t i = 0; i < lines(); ++i) {
    const bool equal =
        tokenizer_.encode(line(i), Specials::parsed) == expected_.at("parsed").at(i).get<Ids>() &&
        tokenizer_.encode(line(i)) == as_text(i);
    if (equal) continue;
    if (++wrong > 10) continue;
    EXPECT_EQ(tokenizer_.encode(line(i), Specials::parsed), expected_.at("parsed").at(i).get<Ids>())
        << "line " << i << ": " << lines_.at("lines").at(i).dump(-1, ' ', true);
    EXPECT_EQ(tokenizer_.encode(line(i)), as_text(i))
        << "line " << i << ": " << lines_.at("lines").at(i).dump(-1, ' ', true);
  }
  EXPECT_EQ(wrong, 0U) << "of " << lines() << " lines";
}

TEST_P(Golden, TextIsTheLibrarysAtOnceAndTokenByToken) {
  for (size_t i = 0; i < lines(); ++i) {
    const Ids ids = as_text(i);
    EXPECT_EQ(to_utf8(tokenizer_.decode(ids)), decoded(i)) << "line " << i;
    StreamDecoder stream(tokenizer_);
    std::string text;
    for (const uint32_t id : ids) {
      const std::string piece = stream.push(id);
      EXPECT_TRUE(is_utf8(piece)) << "line " << i;
      text += piece;
    }
    EXPECT_EQ(text + stream.finish(), tokenizer_.decode(ids)) << "line " << i;
  }
}

TEST_P(Golden, ManyThreadsUseOneTokenizer) {
  std::vector<Ids> found(4);
  std::vector<std::thread> threads;
  for (Ids& ids : found) {
    threads.emplace_back([&] {
      for (size_t i = 0; i < std::min<size_t>(lines(), 60); ++i) {
        const Ids one = tokenizer_.encode(line(i), Specials::parsed);
        ids.insert(ids.end(), one.begin(), one.end());
        (void)tokenizer_.decode(one);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Ids expected;
  for (size_t i = 0; i < std::min<size_t>(lines(), 60); ++i) {
    const Ids one = expected_.at("parsed").at(i).get<Ids>();
    expected.insert(expected.end(), one.begin(), one.end());
  }
  for (const Ids& ids : found) EXPECT_EQ(ids, expected);
}

TEST_P(Golden, PromptsHaveTheirFrame) {
  EXPECT_EQ(tokenizer_.encode_prompt("A prompt."), expected_.at("prompt").get<Ids>());
}

TEST_P(Golden, BrokenBytesAreReplacementCharacters) {
  const json& broken = lines_.at("broken");
  for (size_t i = 0; i < broken.size(); ++i) {
    EXPECT_EQ(tokenizer_.encode(from_hex(broken.at(i).get<std::string>())),
              expected_.at("broken").at(i).get<Ids>())
        << broken.at(i);
  }
}

INSTANTIATE_TEST_SUITE_P(Styles, Golden,
                         ::testing::Values("gpt2", "gpt2_prefixed", "llama3", "qwen", "llama2",
                                           "mistral", "gemma", "odd", "spaced"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace keyhole::tools

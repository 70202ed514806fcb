// Thousands of damaged tokenizer.json files and chat templates: each is refused with a text, or works without harm.
#include <gtest/gtest.h>

#include <random>

#include "tests/sanitized.h"
#include "tests/temporary_folder.h"
#include "tests/tools/tokenizer/small_tokenizer.h"
#include "tools/tokenizer/chat.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using Random = std::mt19937_64;

const char* const kValues[] = {
    "null",
    "true",
    "0",
    "-1",
    "63",
    "64",
    "4294967295",
    "18446744073709551616",
    "1e99",
    "\"\"",
    "\"a\"",
    "\"Sequence\"",
    "\"ByteLevel\"",
    "\"Metaspace\"",
    "\"Split\"",
    "\"Strip\"",
    "\"Replace\"",
    "\"NFKC\"",
    "\"(?<=a)\\\\Kb\"",
    "\"\\u2581\"",
    "\" \"",
    "[]",
    "{}",
    "[[[[]]]]",
    R"({"type":"Split","pattern":{"Regex":"\\s*|a*"},"behavior":"MergedWithNext","invert":true})",
    R"({"type":"Metaspace","replacement":"\u2581","prepend_scheme":"first","split":true})",
    R"({"type":"Strip","content":"a","start":4294967295,"stop":7})",
    R"({"Regex":"(a|aa)+$"})",
    R"({"String":"ab"})"};

size_t pick(Random& random, size_t below) {
  return std::uniform_int_distribution<size_t>(0, below - 1)(random);
}

/// Some value of the file, at any depth.
json& somewhere(json& file, Random& random) {
  json* at = &file;
  while (at->is_structured() && !at->empty() && pick(random, 5) != 0) {
    auto it = at->begin();
    std::advance(it, static_cast<ptrdiff_t>(pick(random, at->size())));
    at = &*it;
  }
  return *at;
}

void expect_harmless(const JsonTokenizer& tokenizer) {
  const std::string text =
      "abc abd<s> \xE2\x96\x81"
      "e\xCC\x81 \xF0\x9F\x98\x80<tool>\n  aa\xFF";
  try {
    const auto ids = tokenizer.encode_prompt(text, Specials::parsed);
    for (const uint32_t id : ids) EXPECT_LT(id, kSmallModel.vocab_size);
    (void)tokenizer.decode(ids);
  } catch (const std::runtime_error& e) {
    EXPECT_STRNE(e.what(), "");  // an expression without an end
  }
}

TEST(TokenizerMutations, AreRefusedOrHarmless) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  size_t accepted = 0, refused = 0;
  for (int i = 0; i < static_cast<int>(test::unless_sanitized(6000, 1500)); ++i) {
    json file = small_tokenizer();
    for (size_t n = 1 + pick(random, 3); n > 0; --n) {
      json& value = somewhere(file, random);
      if (value.is_object() && !value.empty() && pick(random, 2) == 0) {
        auto it = value.begin();
        std::advance(it, static_cast<ptrdiff_t>(pick(random, value.size())));
        value.erase(it);
      } else {
        value = json::parse(kValues[pick(random, std::size(kValues))]);
      }
    }
    try {
      const JsonTokenizer tokenizer = make_tokenizer(file);
      ++accepted;
      expect_harmless(tokenizer);
    } catch (const std::runtime_error& e) {
      ASSERT_STRNE(e.what(), "");
      ++refused;
    }
  }
  // Both outcomes occur, or the mutations are too wild or too tame to tell anything.
  EXPECT_GT(accepted, 100U);
  EXPECT_GT(refused, 100U);
}

TEST(TokenizerMutations, DamagedBytesAreRefusedOrHarmless) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  const std::string original = small_tokenizer().dump();
  for (int i = 0; i < static_cast<int>(test::unless_sanitized(6000, 1500)); ++i) {
    std::string text = original;
    for (size_t n = 1 + pick(random, 3); n > 0; --n) {
      const size_t at = pick(random, text.size());
      switch (pick(random, 3)) {
        case 0: text[at] = static_cast<char>(pick(random, 256)); break;
        case 1: text.erase(at, 1 + pick(random, 8)); break;
        default:
          text.insert(at, text.substr(pick(random, text.size()), 1 + pick(random, 30)));
          break;
      }
    }
    try {
      const json file = parse_json(text, "tokenizer.json");
      expect_harmless(make_tokenizer(file));
    } catch (const std::runtime_error& e) {
      ASSERT_STRNE(e.what(), "");
    }
  }
}

TEST(ChatTemplateMutations, AreRefusedOrHarmless) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  std::vector<std::string> originals;
  const json golden = json::parse(read_file(KEYHOLE_GOLDEN "/chat.json"));
  for (const json& entry : golden.at("templates")) originals.push_back(entry.at("source"));
  const std::vector<ChatMessage> messages{{ChatMessage::Role::user, " a\n"},
                                          {ChatMessage::Role::assistant, "b"}};
  const char* const words[] = {"{{",
                               "}}",
                               "{%",
                               "%}",
                               "-",
                               "(",
                               ")",
                               "[",
                               "]",
                               " if ",
                               " else ",
                               "messages",
                               "loop",
                               "|",
                               "~",
                               "'",
                               "{% endif %}",
                               "{% set x = [x] %}",
                               "{% for m in messages %}",
                               "{% endfor %}",
                               " * 9",
                               "range(99)",
                               " is ",
                               " in ",
                               ".x",
                               "none",
                               "\\",
                               "{#",
                               "{% macro f() %}",
                               "f()"};
  size_t accepted = 0, refused = 0;
  for (int i = 0; i < static_cast<int>(test::unless_sanitized(8000, 1000)); ++i) {
    std::string text = originals[pick(random, originals.size())];
    for (size_t n = 1 + pick(random, 3); n > 0 && !text.empty(); --n) {
      const size_t at = pick(random, text.size());
      switch (pick(random, 4)) {
        case 0: text[at] = static_cast<char>(32 + pick(random, 95)); break;
        case 1: text.erase(at, 1 + pick(random, 12)); break;
        case 2: text.insert(at, words[pick(random, std::size(words))]); break;
        default:
          text.insert(at, text.substr(pick(random, text.size()), 1 + pick(random, 40)));
          break;
      }
    }
    try {
      const ChatTemplate chat = ChatTemplate::parse(text, "<s>", "</s>", "template");
      const ChatText out = chat.render(messages);
      ++accepted;
      for (const TextRange& range : out.literal) EXPECT_LE(range.end, out.text.size());
    } catch (const std::runtime_error& e) {
      ASSERT_STRNE(e.what(), "");
      ++refused;
    }
  }
  EXPECT_GT(accepted, 100U);
  EXPECT_GT(refused, 100U);
}

}  // namespace
}  // namespace keyhole::tools

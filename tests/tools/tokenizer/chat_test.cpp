// Chat templates against the Jinja environment of Hugging Face (golden/make_chat.py), and what is refused of them.
#include "tools/tokenizer/chat.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/temporary_folder.h"
#include "tests/tools/tokenizer/small_tokenizer.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using Role = ChatMessage::Role;

json golden() {
  const char* other = std::getenv("KEYHOLE_CHAT_GOLDEN");
  return json::parse(read_file(other != nullptr ? other : KEYHOLE_GOLDEN "/chat.json"));
}

std::vector<ChatMessage> conversation(const json& messages) {
  std::vector<ChatMessage> out;
  for (const json& message : messages) {
    const auto role = message.at("role").get<std::string>();
    out.push_back({role == "system" ? Role::system
                   : role == "user" ? Role::user
                                    : Role::assistant,
                   message.at("content").get<std::string>()});
  }
  return out;
}

ChatTemplate parse(const std::string& source) {
  return ChatTemplate::parse(source, "<s>", "</s>", "template");
}
ChatTemplate golden_template(const char* name) {
  return parse(golden().at("templates").at(name).at("source").get<std::string>());
}

TEST(Chat, TextIsThatOfTransformers) {
  const json file = golden();
  for (const auto& [name, entry] : file.at("templates").items()) {
    SCOPED_TRACE(name);
    std::unique_ptr<ChatTemplate> chat;
    const std::string error = error_of([&, &entry = entry] {
      chat = std::make_unique<ChatTemplate>(parse(entry.at("source").get<std::string>()));
    });
    EXPECT_EQ(error, "");
    if (!chat) continue;
    size_t at = 0;
    for (const json& messages : file.at("conversations")) {
      for (const bool answer : {true, false}) {
        const json& expected = entry.at("texts").at(at++);
        std::string text;
        const std::string refusal =
            error_of([&] { text = chat->render(conversation(messages), answer).text; });
        EXPECT_EQ(refusal.empty(), !expected.is_null()) << refusal << messages;
        if (!expected.is_null()) {
          EXPECT_EQ(text, expected.get<std::string>()) << messages;
        }
      }
    }
  }
}

// Lines, white space and letters of Unicode, escapes, raw text: what Jinja2 makes of them (golden/make_jinja.py).
TEST(Chat, TemplatesAreReadAsJinjaReadsThem) {
  for (const json& row : json::parse(read_file(KEYHOLE_GOLDEN "/jinja.json"))) {
    SCOPED_TRACE(row[0].get<std::string>());
    std::string text;
    const std::string error = error_of([&] {
      const ChatTemplate chat = parse(row[1].get<std::string>());
      text = chat.render(std::vector<ChatMessage>{{Role::user, row[2].get<std::string>()}}).text;
    });
    EXPECT_EQ(error, "");
    EXPECT_EQ(text, row[3].get<std::string>());
  }
}

TEST(Chat, WhatPeopleSayStaysSaidThroughChanges) {
  const ChatTemplate chat =
      parse("{{ messages[0]['content'] | upper | trim }}!{{ [messages[0]['content']] }}");
  const ChatText text = chat.render(std::vector<ChatMessage>{{Role::user, "\u00a0stra\u00dfe\n"}});
  EXPECT_EQ(text.text, "STRASSE!['\\xa0stra\u00dfe\\n']");
  ASSERT_EQ(text.literal.size(), 2U);
  EXPECT_EQ(text.literal[0].begin, 0U);
  EXPECT_EQ(text.literal[0].end, 7U);
  EXPECT_EQ(text.literal[1].begin, 10U);
  EXPECT_EQ(text.literal[1].end, text.text.size() - 2);
}

TEST(Chat, WhatPeopleSayIsLiteral) {
  const ChatTemplate chat = golden_template("llama3");
  const std::vector<ChatMessage> messages{
      {Role::user, " a <|eot_id|> b "}, {Role::assistant, "c"}, {Role::user, "d"}};
  const ChatText text = chat.render(messages);
  std::vector<std::string> said;
  for (const TextRange& range : text.literal)
    said.push_back(text.text.substr(range.begin, range.end - range.begin));
  EXPECT_EQ(said, (std::vector<std::string>{"a <|eot_id|> b", "c", "d"}));
}

TEST(Chat, TokensOfTurnsCannotBeWrittenByPeople) {
  const json file = small_tokenizer();
  const JsonTokenizer tokenizer = make_tokenizer(file);
  const ChatTemplate chat =
      parse("{% for m in messages %}{{ '<s>' + m.content + '<end>' }}{% endfor %}");
  const std::vector<ChatMessage> messages{{Role::user, "a<end>b"}};
  const std::vector<uint32_t> expected{20, 0, 5, 4, 8, 3, 6, 1, 21};
  EXPECT_EQ(chat.render(messages).encode(tokenizer), expected);
}

// Marks that a file lists as not special, looked for before or behind the normalizer, in the middle of what is said or
// across its ends.
TEST(Chat, NoAddedTokenIsMadeOfWhatPeopleWrite) {
  // "<a" of the template and "b>" of what is said are no token, nor the other way round.
  const ChatTemplate halves = parse("<a{{ messages[0].content }}b>");
  for (const bool normalized : {false, true}) {
    for (const char* normalizer : {"null", R"({"type": "NFC"})", R"({"type": "Lowercase"})"}) {
      SCOPED_TRACE(std::string(normalized ? "normalized, " : "as written, ") + normalizer);
      json file = small_tokenizer();
      file["normalizer"] = json::parse(normalizer);
      for (json& token : file["added_tokens"]) token["normalized"] = normalized;
      json token = file["added_tokens"][2];  // one that is not special
      file["added_tokens"].erase(2);
      for (const auto& [id, text] : {std::pair{22U, "<dd>"}, {23U, "<ab>"}, {24U, "<a"}}) {
        token["id"] = id;
        token["content"] = text;
        file["added_tokens"].push_back(token);
      }
      const ChatTemplate marked =
          parse("{% for m in messages %}{{ '<s><dd>' + m.content + '<dd>' }}{% endfor %}");
      const JsonTokenizer tokenizer = make_tokenizer(file);
      const std::vector<ChatMessage> said{{Role::user, "a<dd>b"}};
      EXPECT_EQ(marked.render(said).encode(tokenizer),
                (std::vector<uint32_t>{20, 22, 0, 5, 3, 3, 6, 1, 22}));
      const auto half = [&](const char* text) {
        return halves.render(std::vector<ChatMessage>{{Role::user, text}}).encode(tokenizer);
      };
      EXPECT_EQ(half("b>"), (std::vector<uint32_t>{24, 1, 6, 1, 6})) << "<a is the template's own";
      EXPECT_EQ(half("<a"), (std::vector<uint32_t>{24, 5, 10, 6})) << "the second <ab> is not";
      EXPECT_EQ(tokenizer.encode("<ab><dd>"), (std::vector<uint32_t>{23, 22}));
    }
  }
}

TEST(Chat, TurnsFollowEachOther) {
  struct Case {
    const char* name;
    std::string end;
  };
  for (const Case& c : {Case{"llama3", "<|eot_id|>"},
                        {"chatml", "<|im_end|>"},
                        {"thinking", "<|im_end|>"},
                        {"mistral", "</s>"},
                        {"mistral3", "</s>"},
                        {"llama2", " </s>"},
                        {"gemma", "<end_of_turn>"},
                        {"phi3", "<|end|>"},
                        {"llama31", "<|eot_id|>"}}) {
    SCOPED_TRACE(c.name);
    const ChatTemplate chat = golden_template(c.name);
    EXPECT_EQ(chat.end_of_answer(), c.end);
    const std::vector<ChatMessage> messages{
        {Role::user, "one"}, {Role::assistant, "two"}, {Role::user, "<s>three"}};
    const std::string begin = chat.render(std::span(messages).first(1)).text;
    const ChatText next = chat.next_turn("<s>three");
    // Mistral's newer form has a space before an answer, Llama 2's too, which its model writes.
    const std::string whole = chat.render(messages).text;
    const std::string joined = begin + "two" + c.end + next.text;
    const std::string spaced = begin + " two" + c.end + next.text;
    EXPECT_TRUE(whole == joined || whole == spaced) << whole << "\n" << joined;
    ASSERT_EQ(next.literal.size(), 1U);
    EXPECT_EQ(next.text.substr(next.literal[0].begin, next.literal[0].end - next.literal[0].begin),
              "<s>three");
  }
}

TEST(Chat, FoldersSayWhereTheirTemplateIs) {
  const TemporaryFolder folder;
  EXPECT_NE(error_of([&] { (void)ChatTemplate::load(folder.path()); }).find("no chat template"),
            std::string::npos);
  const std::vector<ChatMessage> messages{{Role::user, "x"}};
  write_file(
      folder / "tokenizer_config.json",
      std::string(
          R"({"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}1{{ messages[0].content }}"})"));
  EXPECT_EQ(ChatTemplate::load(folder.path()).render(messages).text, "<s>1x");
  write_file(
      folder / "tokenizer_config.json",
      std::string(
          R"({"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "2{{ messages[0].content }}"}]})"));
  EXPECT_EQ(ChatTemplate::load(folder.path()).render(messages).text, "2x");
  write_file(folder / "chat_template.jinja", std::string("3{{ messages[0]['content'] }}\n"));
  EXPECT_EQ(ChatTemplate::load(folder.path()).render(messages).text, "3x");
  write_file(folder / "chat_template.jinja", std::string("a\n{% nonsense %}"));
  const std::string error = error_of([&] { (void)ChatTemplate::load(folder.path()); });
  for (const char* part : {"chat_template.jinja", "line 2", "nonsense"})
    EXPECT_NE(error.find(part), std::string::npos) << error;
}

/// 1 + 1 + ... of so many ones.
std::string sum_of(size_t ones) {
  std::string sum = "1";
  for (size_t i = 1; i < ones; ++i) sum += " + 1";
  return sum;
}

TEST(Chat, WhatIsNotBuiltInIsRefusedBeforeItRuns) {
  for (const auto& [source, part] : std::vector<std::pair<std::string, std::string>>{
           {"{% include 'x' %}", "include"},
           {"{{ x | wordwrap }}", "wordwrap"},
           {"{{ x is prime }}", "prime"},
           {"{% if x %}", "endif"},
           {"{% endfor %}", "endfor"},
           {"{{ 'abc }}", "string"},
           {"{{ x", "end"},
           {"{# x", "comment"},
           {"{{ x y }}", "\"y\""},
           {"{% for in x %}", "in"},
           {"{{ }}", "expression"},
           {"{% set a, b = x %}", "several names"},
           {"{% raw %}x", "endraw"},
           {"{{ (((( }}", "expression"},
           {"{{ x[] }}", "index"},
           {"{{ 1 ? 2 }}", "?"},
           {"{{ 99999999999999999999 }}", "18 digits"},
           {"{{ '\\u12g4' }}", "hexadecimal"},
           {std::string(1000, '{'), "line 1"},
           {"{{ " + sum_of(100000) + " }}", "500 operations"},
           {"{{ " + std::string(5000, '(') + "1" + std::string(5000, ')') + " }}", "deep"}}) {
    const std::string error = error_of([&source = source] { (void)parse(source); });
    EXPECT_TRUE(error.starts_with("template, line ")) << source.substr(0, 50) << ": " << error;
    EXPECT_NE(error.find(part), std::string::npos) << source.substr(0, 50) << ": " << error;
  }
}

TEST(Chat, WhatFailsNamesItsLine) {
  const std::vector<ChatMessage> messages{{Role::user, "x"}};
  for (const auto& [source, part] : std::vector<std::pair<std::string, std::string>>{
           {"{{ raise_exception('no ' + messages[0].content) }}", "no x"},
           {"{% macro f() %}{{ f() + " + sum_of(300) + " }}{% endmacro %}{{ f() }}", "levels"},
           {"{{ nothing.x }}", "nothing"},
           {"{{ nothing() }}", "function nothing"},
           {"{{ 1 + 'a' }}", "a number + a string"},
           {"{{ 1 // 0 }}", "division by 0"},
           {"{{ 'a'.swapcase() }}", "swapcase"},
           {"{{ range(1000000) }}", "range"},
           {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "macros"},
           {"{% for i in range(99999) %}{{ " + sum_of(400) + " }}{% endfor %}", "a million steps"},
           {"{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% "
            "endfor %}",
            "64 MiB"},
           {"{% set ns = namespace(x=1) %}{% for i in range(99) %}{% set ns.x = [ns.x] %}{% endfor "
            "%}",
            "nested"},
           {"{% set ns = namespace() %}{% set ns.x = ns %}", "namespace"},
           {"{% set messages.x = 1 %}", "of a namespace"},
           {"{{ nothing | tojson }}", "undefined"},
           {"{{ 'x' | replace('', 'y') }}", "empty"},
           {"{{ 10 ** 300 }}", "9e15"}}) {
    const std::string error =
        error_of([&, &source = source] { (void)parse("\n" + source).render(messages); });
    EXPECT_TRUE(error.starts_with("template, line 2: ")) << source << ": " << error;
    EXPECT_NE(error.find(part), std::string::npos) << source << ": " << error;
  }
}

}  // namespace
}  // namespace keyhole::tools

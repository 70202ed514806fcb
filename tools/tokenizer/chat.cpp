#include "tools/tokenizer/chat.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "runtime/files/json.h"
#include "tools/tokenizer/jinja/interpreter.h"
#include "tools/tokenizer/json_part.h"
#include "tools/tokenizer/unicode.h"

namespace keyhole::tools {
namespace {

namespace fs = std::filesystem;

// The first user's text where only the second turn is wanted: a template neither strips nor parses any of it.
constexpr std::string_view kFirstUser = "a first question";
constexpr std::string_view kFirstAnswer = "the answer to it";

const char* name_of(ChatMessage::Role role) {
  switch (role) {
    case ChatMessage::Role::system: return "system";
    case ChatMessage::Role::user: return "user";
    default: return "assistant";
  }
}

ChatText with_ranges(const jinja::Text& rendered) {
  ChatText out;
  out.text = rendered.bytes;
  for (size_t i = 0; i < rendered.said.size(); ++i) {
    if (rendered.said[i] == '\0') continue;
    if (!out.literal.empty() && out.literal.back().end == i) {
      ++out.literal.back().end;
    } else {
      out.literal.push_back({i, i + 1});
    }
  }
  return out;
}

ChatText part_of(const ChatText& whole, size_t begin, size_t end) {
  ChatText out;
  out.text = whole.text.substr(begin, end - begin);
  for (const TextRange& range : whole.literal) {
    const TextRange part{std::max(range.begin, begin) - begin, std::min(range.end, end) - begin};
    if (range.begin < end && range.end > begin) out.literal.push_back(part);
  }
  return out;
}

/// The token that `text` begins with, with white space before it: tokens of templates are written <...> or [...].
/// Empty where there is none.
std::string leading_token(const std::string& text) {
  constexpr size_t kLongest = 64;
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string::npos || (text[begin] != '<' && text[begin] != '[')) return "";
  const size_t end = text.find_first_of(text[begin] == '<' ? "> \n<" : "] \n[", begin + 1);
  const bool closed = end != std::string::npos && (text[end] == '>' || text[end] == ']');
  return closed && end - begin < kLongest ? text.substr(0, end + 1) : "";
}

/// The tokens of tokenizer_config.json that templates name: bos_token, eos_token, unk_token, pad_token.
jinja::Dict special_tokens(const JsonPart& config) {
  jinja::Dict out;
  for (const char* name : {"bos_token", "eos_token", "unk_token", "pad_token"}) {
    const auto token = config.find(name);
    if (!token) continue;
    out.emplace_back(name, jinja::Text(std::string_view(
                               token->is_object() ? token->at("content").text() : token->text())));
  }
  return out;
}

/// The template among several, each with a name: the one called "default".
std::string default_template(const JsonPart& list) {
  for (const JsonPart& item : list.items(64)) {
    if (item.at("name").text() == "default") return item.at("template").text();
  }
  list.fail("a list without the name \"default\"", "a template, or a list with that name");
}

}  // namespace

struct ChatTemplate::Form {
  jinja::Template source;
  jinja::Dict tokens;
};

ChatTemplate::ChatTemplate(std::shared_ptr<const Form> form) : form_(std::move(form)) {}

ChatTemplate ChatTemplate::parse(std::string_view source, const std::string& bos,
                                 const std::string& eos, const std::string& place) {
  jinja::Dict tokens{{"bos_token", jinja::Text(std::string_view(bos))},
                     {"eos_token", jinja::Text(std::string_view(eos))}};
  return ChatTemplate(
      std::make_shared<const Form>(Form{jinja::Template(source, place), std::move(tokens)}));
}

ChatTemplate ChatTemplate::load(const fs::path& folder) {
  const fs::path config_path = folder / "tokenizer_config.json";
  std::error_code ignored;
  nlohmann::json config = nlohmann::json::object();
  if (fs::exists(config_path, ignored)) config = read_json_file(config_path.string());
  const JsonPart root(config, config_path.string() + ": ");
  std::string source;
  std::string place;
  const fs::path file = folder / "chat_template.jinja";
  if (fs::exists(file, ignored)) {
    std::ifstream in(file, std::ios::binary);
    if (!in) throw std::runtime_error(file.string() + ": cannot be opened");
    source.assign(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    if (!is_utf8(source)) throw std::runtime_error(file.string() + " is not UTF-8");
    place = file.string();
  } else if (const auto part = root.find("chat_template")) {
    source = part->is_array() ? default_template(*part) : part->text();
    place = part->place();
  } else {
    throw std::runtime_error(folder.string() +
                             " has no chat template (chat_template.jinja, or chat_template in "
                             "tokenizer_config.json): models that are "
                             "no instruct models have none, and are asked without --chat");
  }
  return ChatTemplate(
      std::make_shared<const Form>(Form{jinja::Template(source, place), special_tokens(root)}));
}

ChatText ChatTemplate::render(std::span<const ChatMessage> messages, bool answer) const {
  jinja::List list;
  for (const ChatMessage& message : messages) {
    const std::string text = is_utf8(message.text) ? message.text : to_utf8(message.text);
    list.emplace_back(jinja::Dict{{"role", name_of(message.role)},
                                  {"content", jinja::Text(text, /*is_said=*/true)}});
  }
  jinja::Dict globals = form_->tokens;
  globals.emplace_back("messages", std::move(list));
  globals.emplace_back("add_generation_prompt", answer);
  globals.emplace_back("tools", jinja::None{});
  globals.emplace_back("documents", jinja::None{});
  return with_ranges(form_->source.render(globals));
}

ChatText ChatTemplate::between(std::string_view user) const {
  const std::vector<ChatMessage> messages{{ChatMessage::Role::user, std::string(kFirstUser)},
                                          {ChatMessage::Role::assistant, std::string(kFirstAnswer)},
                                          {ChatMessage::Role::user, std::string(user)}};
  const ChatText whole = render(messages);
  const size_t answer = whole.text.find(kFirstAnswer);
  if (answer == std::string::npos)
    throw std::runtime_error(
        "the chat template leaves answers out: turns cannot follow each other");
  return part_of(whole, answer + kFirstAnswer.size(), whole.text.size());
}

std::string ChatTemplate::end_of_answer() const { return leading_token(between(kFirstUser).text); }

ChatText ChatTemplate::next_turn(std::string_view user) const {
  const ChatText rest = between(user);
  return part_of(rest, leading_token(rest.text).size(), rest.text.size());
}

}  // namespace keyhole::tools

#include "tools/commands/common/asking.h"

#include <algorithm>
#include <cctype>

namespace keyhole::tools {
namespace {

// An introduction, so that no template strips the beginning or the end of the context.
constexpr std::string_view kIntroduction = "Read this text. Questions about it follow.\n\n<<<\n";
constexpr std::string_view kEnd = "\n>>>";

/// The first user's message with its template around it, cut at the end of the context.
struct Opening {
  ChatText head;
  std::string tail;
};

Opening opening(const ChatTemplate& chat, const std::string& context, const std::string& question) {
  const std::string body = std::string(kIntroduction) + context;
  const ChatMessage message{ChatMessage::Role::user, body + std::string(kEnd) + "\n\n" + question};
  ChatText whole = chat.render({&message, 1});
  const size_t end = whole.text.find(kIntroduction) + body.size();
  Opening cut;
  cut.tail = whole.text.substr(end);
  cut.head.text = whole.text.substr(0, end);
  for (TextRange range : whole.literal) {
    range.end = std::min(range.end, end);
    if (range.begin < range.end) cut.head.literal.push_back(range);
  }
  return cut;
}

bool is_part(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }

/// Whether `text` has `value` somewhere that is no part of a longer number or word.
bool contains_value(const std::string& text, const std::string& value) {
  for (size_t at = text.find(value); at != std::string::npos; at = text.find(value, at + 1)) {
    const size_t end = at + value.size();
    const bool longer =
        (at > 0 && is_part(text[at - 1])) || (end < text.size() && is_part(text[end]));
    if (!longer) return true;
  }
  return false;
}

std::string all_values(const Question& question) {
  std::string all;
  for (const std::string& value : question.values) all += (all.empty() ? "" : ", ") + value;
  return all;
}

}  // namespace

std::vector<uint32_t> Asking::context(const std::string& context) const {
  return chat_ ? opening(*chat_, context, "?").head.encode(*tokenizer_)
               : tokenizer_->encode_prompt(context);
}

std::vector<uint32_t> Asking::first_question(const Question& question) const {
  return chat_ ? tokenizer_->encode_inside(opening(*chat_, "", question.spoken).tail,
                                           Specials::parsed)
               : tokenizer_->encode_inside(question.prompt);
}

std::vector<uint32_t> Asking::next_question(const Question& question) const {
  return chat_ ? tokenizer_->encode_inside(chat_->next_turn(question.spoken).text, Specials::parsed)
               : tokenizer_->encode_inside(question.prompt);
}

std::vector<uint32_t> Asking::answer(const Question& question) const {
  return chat_ ? tokenizer_->encode_inside(all_values(question) + chat_->end_of_answer(),
                                           Specials::parsed)
               : tokenizer_->encode_inside(question.answer.empty() ? all_values(question) + ".\n"
                                                                   : question.answer);
}

bool Asking::complete(const Question& question, const std::string& text) const {
  if (chat_) return false;
  if (question.answer.empty()) {  // one line, up to the bracket that a question began with
    const size_t begin = text.find_first_not_of(" \n");
    return begin != std::string::npos && text.find_first_of("]\n", begin) != std::string::npos;
  }
  // A wrong answer may be longer than the right one; a few bytes more show what it was.
  return text.find(question.answer.back()) != std::string::npos ||
         text.size() >= question.answer.size() + 8;
}

bool Asking::right(const Question& question, const std::string& text) const {
  return free(question) ? found(question, text) == 1.0 : text.starts_with(question.answer);
}

double Asking::found(const Question& question, const std::string& text) {
  const auto count =
      std::count_if(question.values.begin(), question.values.end(),
                    [&](const std::string& value) { return contains_value(text, value); });
  return static_cast<double>(count) / static_cast<double>(question.values.size());
}

}  // namespace keyhole::tools

// What instruct models read: messages in the form of the model's chat template.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools {

struct ChatMessage {
  enum class Role : uint8_t { system, user, assistant };
  Role role = Role::user;
  std::string text;  ///< UTF-8
};

/// A text in the form of a template. Special tokens are parsed in it (Specials::parsed), but not in `literal`, the
/// bytes that people and the model said: what they write cannot end their turn. Hugging Face's apply_chat_template
/// parses them there too.
struct ChatText {
  std::string text;
  std::vector<TextRange> literal;  ///< ascending, without overlap

  /// Its tokens. BOS is in the text where the template has one: encode_prompt() would put a second one in front.
  [[nodiscard]] std::vector<uint32_t> encode(const Tokenizer& tokenizer) const {
    return tokenizer.encode(text, Specials::parsed, literal);
  }
};

/// The model's own template, run: the part of Jinja that chat templates are written in is built in, without tools and
/// documents. Immutable: any number of threads may use it.
class ChatTemplate {
 public:
  /// The template of a model folder: chat_template.jinja, or chat_template of tokenizer_config.json (of several, the
  /// one named "default"). Throws std::runtime_error where there is none, or it uses what is not built in: names the
  /// file and the line.
  [[nodiscard]] static ChatTemplate load(const std::filesystem::path& folder);
  /// `source` is a template's text; bos and eos are how these tokens are written, "" where there are none. `place` is
  /// for errors.
  [[nodiscard]] static ChatTemplate parse(std::string_view source, const std::string& bos,
                                          const std::string& eos, const std::string& place);

  /// A conversation from its beginning, and with `answer` what begins the answer that follows. Throws
  /// std::runtime_error with the template's own words for messages that it refuses, a system message in most of
  /// Gemma's for example.
  [[nodiscard]] ChatText render(std::span<const ChatMessage> messages, bool answer = true) const;

  /// What follows an answer and its end_of_answer(): another message of the user, and what begins the next answer. A
  /// session that holds the conversation so far goes on with these tokens. Throws as render() does.
  [[nodiscard]] ChatText next_turn(std::string_view user) const;

  /// The token that ends an answer, as it is written: "<|eot_id|>", with white space before it where the template has
  /// some; empty where a question follows an answer without one. A session whose answer was cut off takes it
  /// (Specials::parsed) before next_turn(). Throws as render() does.
  [[nodiscard]] std::string end_of_answer() const;

 private:
  struct Form;
  explicit ChatTemplate(std::shared_ptr<const Form> form);
  /// What a conversation of two turns has between the first answer and the second question's end.
  [[nodiscard]] ChatText between(std::string_view user) const;
  std::shared_ptr<const Form> form_;
};

}  // namespace keyhole::tools

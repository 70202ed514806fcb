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

/// A text in the form of a template. Special tokens are parsed in it (Specials::parsed), but not in `literal`, the bytes that
/// people and the model said: what they write cannot end their turn. Hugging Face's apply_chat_template parses them there too.
struct ChatText {
  std::string text;
  std::vector<TextRange> literal;  ///< ascending, without overlap

  /// Its tokens. BOS is in the text where the template has one: encode_prompt() would put a second one in front.
  [[nodiscard]] std::vector<uint32_t> encode(const Tokenizer& tokenizer) const {
    return tokenizer.encode(text, Specials::parsed, literal);
  }
};

/// A template of one of the known families, with what its own text varies. Templates are written in Jinja, which is not run here:
/// a family is recognised by its special tokens, and refused where none is. Immutable.
class ChatTemplate {
 public:
  /// The template of a model folder: chat_template.jinja, or chat_template of tokenizer_config.json. Throws std::runtime_error where
  /// there is none, and for one of no known family: names the folder and the families.
  [[nodiscard]] static ChatTemplate load(const std::filesystem::path& folder);
  /// `source` is a template's text; bos and eos are how these tokens are written, "" where there are none. `place` is for errors.
  [[nodiscard]] static ChatTemplate parse(std::string_view source, std::string bos, std::string eos,
                                          const std::string& place);

  /// "llama3", "chatml", "mistral", "llama2", "gemma", "phi3".
  [[nodiscard]] const std::string& family() const;

  /// A conversation from its beginning, and with `answer` what begins the answer that follows. Throws std::runtime_error for
  /// messages that the family has no place for: a system message that is not the first, or two of one side in a row where it
  /// takes turns.
  [[nodiscard]] ChatText render(std::span<const ChatMessage> messages, bool answer = true) const;

  /// What follows an answer and its end_of_answer(): another message of the user, and what begins the next answer. A session that
  /// holds the conversation so far goes on with these tokens.
  [[nodiscard]] ChatText next_turn(std::string_view user) const;

  /// The special token that ends an answer, as it is written: "<|eot_id|>". A session whose answer was cut off takes it before
  /// next_turn().
  [[nodiscard]] const std::string& end_of_answer() const;

 private:
  struct Form;
  explicit ChatTemplate(std::shared_ptr<const Form> form);
  std::shared_ptr<const Form> form_;
};

}  // namespace keyhole::tools

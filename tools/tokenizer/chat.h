// The input of instruct models: messages in the form of the model's chat template.
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
/// bytes that people and the model said, so that what they write cannot end their turn. (Hugging Face's
/// apply_chat_template parses them there, too.)
struct ChatText {
  std::string text;
  std::vector<TextRange> literal;  ///< ascending, without overlap

  /// The tokens of the text. BOS is in the text where the template has one: encode_prompt() would put a second one in
  /// front.
  [[nodiscard]] std::vector<uint32_t> encode(const Tokenizer& tokenizer) const {
    return tokenizer.encode(text, Specials::parsed, literal);
  }
};

/// Runs the model's own template. The part of Jinja in which chat templates are written is built in, without tools
/// and documents. Immutable: any number of threads may use it.
class ChatTemplate {
 public:
  /// Loads the template of a model folder: chat_template.jinja, or chat_template of tokenizer_config.json (of
  /// several, the one named "default"). Throws std::runtime_error that names the file and the line, where there is
  /// none or it uses what is not built in.
  [[nodiscard]] static ChatTemplate load(const std::filesystem::path& folder);
  /// Parses `source`, the text of a template; bos and eos are the texts of these tokens, "" where there are none.
  /// `place` is for errors.
  [[nodiscard]] static ChatTemplate parse(std::string_view source, const std::string& bos,
                                          const std::string& eos, const std::string& place);

  /// Writes a conversation from its beginning and, with `answer`, the beginning of the answer that follows. Throws
  /// std::runtime_error with the template's own words for messages that it refuses, for example a system message in
  /// most of Gemma's.
  [[nodiscard]] ChatText render(std::span<const ChatMessage> messages, bool answer = true) const;

  /// Writes what follows an answer and its end_of_answer(): another message of the user, and the beginning of the
  /// next answer. A session that holds the conversation so far goes on with these tokens. Throws as render() does.
  [[nodiscard]] ChatText next_turn(std::string_view user) const;

  /// The token that ends an answer, as text: "<|eot_id|>", with white space before it where the template has some;
  /// empty where a question follows an answer without one. A session whose answer was cut off takes it
  /// (Specials::parsed) before next_turn(). Throws as render() does.
  [[nodiscard]] std::string end_of_answer() const;

 private:
  struct Form;
  explicit ChatTemplate(std::shared_ptr<const Form> form);
  /// The text between the first answer and the end of the second question, in a conversation of two turns.
  [[nodiscard]] ChatText between(std::string_view user) const;
  std::shared_ptr<const Form> form_;
};

}  // namespace keyhole::tools

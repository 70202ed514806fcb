// Text and tokens: the interface of every vocabulary, decoding token by token, and the choice of a model folder's
// tokenizer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace keyhole::tools {

/// The fields of a model's config.json that a tokenizer needs.
struct ModelTokens {
  uint32_t vocab_size = 0;           ///< rows of the embedding: token ids are below
  std::optional<uint32_t> bos;       ///< bos_token_id
  std::vector<uint32_t> end_tokens;  ///< eos_token_id
};

/// Whether the names of special tokens in a text ("<|eot_id|>") are text like any other, or become those tokens.
enum class Specials : uint8_t {
  as_text,  ///< for what people and files say: no text can end a turn or begin another
  parsed,   ///< for what templates write
};

/// A piece of a text, in bytes.
struct TextRange {
  size_t begin = 0, end = 0;
};

/// The place of a decoder in the text that it makes, see Tokenizer::decode_next().
struct DecodeState {
  bool inside = false;    ///< tokens came before: the next one is not the first
  uint32_t stripped = 0;  ///< bytes taken from the beginning of the text
  bool strips = true;     ///< still at that beginning
  /// The state for a text that continues another: the space before its first word stays.
  [[nodiscard]] static DecodeState in_text() { return {.inside = true, .strips = false}; }
};

/// One vocabulary. Immutable: any number of threads may use it at once. Throws std::runtime_error with a text where
/// a call says so.
class Tokenizer {
 public:
  Tokenizer() = default;
  virtual ~Tokenizer() = default;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  /// Returns the tokens of `text`, with nothing put in front or behind. Any bytes are text: what is not UTF-8 becomes
  /// U+FFFD, except where every byte is a token. A character without a token becomes the unknown token, and is lost
  /// where there is none. `literal`, ascending and without overlap, is only text: neither it nor a part of it becomes
  /// an added token, special or not. Throws where an expression of the vocabulary's file takes too many steps.
  [[nodiscard]] virtual std::vector<uint32_t> encode(
      std::string_view text, Specials specials = Specials::as_text,
      std::span<const TextRange> literal = {}) const = 0;

  /// encode() with the tokens that the vocabulary puts around a prompt: in most, BOS in front.
  [[nodiscard]] virtual std::vector<uint32_t> encode_prompt(
      std::string_view text, Specials specials = Specials::as_text) const = 0;

  /// Returns the tokens of a text that continues another one: without the space that some vocabularies put before a
  /// text's first word, where that can be told. Throws as encode() does.
  [[nodiscard]] std::vector<uint32_t> encode_inside(std::string_view text,
                                                    Specials specials = Specials::as_text) const;

  /// Appends the bytes of `token`, which follows what was decoded into `state`; special tokens, and ids that the
  /// vocabulary lacks, give none. A token may end inside a UTF-8 character: see StreamDecoder.
  virtual void decode_next(uint32_t token, DecodeState& state, std::string& bytes) const = 0;

  /// The bytes of `tokens` as a text of their own.
  [[nodiscard]] std::string decode(std::span<const uint32_t> tokens) const;

  /// The id of the token of that text, of special ones such as "<|eot_id|>", too; nothing where there is none.
  [[nodiscard]] virtual std::optional<uint32_t> token_id(std::string_view token) const = 0;
  /// The text of a token in the vocabulary, for messages; empty for ids that it lacks. For text see decode().
  [[nodiscard]] virtual std::string token_text(uint32_t token) const = 0;
  /// Whether the token stands for no text.
  [[nodiscard]] virtual bool is_special(uint32_t token) const = 0;

  /// The number that all ids are below; not every id need have a token.
  [[nodiscard]] virtual uint32_t vocab_size() const = 0;
  /// The tokens that end an answer, ascending: those of config.json, generation_config.json and tokenizer_config.json
  /// together.
  [[nodiscard]] virtual const std::vector<uint32_t>& end_tokens() const = 0;
  [[nodiscard]] bool ends(uint32_t token) const;
};

/// Makes text of tokens as they come, never half a UTF-8 character. Bytes that cannot become a character are given as
/// they are.
class StreamDecoder {
 public:
  /// `state`: DecodeState() for a text of its own, as an answer is; in_text() for one that continues a prompt. The
  /// tokenizer lives longer.
  explicit StreamDecoder(const Tokenizer& tokenizer, DecodeState state = {})
      : tokenizer_(&tokenizer), state_(state) {}

  /// Returns the characters that are complete with this token; may be empty.
  [[nodiscard]] std::string push(uint32_t token);
  /// Returns what is left at the end: the bytes of a character that was cut off.
  [[nodiscard]] std::string finish();

 private:
  const Tokenizer* tokenizer_;
  DecodeState state_;
  std::string held_;
};

/// The number of bytes up to the last whole character of `bytes`: all except the at most 3 last ones that more bytes
/// may complete. Bytes that cannot become a character count as whole.
[[nodiscard]] size_t complete_utf8(std::string_view bytes);

/// Finds the tokenizer of a model folder: that of its tokenizer.json, else bytes where the vocabulary is one of
/// bytes, else nullptr. Throws std::runtime_error that names a file that is broken, or asks for what is not known
/// here.
[[nodiscard]] std::unique_ptr<const Tokenizer> find_tokenizer(const std::filesystem::path& folder,
                                                              const ModelTokens& model);
/// find_tokenizer() that throws std::runtime_error, which says what to do, where there is none.
[[nodiscard]] std::unique_ptr<const Tokenizer> load_tokenizer(const std::filesystem::path& folder,
                                                              const ModelTokens& model);

}  // namespace keyhole::tools

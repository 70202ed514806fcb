// tokenizer.json of Hugging Face's tokenizers library: byte-level BPE (Llama 3, Qwen, GPT-2) and BPE with byte
// fallback (Llama 2, Mistral, Gemma).
#pragma once

#include <algorithm>

#include "tools/tokenizer/added_tokens.h"
#include "tools/tokenizer/bpe.h"
#include "tools/tokenizer/decoder_chain.h"
#include "tools/tokenizer/normalizer.h"
#include "tools/tokenizer/pre_tokenizer.h"
#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools {

/// The tokens around a prompt: in most, BOS in front.
struct PromptFrame {
  std::vector<uint32_t> before, after;
};

/// Turns a text into tokens in the order of Hugging Face's library: added tokens are found, the rest is normalized,
/// cut into words, and merged.
class JsonTokenizer final : public Tokenizer {
 public:
  /// `root` is the file's object, with the file's name as its place. Throws std::runtime_error with the place of what
  /// is wrong or not built in, and for a vocabulary with more tokens than the model.
  JsonTokenizer(const JsonPart& root, const ModelTokens& model);

  [[nodiscard]] std::vector<uint32_t> encode(
      std::string_view text, Specials specials = Specials::as_text,
      std::span<const TextRange> literal = {}) const override;
  [[nodiscard]] std::vector<uint32_t> encode_prompt(
      std::string_view text, Specials specials = Specials::as_text) const override;
  void decode_next(uint32_t token, DecodeState& state, std::string& bytes) const override;
  [[nodiscard]] std::optional<uint32_t> token_id(std::string_view token) const override;
  [[nodiscard]] std::string token_text(uint32_t token) const override;
  [[nodiscard]] bool is_special(uint32_t token) const override { return added_.is_special(token); }
  [[nodiscard]] uint32_t vocab_size() const override {
    return std::max(bpe_.size(), added_.size());
  }
  [[nodiscard]] const std::vector<uint32_t>& end_tokens() const override { return end_tokens_; }

  /// The tokens that the file's post-processor puts around a prompt; the folder's other files may change it.
  [[nodiscard]] const PromptFrame& frame() const { return frame_; }
  void set_frame(PromptFrame frame) { frame_ = std::move(frame); }
  void add_end_token(uint32_t token);

 private:
  Bpe bpe_;
  std::unique_ptr<const Normalizer> normalizer_;
  std::unique_ptr<const PreTokenizer> pre_tokenizer_;
  AddedTokens added_;
  DecoderChain decoder_;
  PromptFrame frame_;
  std::vector<uint32_t> end_tokens_;
};

/// Loads the tokenizer of a folder with a tokenizer.json. BOS and end tokens follow tokenizer_config.json,
/// special_tokens_map.json and generation_config.json. Throws as the constructor does, naming the file.
[[nodiscard]] std::unique_ptr<const Tokenizer> load_tokenizer_json(
    const std::filesystem::path& folder, const ModelTokens& model);

}  // namespace keyhole::tools

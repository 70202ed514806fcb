// The decoder of tokenizer.json: how a token becomes text again.
#pragma once

#include <string>
#include <vector>

#include "tools/tokenizer/json_part.h"
#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools {

/// Runs the decoders of whole texts token by token, which gives the same text; those that cannot be run so are
/// refused. Bytes that form no UTF-8 stay as they are, where Hugging Face's library gives U+FFFD. Immutable.
class DecoderChain {
 public:
  /// Takes ByteLevel, ByteFallback, Fuse, Metaspace, Replace of a text, Strip, Sequence. Throws std::runtime_error
  /// that names another type, or an order that needs the whole text, and its place.
  explicit DecoderChain(const JsonPart& part);

  /// Appends the bytes of the token that is written `token`.
  void decode(const std::string& token, DecodeState& state, std::string& bytes) const;

 private:
  struct Step {
    enum class Kind : uint8_t { byte_level, byte_fallback, metaspace, replace, strip } kind;
    std::string text;              // what is replaced, or stripped
    std::string content;           // by what
    uint32_t left = 0, right = 0;  // stripped at most
    bool drops_first = false;      // metaspace: those of the first token
  };

  void add(const JsonPart& part, int depth);

  std::vector<Step> steps_;
  bool fused_ = false;                                  // from here on a step sees the whole text
  Step begin_{Step::Kind::strip, "", "", 0, 0, false};  // of the whole text's beginning
};

}  // namespace keyhole::tools

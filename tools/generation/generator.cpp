#include "tools/generation/generator.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace keyhole::tools {

const char* to_text(StopReason reason) {
  switch (reason) {
    case StopReason::length: return "length";
    case StopReason::end_token: return "end-token";
    case StopReason::text: return "text";
    case StopReason::none: break;
  }
  return "none";
}

Generator::Generator(Sequence& sequence, Sampler& sampler, const Tokenizer* tokenizer, Stops stops,
                     DecodeState follows)
    : sequence_(sequence), sampler_(sampler), stops_(std::move(stops)), stop_text_(stops_.texts) {
  if (tokenizer != nullptr) decoder_.emplace(*tokenizer, follows);
  if (sequence_.logits().empty()) {
    throw std::invalid_argument(
        "nothing has been said that an answer could follow; needed: at least one token");
  }
}

bool Generator::is_end(uint32_t token) const {
  return std::find(stops_.end_tokens.begin(), stops_.end_tokens.end(), token) !=
         stops_.end_tokens.end();
}

std::optional<Generator::Piece> Generator::next() {
  if (ended_) return std::nullopt;
  if (!tokens_.empty()) (void)sequence_.step(tokens_.back());
  Piece piece{sampler_.next(sequence_.logits()), ""};
  tokens_.push_back(piece.token);
  sampler_.saw({&piece.token, 1});

  if (is_end(piece.token)) {
    reason_ = StopReason::end_token;
  } else if (decoder_) {
    piece.text = stop_text_.push(decoder_->push(piece.token));
    if (stop_text_.found()) reason_ = StopReason::text;
  }
  if (reason_ == StopReason::none && tokens_.size() >= stops_.most_tokens) {
    reason_ = StopReason::length;
  }
  ended_ = reason_ != StopReason::none;
  if (ended_) piece.text += stop_text_.finish();
  text_ += piece.text;
  return piece;
}

std::string Generator::give_up() {
  if (ended_) return "";
  ended_ = true;
  std::string text = stop_text_.finish();
  text_ += text;
  return text;
}

}  // namespace keyhole::tools

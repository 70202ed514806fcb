#include "tools/commands/decode/turns.h"

#include <algorithm>
#include <utility>

namespace keyhole::tools {
namespace {

void append(std::vector<uint32_t>& tokens, const std::vector<uint32_t>& more) {
  tokens.insert(tokens.end(), more.begin(), more.end());
}

}  // namespace

Turns::Turns(const Tokenizer& tokenizer, ChatTemplate chat, std::string system)
    : tokenizer_(tokenizer), chat_(std::move(chat)), system_(std::move(system)) {}

std::vector<uint32_t> Turns::with(std::vector<uint32_t> conversation,
                                  const std::string& said) const {
  const std::vector<uint32_t> ends = end_tokens();
  while (!conversation.empty() &&
         std::find(ends.begin(), ends.end(), conversation.back()) != ends.end()) {
    conversation.pop_back();
  }
  if (!chat_) {
    append(conversation,
           conversation.empty() ? tokenizer_.encode_prompt(said) : tokenizer_.encode(said));
  } else if (conversation.empty()) {
    std::vector<ChatMessage> messages;
    if (!system_.empty()) messages.push_back({ChatMessage::Role::system, system_});
    messages.push_back({ChatMessage::Role::user, said});
    conversation = chat_->render(messages).encode(tokenizer_);
  } else {
    append(conversation, tokenizer_.encode(chat_->end_of_answer(), Specials::parsed));
    append(conversation, chat_->next_turn(said).encode(tokenizer_));
  }
  return conversation;
}

DecodeState Turns::answer_state() const { return chat_ ? DecodeState() : DecodeState::in_text(); }

std::vector<uint32_t> Turns::end_tokens() const {
  std::vector<uint32_t> ends = tokenizer_.end_tokens();
  if (!chat_) return ends;
  for (const uint32_t token : tokenizer_.encode(chat_->end_of_answer(), Specials::parsed)) {
    if (tokenizer_.is_special(token)) ends.push_back(token);
  }
  return ends;
}

}  // namespace keyhole::tools

#include "tools/commands/decode/turns.h"

namespace keyhole::tools {

std::vector<uint32_t> Turns::with(std::vector<uint32_t> conversation,
                                  const std::string& said) const {
  while (!conversation.empty() && tokenizer_.ends(conversation.back())) conversation.pop_back();
  const std::vector<uint32_t> more =
      conversation.empty() ? tokenizer_.encode_prompt(said) : tokenizer_.encode(said);
  conversation.insert(conversation.end(), more.begin(), more.end());
  return conversation;
}

}  // namespace keyhole::tools

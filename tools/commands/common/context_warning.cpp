#include "tools/commands/common/context_warning.h"

#include "tools/terminal/units.h"
#include "tools/terminal/warning.h"

namespace keyhole::tools {

std::string context_warning(const LlamaConfig& model, uint64_t tokens) {
  const uint64_t longest = model.longest_context();
  if (tokens <= longest) return "";
  return "the context is " + format_count(tokens) + " tokens long, but the model's is " +
         format_count(longest) +
         " (max_position_embeddings and rope_scaling of its config.json): answers that need more "
         "are "
         "not to be trusted";
}

void warn_of_context(const LlamaConfig& model, uint64_t tokens) {
  const std::string text = context_warning(model, tokens);
  if (!text.empty()) warn(text);
}

}  // namespace keyhole::tools

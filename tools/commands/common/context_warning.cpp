#include "tools/commands/common/context_warning.h"

#include <algorithm>

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

std::string rope_warning(const LlamaConfig& model) {
  if (model.unread_rope.empty()) return "";
  std::string names;
  for (const std::string& name : model.unread_rope) names += (names.empty() ? "" : ", ") + name;
  const bool has_old_name = std::find(model.unread_rope.begin(), model.unread_rope.end(),
                                      "attn_factor") != model.unread_rope.end();
  return "the rope_scaling of the model's config.json has " + names +
         ", which is not read, as in Hugging Face transformers: a model that was trained with it "
         "answers wrongly" +
         (has_old_name ? "; what is read is attention_factor" : "");
}

void warn_of_context(const LlamaConfig& model, uint64_t tokens) {
  for (const std::string& text : {rope_warning(model), context_warning(model, tokens)}) {
    if (!text.empty()) warn(text);
  }
}

}  // namespace keyhole::tools

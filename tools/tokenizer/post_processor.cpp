#include "tools/tokenizer/post_processor.h"

#include "tools/tokenizer/normalizer.h"

namespace keyhole::tools {
namespace {

constexpr size_t kMaxFrame = 64;

PromptFrame read_template(const JsonPart& part, uint32_t rows) {
  const JsonPart special = part.at("special_tokens");
  PromptFrame frame;
  bool behind = false;
  const JsonPart single = part.at("single");
  for (const JsonPart& item : single.items(kMaxFrame)) {
    if (item.find("Sequence")) {
      if (behind) item.fail("a second text", "one Sequence");
      behind = true;
      continue;
    }
    const JsonPart added = item.at("SpecialToken").at("id");
    for (const JsonPart& id : special.at(added.text()).at("ids").items(kMaxFrame)) {
      if (id.number() >= rows) id.fail("a token id below " + std::to_string(rows));
      (behind ? frame.after : frame.before).push_back(id.number());
    }
  }
  if (!behind) single.fail("a template without the text", "one Sequence");
  return frame;
}

}  // namespace

PromptFrame read_post_processor(const JsonPart& part, uint32_t rows, int depth) {
  if (depth > kMaxSequenceDepth) {
    part.fail("nested too deep", std::to_string(kMaxSequenceDepth) + " sequences in each other");
  }
  const JsonPart type = part.at("type");
  const std::string& name = type.text();
  if (name == "ByteLevel") return {};  // moves offsets, which nobody asks for here
  if (name == "TemplateProcessing") return read_template(part, rows);
  if (name == "Sequence") {
    PromptFrame frame;
    for (const JsonPart& item : part.at("processors").items(kMaxSequenceParts)) {
      const PromptFrame inner = read_post_processor(item, rows, depth + 1);
      frame.before.insert(frame.before.begin(), inner.before.begin(), inner.before.end());
      frame.after.insert(frame.after.end(), inner.after.begin(), inner.after.end());
    }
    return frame;
  }
  type.fail("TemplateProcessing, ByteLevel, Sequence (others are not built in)");
}

}  // namespace keyhole::tools

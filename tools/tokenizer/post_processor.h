// The post_processor of tokenizer.json: the tokens around a text.
#pragma once

#include "tools/tokenizer/json_part.h"
#include "tools/tokenizer/tokenizer_json.h"

namespace keyhole::tools {

/// Reads TemplateProcessing, ByteLevel, Sequence; ids are below `rows`. Throws std::runtime_error that names another
/// type and its place.
[[nodiscard]] PromptFrame read_post_processor(const JsonPart& part, uint32_t rows, int depth = 0);

}  // namespace keyhole::tools

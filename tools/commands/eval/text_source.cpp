#include "tools/commands/eval/text_source.h"

#include <memory>
#include <span>
#include <string>

#include "tools/commands/common/bundled_model.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/units.h"
#include "tools/tokenizer/token_file.h"

namespace keyhole::tools {
namespace {

/// Bytes of the text of `tokens`, which continue another one.
size_t bytes_of(const Tokenizer& tokenizer, std::span<const uint32_t> tokens) {
  std::string text;
  DecodeState state = DecodeState::in_text();
  for (const uint32_t token : tokens) tokenizer.decode_next(token, state, text);
  return text.size();
}

}  // namespace

Text make_text(const EvalOptions& options) {
  if (!options.prompt_file.empty() && !options.token_file.empty())
    throw UsageError("--prompt and --tokens: one of them is allowed");
  const uint32_t length = length_of(options.task);
  std::vector<uint32_t> tokens;
  Text text;
  std::unique_ptr<const Tokenizer> tokenizer;
  std::string name = options.token_file;
  if (!options.token_file.empty()) {
    tokens = read_token_file(options.token_file);
  } else {
    const std::filesystem::path path = options.prompt_file.empty()
                                           ? bundled_model_folder() / "haystack.txt"
                                           : std::filesystem::path(options.prompt_file);
    name = path.string();
    tokenizer = load_tokenizer(options.model);
    tokens = tokenizer->encode_prompt(options.prompt_file.empty() ? read_text_file(path)
                                                                  : read_prompt_file(path));
  }
  const uint64_t needed = uint64_t{length} + options.bytes + 1;
  if (tokens.size() < needed) {
    throw UsageError(name + " has " + format_count(tokens.size()) + " tokens; --length " +
                     options.task.length + " and --bytes " + std::to_string(options.bytes) +
                     " (tokens, too) need " + format_count(needed));
  }
  const auto end = tokens.begin() + length;
  text.context.assign(tokens.begin(), end);
  text.decoded.assign(end, end + options.bytes + 1);
  if (tokenizer) text.bytes = bytes_of(*tokenizer, std::span(text.decoded).subspan(1));
  return text;
}

}  // namespace keyhole::tools

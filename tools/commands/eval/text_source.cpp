#include "tools/commands/eval/text_source.h"

#include <algorithm>
#include <memory>
#include <span>
#include <string>

#include "tools/commands/common/bundled_model.h"
#include "tools/commands/common/prompt_text.h"
#include "tools/tasks/random.h"
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

/// The text that the options name, in tokens.
struct TextSource {
  std::string name;
  std::unique_ptr<const Tokenizer> tokenizer;  ///< null for a file of token ids
  std::string text;              ///< of which the tokens are to be made; empty for such a file
  std::vector<uint32_t> tokens;  ///< of such a file
};

TextSource read_source(const EvalOptions& options) {
  if (!options.prompt_file.empty() && !options.token_file.empty())
    throw UsageError("--prompt and --tokens: one of them is allowed");
  TextSource source;
  source.name = options.token_file;
  if (!options.token_file.empty()) {
    source.tokens = read_token_file(options.token_file);
    return source;
  }
  const std::filesystem::path path = options.prompt_file.empty()
                                         ? bundled_model_folder() / "haystack.txt"
                                         : std::filesystem::path(options.prompt_file);
  source.name = path.string();
  source.tokenizer = load_tokenizer(options.model);
  source.text = options.prompt_file.empty() ? read_text_file(path) : read_prompt_file(path);
  return source;
}

}  // namespace

Text make_text(const EvalOptions& options) {
  const TextSource source = read_source(options);
  const std::vector<uint32_t> tokens =
      source.tokenizer ? source.tokenizer->encode_prompt(source.text) : source.tokens;
  const uint32_t length = length_of(options.task);
  const uint64_t needed = uint64_t{length} + options.bytes + 1;
  if (tokens.size() < needed) {
    throw UsageError(source.name + " has " + format_count(tokens.size()) + " tokens; --length " +
                     options.task.length + " and --bytes " + std::to_string(options.bytes) +
                     " (tokens, too) need " + format_count(needed));
  }
  const auto end = tokens.begin() + length;
  Text text;
  text.context.assign(tokens.begin(), end);
  text.decoded.assign(end, end + options.bytes + 1);
  if (source.tokenizer)
    text.bytes = bytes_of(*source.tokenizer, std::span(text.decoded).subspan(1));
  return text;
}

std::vector<std::vector<uint32_t>> make_passages(const EvalOptions& options, uint32_t count) {
  const TextSource source = read_source(options);
  const uint32_t length = length_of(options.task);
  std::vector<uint32_t> tokens = source.tokens, front;
  if (source.tokenizer) {
    tokens = source.tokenizer->encode(source.text);
    front = source.tokenizer->encode_prompt("");
  }
  if (length <= front.size()) {
    throw UsageError("--length " + options.task.length + " has no room for text: " +
                     format_count(front.size()) + " tokens stand before every prompt");
  }
  const size_t needed = length - front.size();
  if (tokens.size() < needed) {
    throw UsageError(source.name + " has " + format_count(tokens.size()) + " tokens; --length " +
                     options.task.length + " needs " + format_count(needed));
  }
  const uint64_t places = tokens.size() - needed + 1;
  Random random(options.task.seed);
  std::vector<std::vector<uint32_t>> out;
  for (uint64_t i = 0; i < count; ++i) {
    // One place in each of as many equal stretches.
    const uint64_t from = places * i / count, to = places * (i + 1) / count;
    const auto begin = tokens.begin() + static_cast<ptrdiff_t>(
                                            from + random.below(std::max<uint64_t>(1, to - from)));
    std::vector<uint32_t>& prompt = out.emplace_back(front);
    prompt.insert(prompt.end(), begin, begin + static_cast<ptrdiff_t>(needed));
  }
  return out;
}

}  // namespace keyhole::tools

// BOS and end tokens as the small files beside tokenizer.json give them.
#include <algorithm>

#include "runtime/files/json.h"
#include "tools/tokenizer/tokenizer_json.h"

namespace keyhole::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// Reads the file's object; nothing where there is no file.
std::optional<json> read_if_there(const fs::path& path) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return std::nullopt;
  return read_json_file(path.string());
}

/// The token of a field that is its text, or an object with its text as "content".
std::optional<uint32_t> named_token(const JsonPart& part, const char* field,
                                    const Tokenizer& tokenizer) {
  const auto value = part.find(field);
  if (!value) return std::nullopt;
  return tokenizer.token_id(value->is_object() ? value->at("content").text() : value->text());
}

/// add_bos_token outranks the post-processor: files differ in which of them they keep up to date.
void frame_as_told(const JsonPart& config, std::optional<uint32_t> bos, JsonTokenizer& tokenizer) {
  if (!bos || !config.find("add_bos_token")) return;
  PromptFrame frame = tokenizer.frame();
  const bool there =
      std::find(frame.before.begin(), frame.before.end(), *bos) != frame.before.end();
  if (config.flag("add_bos_token", false)) {
    if (!there) frame.before.insert(frame.before.begin(), *bos);
  } else {
    std::erase(frame.before, *bos);
  }
  tokenizer.set_frame(std::move(frame));
}

}  // namespace

std::unique_ptr<const Tokenizer> load_tokenizer_json(const fs::path& folder,
                                                     const ModelTokens& model) {
  const fs::path path = folder / "tokenizer.json";
  const json root = read_json_file(path.string());
  auto tokenizer = std::make_unique<JsonTokenizer>(JsonPart(root, path.string() + ": "), model);

  std::optional<uint32_t> bos;
  for (const char* name : {"special_tokens_map.json", "tokenizer_config.json"}) {
    const fs::path file = folder / name;
    const auto object = read_if_there(file);
    if (!object) continue;
    const JsonPart part(*object, file.string() + ": ");
    if (const auto eos = named_token(part, "eos_token", *tokenizer)) tokenizer->add_end_token(*eos);
    if (const auto token = named_token(part, "bos_token", *tokenizer)) bos = token;
    frame_as_told(part, bos, *tokenizer);
  }
  const fs::path file = folder / "generation_config.json";
  if (const auto object = read_if_there(file)) {
    const JsonPart part(*object, file.string() + ": ");
    if (const auto eos = part.find("eos_token_id")) {
      for (const JsonPart& id : eos->is_array() ? eos->items(1024) : std::vector<JsonPart>{*eos}) {
        if (id.number() < model.vocab_size) tokenizer->add_end_token(id.number());
      }
    }
  }
  return tokenizer;
}

}  // namespace keyhole::tools

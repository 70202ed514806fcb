#include "tools/tokenizer/tokenizer_json.h"

#include <algorithm>

#include "runtime/files/json.h"
#include "tools/tokenizer/post_processor.h"
#include "tools/tokenizer/unicode.h"

namespace keyhole::tools {
namespace {

/// The part that stands under `field`, or nothing where the file has none.
template <class Make>
auto made(const JsonPart& root, const char* field, const Make& make) -> decltype(make(root)) {
  const auto part = root.find(field);
  return part ? make(*part) : decltype(make(root))();
}

/// `text` as UTF-8 and the ranges where they are then.
std::string repaired(std::string_view text, std::span<const TextRange> ranges,
                     std::vector<TextRange>& moved) {
  std::string out;
  size_t at = 0;
  for (const TextRange& range : ranges) {
    out += to_utf8(text.substr(at, range.begin - at));
    const size_t begin = out.size();
    out += to_utf8(text.substr(range.begin, range.end - range.begin));
    moved.push_back({begin, out.size()});
    at = range.end;
  }
  return out + to_utf8(text.substr(at));
}

/// The parts of `ranges` that lie in `piece`, counted from its beginning.
std::vector<TextRange> ranges_within(std::span<const TextRange> ranges, const TextRange& piece) {
  std::vector<TextRange> out;
  for (const TextRange& range : ranges) {
    const size_t begin = std::max(range.begin, piece.begin), end = std::min(range.end, piece.end);
    if (begin < end) out.push_back({begin - piece.begin, end - piece.begin});
  }
  return out;
}

/// Finds where ranges of `text` are in `normal`, its normalized form. It works as long as the text before an end
/// gives the beginning of `normal`; where it does not (a letter and its accent on both sides of the end), the range
/// is all of `normal`.
std::vector<TextRange> normalized_ranges(const Normalizer& normalizer, const std::string& text,
                                         const std::string& normal,
                                         std::span<const TextRange> ranges) {
  std::vector<TextRange> out;
  for (const TextRange& range : ranges) {
    size_t ends[2] = {};
    for (const size_t side : {0U, 1U}) {
      const std::string before =
          normalizer.normalize(text.substr(0, side == 0 ? range.begin : range.end));
      if (!normal.starts_with(before)) return {{0, normal.size()}};
      ends[side] = before.size();
    }
    if (ends[0] < ends[1]) out.push_back({ends[0], ends[1]});
  }
  return out;
}

void check_version(const JsonPart& root) {
  const auto version = root.find("version");
  if (version && version->text() != "1.0") version->fail("\"1.0\"");
}

}  // namespace

JsonTokenizer::JsonTokenizer(const JsonPart& root, const ModelTokens& model)
    : bpe_((check_version(root), root.at("model")), model.vocab_size),
      normalizer_(made(root, "normalizer", [](const JsonPart& p) { return make_normalizer(p); })),
      pre_tokenizer_(
          made(root, "pre_tokenizer", [](const JsonPart& p) { return make_pre_tokenizer(p); })),
      added_(root.find("added_tokens"), bpe_, normalizer_.get(), model.vocab_size),
      decoder_(root.at("decoder")),
      frame_(made(root, "post_processor",
                  [&](const JsonPart& p) { return read_post_processor(p, model.vocab_size); })) {
  for (const uint32_t token : model.end_tokens) add_end_token(token);
}

std::vector<uint32_t> JsonTokenizer::encode(std::string_view text, Specials specials,
                                            std::span<const TextRange> literal) const {
  std::string copy;
  std::vector<TextRange> moved;
  if (!is_utf8(text)) {
    copy = repaired(text, literal, moved);
    text = copy;
    literal = moved;
  }
  std::vector<uint32_t> tokens;
  Bpe::Cache cache;
  const auto encode_words = [&](std::string piece, bool first) {
    std::vector<Word> words;
    words.push_back({std::move(piece), first});
    if (pre_tokenizer_) words = pre_tokenizer_->cut(std::move(words));
    for (const Word& word : words) bpe_.encode(word.text, cache, tokens);
  };
  for (const TextPiece& piece : added_.cut(text, /*normalized=*/false, specials, literal)) {
    if (piece.token) {
      tokens.push_back(*piece.token);
      continue;
    }
    std::string part(text.substr(piece.range.begin, piece.range.end - piece.range.begin));
    std::vector<TextRange> said;
    if (added_.has_normalized()) said = ranges_within(literal, piece.range);
    if (normalizer_) {
      std::string normal = normalizer_->normalize(part);
      said = normalized_ranges(*normalizer_, part, normal, said);
      part = std::move(normal);
    }
    for (const TextPiece& word : added_.cut(part, /*normalized=*/true, specials, said)) {
      if (word.token) {
        tokens.push_back(*word.token);
      } else {
        encode_words(part.substr(word.range.begin, word.range.end - word.range.begin),
                     piece.range.begin == 0 && word.range.begin == 0);
      }
    }
  }
  return tokens;
}

std::vector<uint32_t> JsonTokenizer::encode_prompt(std::string_view text, Specials specials) const {
  std::vector<uint32_t> tokens = frame_.before;
  const std::vector<uint32_t> inner = encode(text, specials);
  tokens.insert(tokens.end(), inner.begin(), inner.end());
  tokens.insert(tokens.end(), frame_.after.begin(), frame_.after.end());
  return tokens;
}

void JsonTokenizer::decode_next(uint32_t token, DecodeState& state, std::string& bytes) const {
  if (is_special(token)) return;
  const std::string* added = added_.token(token);
  const std::string& text = added != nullptr ? *added : bpe_.token(token);
  if (!text.empty()) decoder_.decode(text, state, bytes);
}

std::optional<uint32_t> JsonTokenizer::token_id(std::string_view token) const {
  const auto added = added_.id(token);
  return added ? added : bpe_.id(token);
}

std::string JsonTokenizer::token_text(uint32_t token) const {
  const std::string* added = added_.token(token);
  return added != nullptr ? *added : bpe_.token(token);
}

void JsonTokenizer::add_end_token(uint32_t token) {
  const auto place = std::lower_bound(end_tokens_.begin(), end_tokens_.end(), token);
  if (place == end_tokens_.end() || *place != token) end_tokens_.insert(place, token);
}

}  // namespace keyhole::tools

#include "tools/tokenizer/added_tokens.h"

#include <algorithm>
#include <functional>

#include "tools/tokenizer/unicode.h"

namespace keyhole::tools {
namespace {

constexpr size_t kMaxAdded = size_t{1} << 20;

/// Where the character before `at` begins.
size_t character_before(std::string_view text, size_t at) {
  do --at;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0U) == 0x80U);
  return at;
}

bool word_before(std::string_view text, size_t at) {
  if (at == 0) return false;
  size_t from = character_before(text, at);
  return is_word(next_character(text, from));
}

bool word_at(std::string_view text, size_t at) {
  return at < text.size() && is_word(next_character(text, at));
}

}  // namespace

void AddedTokens::Finder::add(std::string text, size_t which) {
  if (text.empty()) return;
  std::vector<size_t>& known = lengths[static_cast<unsigned char>(text.front())];
  const auto place = std::lower_bound(known.begin(), known.end(), text.size(), std::greater<>());
  if (place == known.end() || *place != text.size()) known.insert(place, text.size());
  of_text.emplace(std::move(text), which);
}

std::optional<size_t> AddedTokens::Finder::find(std::string_view text, size_t at,
                                                size_t& bytes) const {
  for (const size_t length : lengths[static_cast<unsigned char>(text[at])]) {
    if (length > text.size() - at) continue;
    const auto it = of_text.find(std::string(text.substr(at, length)));
    if (it == of_text.end()) continue;
    bytes = length;
    return it->second;
  }
  return std::nullopt;
}

AddedTokens::AddedTokens(const std::optional<JsonPart>& list, const Bpe& model,
                         const Normalizer* normalizer, uint32_t rows) {
  if (!list) return;
  for (const JsonPart& item : list->items(kMaxAdded)) {
    const JsonPart id = item.at("id");
    const JsonPart content = item.at("content");
    const std::string& text = content.text();
    if (id.number() >= rows) continue;
    if (text.empty()) content.fail("a text that is not empty");
    const auto known = model.id(text);
    const bool other = known ? *known != id.number() : !model.token(id.number()).empty();
    if (other) {
      id.fail(std::to_string(id.number()),
              known ? std::to_string(*known) + ", which the vocabulary gives to it"
                    : "one that the vocabulary gives to no other token");
    }
    if (of_id_.contains(id.number())) id.fail("one that no other added token has");
    of_id_.emplace(id.number(), added_.size());
    added_.push_back({id.number(), text, item.flag("special", false),
                      item.flag("single_word", false), item.flag("lstrip", false),
                      item.flag("rstrip", false)});
    size_ = std::max(size_, id.number() + 1);
    // The default of Hugging Face's library for "normalized".
    if (item.flag("normalized", !added_.back().special)) {
      as_normalized_.add(normalizer != nullptr ? normalizer->normalize(text) : text,
                         added_.size() - 1);
    } else {
      as_written_.add(text, added_.size() - 1);
    }
  }
  for (size_t i = 0; i < added_.size(); ++i) of_text_.emplace(added_[i].text, i);
}

std::vector<TextPiece> AddedTokens::cut(std::string_view text, bool normalized, Specials specials,
                                        std::span<const TextRange> literal) const {
  const Finder& finder = normalized ? as_normalized_ : as_written_;
  std::vector<TextPiece> pieces;
  size_t done = 0;
  auto kept = literal.begin();
  for (size_t at = 0; at < text.size() && !finder.of_text.empty();) {
    while (kept != literal.end() && kept->end <= at) ++kept;
    if (kept != literal.end() && kept->begin <= at) {
      at = kept->end;
      continue;
    }
    // No token reaches into what was said, because the letters that would complete it are the speaker's.
    const size_t limit = kept == literal.end() ? text.size() : kept->begin;
    size_t bytes = 0;
    const auto which = finder.find(text.substr(0, limit), at, bytes);
    if (!which) {
      ++at;
      continue;
    }
    const Added& token = added_[*which];
    size_t begin = at;
    size_t end = at + bytes;
    if (token.special && specials == Specials::as_text) {
      at = end;
      continue;
    }
    at = end;
    if (token.single_word && (word_before(text, begin) || word_at(text, end))) continue;
    while (token.strips_left && begin > done) {
      size_t from = character_before(text, begin);
      const size_t space = from;
      if (!is_space(next_character(text, from))) break;
      begin = space;
    }
    for (size_t next = end; token.strips_right && next < text.size();) {
      if (!is_space(next_character(text, next))) break;
      end = next;
    }
    at = end;
    if (begin > done) pieces.push_back({{done, begin}, std::nullopt});
    pieces.push_back({{begin, end}, token.id});
    done = end;
  }
  if (done < text.size()) pieces.push_back({{done, text.size()}, std::nullopt});
  return pieces;
}

std::optional<uint32_t> AddedTokens::id(std::string_view token) const {
  const auto it = of_text_.find(token);
  return it == of_text_.end() ? std::nullopt : std::optional(added_[it->second].id);
}

const std::string* AddedTokens::token(uint32_t id) const {
  const auto it = of_id_.find(id);
  return it == of_id_.end() ? nullptr : &added_[it->second].text;
}

bool AddedTokens::is_special(uint32_t id) const {
  const auto it = of_id_.find(id);
  return it != of_id_.end() && added_[it->second].special;
}

}  // namespace keyhole::tools

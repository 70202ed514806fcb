#include "tools/tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdio>
#include <queue>
#include <stdexcept>

#include "tools/tokenizer/unicode.h"

namespace keyhole::tools {
namespace {

constexpr uint32_t kNoByte = UINT32_MAX;
// Longer words are whole texts of vocabularies that do not cut at spaces: they do not come again.
constexpr size_t kMaxCachedBytes = 256;
constexpr size_t kMaxCachedWords = size_t{1} << 17;

void refuse_unless_empty(const JsonPart& part, const char* field) {
  const auto value = part.find(field);
  if (value && (!value->is_string() || !value->text().empty())) {
    value->fail("\"\" (words with marks at their borders are not built in)");
  }
}

}  // namespace

void Bpe::Merges::reserve(size_t count) { slots_.resize(std::bit_ceil(2 * count + 2)); }

size_t Bpe::Merges::place(uint64_t pair) const {
  const size_t mask = slots_.size() - 1;
  size_t at = (pair * 0x9E3779B97F4A7C15U >> 20) & mask;
  while (slots_[at].pair != pair && slots_[at].pair != UINT64_MAX) at = (at + 1) & mask;
  return at;
}

void Bpe::Merges::set(uint64_t pair, Merge merge) { slots_[place(pair)] = {pair, merge}; }

const Bpe::Merge* Bpe::Merges::find(uint64_t pair) const {
  const Slot& slot = slots_[place(pair)];
  return slot.pair == pair ? &slot.merge : nullptr;
}

Bpe::Bpe(const JsonPart& part, uint32_t rows) {
  if (const auto type = part.find("type"); type && type->text() != "BPE") {
    type->fail("\"BPE\" (other models are not built in)");
  }
  if (const auto dropout = part.find("dropout"); dropout && !dropout->is_zero()) {
    dropout->fail("null or 0");
  }
  refuse_unless_empty(part, "continuing_subword_prefix");
  refuse_unless_empty(part, "end_of_word_suffix");
  fuses_unknown_ = part.flag("fuse_unk", false);
  whole_words_ = part.flag("ignore_merges", false);

  const JsonPart vocabulary = part.at("vocab");
  const auto tokens = vocabulary.numbers(rows);
  uint32_t size = 0;
  for (const auto& [token, id] : tokens) size = std::max(size, id + 1);
  tokens_.resize(size);
  for (const auto& [token, id] : tokens) {
    if (!tokens_[id].empty()) {
      vocabulary.fail("one that gives " + std::to_string(id) + " to " + shown_text(tokens_[id]) +
                          " and " + shown_text(token),
                      "one token per id");
    }
    tokens_[id] = token;
  }
  // The views are of tokens_, which does not change any more.
  ids_.reserve(tokens.size());
  for (uint32_t id = 0; id < size; ++id) {
    if (!tokens_[id].empty()) ids_.emplace(tokens_[id], id);
  }

  if (const auto unknown = part.find("unk_token")) {
    unknown_ = id(unknown->text());
    if (!unknown_) unknown->fail("a token of the vocabulary");
  }
  if (part.flag("byte_fallback", false)) {
    for (unsigned byte = 0; byte < 256; ++byte) {
      char name[8];
      std::snprintf(name, sizeof(name), "<0x%02X>", byte);
      bytes_.push_back(id(name).value_or(kNoByte));
    }
  }

  const JsonPart list = part.at("merges");
  const auto pairs = list.pairs();
  merges_.reserve(pairs.size());
  std::string joined;
  for (size_t i = 0; i < pairs.size(); ++i) {
    const auto& [left, right] = pairs[i];
    const auto left_id = id(left);
    const auto right_id = id(right);
    joined.assign(left).append(right);
    const auto result = id(joined);
    if (!left_id || !right_id || !result) {
      JsonPart(list.items(pairs.size())[i])
          .fail(shown_text(left) + " and " + shown_text(right),
                "tokens of the vocabulary that make another one");
    }
    merges_.set(pair(*left_id, *right_id), {static_cast<uint32_t>(i), *result});
  }
}

std::optional<uint32_t> Bpe::id(std::string_view token) const {
  const auto it = ids_.find(token);
  return it == ids_.end() ? std::nullopt : std::optional(it->second);
}

const std::string& Bpe::token(uint32_t id) const {
  static const std::string kNone;
  return id < tokens_.size() ? tokens_[id] : kNone;
}

void Bpe::split(std::string_view word, std::vector<Symbol>& symbols) const {
  const auto put = [&symbols](uint32_t token) {
    const auto here = static_cast<int32_t>(symbols.size());
    symbols.push_back({token, here - 1, here + 1, true});
  };
  bool unknown = false;  // a run of them is one, if they fuse
  for (size_t at = 0; at < word.size();) {
    const std::string_view character = word.substr(at, character_bytes(word[at]));
    at += character.size();
    if (const auto token = id(character)) {
      put(*token);
      unknown = false;
      continue;
    }
    bool has_bytes = !bytes_.empty();
    for (const char byte : character) {
      has_bytes = has_bytes && bytes_[static_cast<unsigned char>(byte)] != kNoByte;
    }
    if (has_bytes) {
      for (const char byte : character) put(bytes_[static_cast<unsigned char>(byte)]);
      unknown = false;
      continue;
    }
    if (unknown_ && !(unknown && fuses_unknown_)) put(*unknown_);
    unknown = true;
  }
  if (!symbols.empty()) symbols.back().next = -1;
}

void Bpe::merge(std::vector<Symbol>& symbols) const {
  struct Candidate {
    uint32_t rank;
    int32_t left;
    uint32_t result;
    // The queue gives its largest first: here that is the lowest rank, then the leftmost.
    bool operator<(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  std::vector<Candidate> storage;
  storage.reserve(symbols.size());
  std::priority_queue<Candidate> queue({}, std::move(storage));
  const auto consider = [&](int32_t left) {
    if (left < 0 || symbols[static_cast<size_t>(left)].next < 0) return;
    const Symbol& symbol = symbols[static_cast<size_t>(left)];
    const Merge* found =
        merges_.find(pair(symbol.token, symbols[static_cast<size_t>(symbol.next)].token));
    if (found != nullptr) queue.push({found->rank, left, found->result});
  };
  for (size_t i = 0; i < symbols.size(); ++i) consider(static_cast<int32_t>(i));
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = symbols[static_cast<size_t>(best.left)];
    if (!left.alive || left.next < 0) continue;
    Symbol& right = symbols[static_cast<size_t>(left.next)];
    // The pair may have changed since it was queued.
    const Merge* now = merges_.find(pair(left.token, right.token));
    if (now == nullptr || now->result != best.result) continue;
    left.token = best.result;
    left.next = right.next;
    right.alive = false;
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].previous = best.left;
    consider(left.previous);
    consider(best.left);
  }
}

void Bpe::encode(const std::string& word, Cache& cache, std::vector<uint32_t>& tokens) const {
  if (whole_words_) {
    if (const auto token = id(word)) {
      tokens.push_back(*token);
      return;
    }
  }
  const auto known = cache.find(word);
  if (known != cache.end()) {
    tokens.insert(tokens.end(), known->second.begin(), known->second.end());
    return;
  }
  if (word.size() > INT_MAX) {
    throw std::runtime_error("a text without a place to cut has " + std::to_string(word.size()) +
                             " bytes; allowed: at most 2147483647");
  }
  std::vector<Symbol> symbols;
  symbols.reserve(word.size());
  split(word, symbols);
  merge(symbols);
  const size_t begin = tokens.size();
  for (const Symbol& symbol : symbols) {
    if (symbol.alive) tokens.push_back(symbol.token);
  }
  if (word.size() <= kMaxCachedBytes && cache.size() < kMaxCachedWords) {
    cache.emplace(
        word, std::vector<uint32_t>(tokens.begin() + static_cast<ptrdiff_t>(begin), tokens.end()));
  }
}

}  // namespace keyhole::tools

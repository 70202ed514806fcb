// Byte pair encoding (Sennrich, Haddow, Birch 2016): turns words into tokens by merging pairs in the order of the
// vocabulary's merges.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tools/tokenizer/json_part.h"

namespace keyhole::tools {

/// The model of tokenizer.json, of type BPE. Immutable.
class Bpe {
 public:
  /// `rows` is the number of the model's tokens: ids are below it. Throws std::runtime_error with the place of what
  /// is wrong or not built in (dropout, prefixes of continued words, suffixes of ended ones).
  Bpe(const JsonPart& part, uint32_t rows);

  /// The tokens of words so far, kept while one text is encoded, because most words come again.
  using Cache = std::unordered_map<std::string, std::vector<uint32_t>>;

  /// Appends the tokens of `word`, valid UTF-8. A character without a token becomes the tokens of its bytes, where
  /// the vocabulary falls back to bytes, else the unknown token; where there is none it is lost, as in Hugging Face's
  /// library.
  void encode(const std::string& word, Cache& cache, std::vector<uint32_t>& tokens) const;

  [[nodiscard]] std::optional<uint32_t> id(std::string_view token) const;
  /// The text of a token; empty for ids that the vocabulary lacks.
  [[nodiscard]] const std::string& token(uint32_t id) const;
  /// One more than the largest id.
  [[nodiscard]] uint32_t size() const { return static_cast<uint32_t>(tokens_.size()); }

 private:
  struct Merge {
    uint32_t rank = 0, result = 0;
  };
  /// The merges by pair, in one flat table: a lookup is one or two cache lines.
  class Merges {
   public:
    void reserve(size_t count);
    void set(uint64_t pair, Merge merge);
    [[nodiscard]] const Merge* find(uint64_t pair) const;

   private:
    struct Slot {
      uint64_t pair = UINT64_MAX;
      Merge merge;
    };
    [[nodiscard]] size_t place(uint64_t pair) const;
    std::vector<Slot> slots_;
  };
  struct Symbol {
    uint32_t token;
    int32_t previous, next;
    bool alive;
  };

  static uint64_t pair(uint32_t left, uint32_t right) { return uint64_t{left} << 32 | right; }
  void split(std::string_view word, std::vector<Symbol>& symbols) const;
  void merge(std::vector<Symbol>& symbols) const;

  std::vector<std::string> tokens_;
  std::unordered_map<std::string_view, uint32_t> ids_;  // of tokens_
  Merges merges_;
  std::optional<uint32_t> unknown_;
  std::vector<uint32_t>
      bytes_;  // the tokens <0x00> to <0xFF>, where the vocabulary falls back to them
  bool fuses_unknown_ = false;
  bool whole_words_ = false;  // ignore_merges: a word that is a token is that token
};

}  // namespace keyhole::tools

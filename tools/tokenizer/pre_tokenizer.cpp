#include "tools/tokenizer/pre_tokenizer.h"

#include <functional>
#include <iterator>

#include "tools/tokenizer/byte_level.h"
#include "tools/tokenizer/normalizer.h"
#include "tools/tokenizer/pattern.h"
#include "tools/tokenizer/unicode.h"

namespace keyhole::tools {
namespace {

// GPT-2's expression.
constexpr const char* kByteLevelWords =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// Appends the pieces of `word`.
void append_pieces(const Word& word, const std::vector<TextRange>& ranges, std::vector<Word>& out) {
  for (const TextRange& range : ranges) {
    out.push_back(
        {word.text.substr(range.begin, range.end - range.begin), word.first && range.begin == 0});
  }
}

/// A pre-tokenizer that cuts at the matches of a function.
class Cut final : public PreTokenizer {
 public:
  using Matches = std::function<std::vector<TextRange>(std::string_view)>;
  Cut(Matches matches, SplitBehavior behavior, bool invert)
      : matches_(std::move(matches)), behavior_(behavior), invert_(invert) {}

  std::vector<Word> cut(std::vector<Word> words) const override {
    std::vector<Word> out;
    for (const Word& word : words) {
      append_pieces(word, split_at(word.text.size(), matches_(word.text), behavior_, invert_), out);
    }
    return out;
  }

 private:
  Matches matches_;
  SplitBehavior behavior_;
  bool invert_;
};

/// The ranges of single characters that `wanted` says.
Cut::Matches characters(bool (*wanted)(uint32_t)) {
  return [wanted](std::string_view text) {
    std::vector<TextRange> found;
    for (size_t at = 0; at < text.size();) {
      const size_t begin = at;
      if (wanted(next_character(text, at))) found.push_back({begin, at});
    }
    return found;
  };
}

std::unique_ptr<const PreTokenizer> cut_at(Pattern pattern, SplitBehavior behavior, bool invert) {
  return std::make_unique<Cut>(
      [pattern = std::move(pattern)](std::string_view text) { return pattern.matches(text); },
      behavior, invert);
}

class ByteLevel final : public PreTokenizer {
 public:
  explicit ByteLevel(const JsonPart& part) : prefix_(part.flag("add_prefix_space", true)) {
    if (part.flag("use_regex", true)) words_.emplace(Regex(kByteLevelWords, part.place()));
  }

  std::vector<Word> cut(std::vector<Word> words) const override {
    std::vector<Word> out;
    for (Word& word : words) {
      if (prefix_ && !word.text.starts_with(' ')) word.text.insert(0, 1, ' ');
      if (!words_) {
        out.push_back({bytes_to_characters(word.text), word.first});
        continue;
      }
      size_t at = 0;
      const auto put = [&](size_t begin, size_t end) {
        if (end == begin) return;
        out.push_back({bytes_to_characters(std::string_view(word.text).substr(begin, end - begin)),
                       word.first && begin == 0});
      };
      for (const TextRange& match : words_->matches(word.text)) {
        put(at, match.begin);
        put(match.begin, match.end);
        at = match.end;
      }
      put(at, word.text.size());
    }
    return out;
  }

 private:
  bool prefix_;
  std::optional<Pattern> words_;
};

class Metaspace final : public PreTokenizer {
 public:
  explicit Metaspace(const JsonPart& part)
      : space_(part.at("replacement").text()),
        scheme_(prepend_scheme(part)),
        splits_(part.flag("split", true)) {
    size_t at = 0;
    if (!space_.empty()) (void)next_character(space_, at);
    if (at == 0 || at != space_.size()) part.at("replacement").fail("one character");
  }

  std::vector<Word> cut(std::vector<Word> words) const override {
    std::vector<Word> out;
    for (Word& word : words) {
      std::string text;
      for (const char c : word.text) {
        if (c == ' ') {
          text += space_;
        } else {
          text.push_back(c);
        }
      }
      const bool prepends =
          scheme_ == PrependScheme::always || (scheme_ == PrependScheme::first && word.first);
      if (prepends && !text.starts_with(space_)) text.insert(0, space_);
      word.text = std::move(text);
      if (!splits_) {
        out.push_back(std::move(word));
        continue;
      }
      std::vector<TextRange> spaces;
      for (size_t at = word.text.find(space_); at != std::string::npos;
           at = word.text.find(space_, at + space_.size())) {
        spaces.push_back({at, at + space_.size()});
      }
      append_pieces(
          word, split_at(word.text.size(), spaces, SplitBehavior::merged_with_next, false), out);
    }
    return out;
  }

 private:
  std::string space_;
  PrependScheme scheme_;
  bool splits_;
};

class PreTokenizerSequence final : public PreTokenizer {
 public:
  PreTokenizerSequence(const JsonPart& part, int depth) {
    for (const JsonPart& item : part.at("pretokenizers").items(kMaxSequenceParts)) {
      parts_.push_back(make_pre_tokenizer(item, depth + 1));
    }
  }
  std::vector<Word> cut(std::vector<Word> words) const override {
    for (const auto& part : parts_) words = part->cut(std::move(words));
    return words;
  }

 private:
  std::vector<std::unique_ptr<const PreTokenizer>> parts_;
};

}  // namespace

PrependScheme prepend_scheme(const JsonPart& part) {
  const auto scheme = part.find("prepend_scheme");
  if (!scheme) {
    return part.flag("add_prefix_space", true) ? PrependScheme::always : PrependScheme::never;
  }
  const std::string& name = scheme->text();
  if (name == "always") return PrependScheme::always;
  if (name == "first") return PrependScheme::first;
  if (name == "never") return PrependScheme::never;
  scheme->fail("\"always\", \"first\", \"never\"");
}

std::unique_ptr<const PreTokenizer> make_pre_tokenizer(const JsonPart& part, int depth) {
  if (depth > kMaxSequenceDepth) {
    part.fail("nested too deep", std::to_string(kMaxSequenceDepth) + " sequences in each other");
  }
  const JsonPart type = part.at("type");
  const std::string& name = type.text();
  if (name == "ByteLevel") return std::make_unique<ByteLevel>(part);
  if (name == "Metaspace") return std::make_unique<Metaspace>(part);
  if (name == "Sequence") return std::make_unique<PreTokenizerSequence>(part, depth);
  if (name == "Split") {
    return cut_at(Pattern(part.at("pattern")), split_behavior(part.at("behavior")),
                  part.flag("invert", false));
  }
  if (name == "Digits") {
    return std::make_unique<Cut>(
        characters(is_number),
        part.flag("individual_digits", false) ? SplitBehavior::isolated : SplitBehavior::contiguous,
        false);
  }
  if (name == "Punctuation") {
    const auto behavior = part.find("behavior");
    return std::make_unique<Cut>(characters(is_punctuation),
                                 behavior ? split_behavior(*behavior) : SplitBehavior::isolated,
                                 false);
  }
  if (name == "WhitespaceSplit") {
    return std::make_unique<Cut>(characters(is_space), SplitBehavior::removed, false);
  }
  if (name == "Whitespace") {
    return cut_at(Pattern(Regex(R"(\w+|[^\w\s]+)", part.place())), SplitBehavior::removed, true);
  }
  type.fail(
      "ByteLevel, Split, Digits, Punctuation, Metaspace, Whitespace, WhitespaceSplit, Sequence "
      "(others are not built in)");
}

}  // namespace keyhole::tools

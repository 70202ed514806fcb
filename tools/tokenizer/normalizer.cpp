#include "tools/tokenizer/normalizer.h"

#include <vector>

#include "tools/tokenizer/pattern.h"
#include "tools/tokenizer/unicode.h"

namespace keyhole::tools {
namespace {

/// A normalizer that calls a function.
template <class Function>
class By final : public Normalizer {
 public:
  explicit By(Function function) : function_(std::move(function)) {}
  std::string normalize(std::string text) const override { return function_(std::move(text)); }

 private:
  Function function_;
};

template <class Function>
std::unique_ptr<const Normalizer> by(Function function) {
  return std::make_unique<By<Function>>(std::move(function));
}

class NormalizerSequence final : public Normalizer {
 public:
  NormalizerSequence(const JsonPart& part, int depth) {
    for (const JsonPart& item : part.at("normalizers").items(kMaxSequenceParts)) {
      parts_.push_back(make_normalizer(item, depth + 1));
    }
  }
  std::string normalize(std::string text) const override {
    for (const auto& part : parts_) text = part->normalize(std::move(text));
    return text;
  }

 private:
  std::vector<std::unique_ptr<const Normalizer>> parts_;
};

std::string replaced(const Pattern& pattern, const std::string& content, std::string text) {
  const std::vector<TextRange> matches = pattern.matches(text);
  if (matches.empty()) return text;
  std::string out;
  out.reserve(text.size());
  size_t at = 0;
  for (const TextRange& match : matches) {
    out.append(text, at, match.begin - at).append(content);
    at = match.end;
  }
  return out.append(text, at);
}

std::string without_marks(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    if (!is_mark(next_character(text, at))) out.append(text, begin, at - begin);
  }
  return out;
}

std::string stripped(const std::string& text, bool left, bool right) {
  size_t begin = 0;
  size_t end = text.size();
  for (size_t at = 0; left && at < end && is_space(next_character(text, at));) begin = at;
  while (right && end > begin) {
    size_t last = end - 1;
    while ((static_cast<unsigned char>(text[last]) & 0xC0U) == 0x80U) --last;
    size_t at = last;
    if (!is_space(next_character(text, at))) break;
    end = last;
  }
  return text.substr(begin, end - begin);
}

}  // namespace

std::unique_ptr<const Normalizer> make_normalizer(const JsonPart& part, int depth) {
  if (depth > kMaxSequenceDepth) {
    part.fail("nested too deep", std::to_string(kMaxSequenceDepth) + " sequences in each other");
  }
  const JsonPart type = part.at("type");
  const std::string& name = type.text();
  const auto form = [](NormalForm wanted) {
    return by([wanted](const std::string& text) { return normalized(text, wanted); });
  };
  if (name == "NFC") return form(NormalForm::nfc);
  if (name == "NFD") return form(NormalForm::nfd);
  if (name == "NFKC") return form(NormalForm::nfkc);
  if (name == "NFKD") return form(NormalForm::nfkd);
  if (name == "Lowercase") return by([](const std::string& text) { return lower_case(text); });
  if (name == "StripAccents")
    return by([](const std::string& text) { return without_marks(text); });
  if (name == "Prepend") {
    return by([prefix = part.at("prepend").text()](std::string text) {
      return text.empty() ? text : prefix + text;
    });
  }
  if (name == "Strip") {
    return by([left = part.flag("strip_left", true), right = part.flag("strip_right", true)](
                  const std::string& text) { return stripped(text, left, right); });
  }
  if (name == "Replace") {
    return by([pattern = Pattern(part.at("pattern")), content = part.at("content").text()](
                  std::string text) { return replaced(pattern, content, std::move(text)); });
  }
  if (name == "Sequence") return std::make_unique<NormalizerSequence>(part, depth);
  type.fail(
      "NFC, NFD, NFKC, NFKD, Lowercase, StripAccents, Prepend, Strip, Replace, Sequence (others "
      "are not built in)");
}

}  // namespace keyhole::tools

#include "tools/tokenizer/decoder_chain.h"

#include "tools/tokenizer/byte_level.h"
#include "tools/tokenizer/normalizer.h"
#include "tools/tokenizer/pattern.h"
#include "tools/tokenizer/pre_tokenizer.h"

namespace keyhole::tools {
namespace {

void replace_all(std::string& text, const std::string& wanted, const std::string& content) {
  for (size_t at = text.find(wanted); at != std::string::npos;
       at = text.find(wanted, at + content.size())) {
    text.replace(at, wanted.size(), content);
  }
}

int hex_digit(char c) {
  return c >= '0' && c <= '9'   ? c - '0'
         : c >= 'A' && c <= 'F' ? c - 'A' + 10
         : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                : -1;
}

/// "<0x0A>" becomes its byte.
void fall_back(std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return;
  const int high = hex_digit(token[3]);
  const int low = hex_digit(token[4]);
  if (high >= 0 && low >= 0) token.assign(1, static_cast<char>(high * 16 + low));
}

void strip(std::string& token, const std::string& what, uint32_t left, uint32_t right) {
  while (left-- > 0 && token.starts_with(what)) token.erase(0, what.size());
  while (right-- > 0 && token.ends_with(what)) token.erase(token.size() - what.size());
}

}  // namespace

DecoderChain::DecoderChain(const JsonPart& part) { add(part, 0); }

void DecoderChain::add(const JsonPart& part, int depth) {
  if (depth > kMaxSequenceDepth) {
    part.fail("nested too deep", std::to_string(kMaxSequenceDepth) + " sequences in each other");
  }
  const JsonPart type = part.at("type");
  const std::string& name = type.text();
  if (name == "Sequence") {
    for (const JsonPart& item : part.at("decoders").items(kMaxSequenceParts)) add(item, depth + 1);
    return;
  }
  if (name == "Fuse") {
    fused_ = true;
    return;
  }
  if (name == "Strip") {
    const JsonPart content = part.at("content");
    if (content.text().empty()) content.fail("a text that is not empty");
    Step step{Step::Kind::strip,       content.text(),         "",
              part.number("start", 0), part.number("stop", 0), false};
    if (!fused_) {
      steps_.push_back(std::move(step));
      return;
    }
    if (step.right != 0) part.at("stop").fail("0 behind Fuse");
    if (!begin_.text.empty()) type.fail("one Strip behind Fuse");
    begin_ = std::move(step);
    return;
  }
  if (fused_) type.fail("Strip behind Fuse and ByteLevel (others need the whole text)");
  if (name == "ByteLevel") {
    steps_.push_back({Step::Kind::byte_level, "", "", 0, 0, false});
    fused_ = true;
  } else if (name == "ByteFallback") {
    steps_.push_back({Step::Kind::byte_fallback, "", "", 0, 0, false});
  } else if (name == "Metaspace") {
    steps_.push_back({Step::Kind::metaspace, part.at("replacement").text(), " ", 0, 0,
                      prepend_scheme(part) != PrependScheme::never});
    if (steps_.back().text.empty()) part.at("replacement").fail("one character");
  } else if (name == "Replace") {
    const Pattern pattern(part.at("pattern"));
    if (pattern.literal() == nullptr)
      part.at("pattern").fail("an expression", "{\"String\": text}");
    steps_.push_back(
        {Step::Kind::replace, *pattern.literal(), part.at("content").text(), 0, 0, false});
  } else {
    type.fail(
        "ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip, Sequence (others are not built "
        "in)");
  }
}

void DecoderChain::decode(const std::string& token, DecodeState& state, std::string& bytes) const {
  std::string text = token;
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Step::Kind::byte_level: text = characters_to_bytes(text); break;
      case Step::Kind::byte_fallback: fall_back(text); break;
      case Step::Kind::replace: replace_all(text, step.text, step.content); break;
      case Step::Kind::strip: strip(text, step.text, step.left, step.right); break;
      case Step::Kind::metaspace:
        replace_all(text, step.text, step.drops_first && !state.inside ? "" : step.content);
        break;
    }
  }
  state.inside = true;
  // The beginning of the whole text ends with the first byte that is not stripped.
  while (state.strips && !text.empty()) {
    state.strips = state.stripped < begin_.left && text.starts_with(begin_.text);
    if (!state.strips) break;
    text.erase(0, begin_.text.size());
    ++state.stripped;
  }
  bytes += text;
}

}  // namespace keyhole::tools

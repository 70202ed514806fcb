#include "tools/tokenizer/pattern.h"

#include <algorithm>

namespace keyhole::tools {

Pattern::Pattern(const JsonPart& part) : what_(std::string()) {
  if (const auto text = part.find("String")) {
    if (text->text().empty()) text->fail("a text that is not empty");
    what_ = text->text();
  } else if (const auto regex = part.find("Regex")) {
    what_ = Regex(regex->text(), regex->place());
  } else {
    part.fail("{\"String\": text} or {\"Regex\": expression}");
  }
}

std::vector<TextRange> Pattern::matches(std::string_view text) const {
  std::vector<TextRange> found;
  if (const std::string* wanted = literal()) {
    for (size_t at = text.find(*wanted); at != std::string_view::npos;
         at = text.find(*wanted, at + wanted->size())) {
      found.push_back({at, at + wanted->size()});
    }
  } else {
    std::get<Regex>(what_).each_match(text, [&found](size_t begin, size_t end) {
      found.push_back({begin, end});
    });
  }
  return found;
}

SplitBehavior split_behavior(const JsonPart& part) {
  const std::string& name = part.text();
  if (name == "Removed") return SplitBehavior::removed;
  if (name == "Isolated") return SplitBehavior::isolated;
  if (name == "MergedWithPrevious") return SplitBehavior::merged_with_previous;
  if (name == "MergedWithNext") return SplitBehavior::merged_with_next;
  if (name == "Contiguous") return SplitBehavior::contiguous;
  part.fail(
      "\"Removed\", \"Isolated\", \"MergedWithPrevious\", \"MergedWithNext\", \"Contiguous\"");
}

namespace {

struct Piece {
  TextRange range;
  bool matched = false;
};

/// Appends every matched piece to the one before it, unless that was matched as well.
std::vector<TextRange> merge_with_previous(const std::vector<Piece>& pieces) {
  std::vector<TextRange> out;
  bool previous = false;
  for (const Piece& piece : pieces) {
    if (piece.matched && !previous && !out.empty()) {
      out.back().end = piece.range.end;
    } else {
      out.push_back(piece.range);
    }
    previous = piece.matched;
  }
  return out;
}

std::vector<TextRange> merge_with_next(const std::vector<Piece>& pieces) {
  std::vector<TextRange> out;
  bool next = false;
  for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {
    if (piece->matched && !next && !out.empty()) {
      out.back().begin = piece->range.begin;
    } else {
      out.push_back(piece->range);
    }
    next = piece->matched;
  }
  std::reverse(out.begin(), out.end());
  return out;
}

std::vector<TextRange> merge_equal(const std::vector<Piece>& pieces) {
  std::vector<TextRange> out;
  bool previous = false;
  for (const Piece& piece : pieces) {
    if (!out.empty() && piece.matched == previous) {
      out.back().end = piece.range.end;
    } else {
      out.push_back(piece.range);
    }
    previous = piece.matched;
  }
  return out;
}

}  // namespace

std::vector<TextRange> split_at(size_t bytes, const std::vector<TextRange>& matches,
                                SplitBehavior behavior, bool invert) {
  std::vector<Piece> pieces;
  pieces.reserve(2 * matches.size() + 1);
  size_t at = 0;
  for (const TextRange& match : matches) {
    if (match.begin > at) pieces.push_back({{at, match.begin}, invert});
    pieces.push_back({match, !invert});
    at = match.end;
  }
  if (bytes > at) pieces.push_back({{at, bytes}, invert});

  std::vector<TextRange> out;
  switch (behavior) {
    case SplitBehavior::removed:
    case SplitBehavior::isolated:
      for (const Piece& piece : pieces) {
        if (behavior == SplitBehavior::isolated || !piece.matched) out.push_back(piece.range);
      }
      break;
    case SplitBehavior::merged_with_previous: out = merge_with_previous(pieces); break;
    case SplitBehavior::merged_with_next: out = merge_with_next(pieces); break;
    case SplitBehavior::contiguous: out = merge_equal(pieces); break;
  }
  std::erase_if(out, [](const TextRange& range) { return range.begin == range.end; });
  return out;
}

}  // namespace keyhole::tools

#include "tools/tasks/ruler/draws.h"

#include <unordered_map>

#include "tools/tasks/ruler/word_lists.h"

namespace keyhole::tools::ruler {

std::vector<size_t> distinct(Random& random, size_t count, size_t bound) {
  // The first part of a Fisher-Yates shuffle, of which only the places that have been swapped are held.
  std::unordered_map<size_t, size_t> swapped;
  const auto at = [&swapped](size_t place) {
    const auto found = swapped.find(place);
    return found == swapped.end() ? place : found->second;
  };
  std::vector<size_t> out;
  for (size_t i = 0; i < count; ++i) {
    const size_t place = i + random.below(bound - i);
    out.push_back(at(place));
    swapped[place] = at(i);
  }
  return out;
}

std::string decimal(Random& random, uint64_t first, uint64_t end) {
  return std::to_string(first + random.below(end - first));
}

std::vector<std::string> distinct_pairs(Random& random, size_t count) {
  std::vector<std::string> pairs;
  for (const size_t i : distinct(random, count, adjectives().size() * nouns().size())) {
    pairs.push_back(adjectives()[i / nouns().size()] + "-" + nouns()[i % nouns().size()]);
  }
  return pairs;
}

std::string uuid(Random& random) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  constexpr size_t kHalf = 16;  // digits of 64 bits
  std::string text;
  for (int half = 0; half < 2; ++half) {
    uint64_t bits = random.next();
    for (size_t i = 0; i < kHalf; ++i, bits >>= 4) text += kDigits[bits & 0xFU];
  }
  text[12] = '4';  // the version, and below the variant 10 in two bits
  text[16] = kDigits[8 | (kDigits.find(text[16]) & 3U)];
  for (const size_t dash : {20, 16, 12, 8}) text.insert(dash, "-");
  return text;
}

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  size_t at = 0;
  for (size_t next = text.find(from); next != std::string_view::npos; next = text.find(from, at)) {
    out += text.substr(at, next - at);
    out += to;
    at = next + from.size();
  }
  out += text.substr(at);
  return out;
}

std::string filled(std::string_view text,
                   std::initializer_list<std::pair<std::string_view, std::string_view>> fields) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const std::string_view rest = text.substr(at);
    size_t taken = 0;
    for (const auto& [name, value] : fields) {
      if (!rest.starts_with('{') || rest.substr(1, name.size()) != name) continue;
      if (!rest.substr(1 + name.size()).starts_with('}')) continue;
      out += value;
      taken = name.size() + 2;
      break;
    }
    if (taken == 0) out += rest.front();
    at += taken == 0 ? 1 : taken;
  }
  return out;
}

std::string joined(const std::vector<std::string>& items, std::string_view separator) {
  std::string out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out += separator;
    out += items[i];
  }
  return out;
}

}  // namespace keyhole::tools::ruler

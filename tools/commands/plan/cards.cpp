#include "tools/commands/plan/cards.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "tools/terminal/errors.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

struct KnownCard {
  const char* name;
  double gib;        ///< GiB of memory
  double bandwidth;  ///< GB/s, its maker's figure
  double bus;        ///< GB/s
  int major, minor;  ///< compute capability
  uint32_t multiprocessors;
};

// Copies from pinned memory: 55 of PCIe 5.0's 64 GB/s are measured (bench/RESULTS.md); the same share of the others'.
constexpr double kPcie5 = 55.0, kPcie4 = 26.0, kPcie4Half = 13.0, kPcie5Half = 26.0;

constexpr std::array kCards = {
    KnownCard{"RTX 3060", 12, 360, kPcie4, 8, 6, 28},
    KnownCard{"RTX 3080", 10, 760, kPcie4, 8, 6, 68},
    KnownCard{"RTX 3090", 24, 936, kPcie4, 8, 6, 82},
    KnownCard{"RTX 3090 Ti", 24, 1008, kPcie4, 8, 6, 84},
    KnownCard{"RTX 4060", 8, 272, kPcie4Half, 8, 9, 24},
    KnownCard{"RTX 4060 Ti", 8, 288, kPcie4Half, 8, 9, 34},
    KnownCard{"RTX 4060 Ti 16GB", 16, 288, kPcie4Half, 8, 9, 34},
    KnownCard{"RTX 4070", 12, 504, kPcie4, 8, 9, 46},
    KnownCard{"RTX 4070 Super", 12, 504, kPcie4, 8, 9, 56},
    KnownCard{"RTX 4070 Ti", 12, 504, kPcie4, 8, 9, 60},
    KnownCard{"RTX 4070 Ti Super", 16, 672, kPcie4, 8, 9, 66},
    KnownCard{"RTX 4080", 16, 717, kPcie4, 8, 9, 76},
    KnownCard{"RTX 4080 Super", 16, 736, kPcie4, 8, 9, 80},
    KnownCard{"RTX 4090", 24, 1008, kPcie4, 8, 9, 128},
    KnownCard{"RTX 5060 Ti 16GB", 16, 448, kPcie5Half, 12, 0, 36},
    KnownCard{"RTX 5070", 12, 672, kPcie5, 12, 0, 48},
    KnownCard{"RTX 5070 Ti", 16, 896, kPcie5, 12, 0, 70},
    KnownCard{"RTX 5080", 16, 960, kPcie5, 12, 0, 84},
    KnownCard{"RTX 5090", 32, 1792, kPcie5, 12, 0, 170},
    KnownCard{"RTX A5000", 24, 768, kPcie4, 8, 6, 64},
    KnownCard{"RTX A6000", 48, 768, kPcie4, 8, 6, 84},
    KnownCard{"RTX 6000 Ada", 48, 960, kPcie4, 8, 9, 142},
    KnownCard{"RTX PRO 6000", 96, 1792, kPcie5, 12, 0, 188},
    KnownCard{"A10", 24, 600, kPcie4, 8, 6, 72},
    KnownCard{"A30", 24, 933, kPcie4, 8, 0, 56},
    KnownCard{"A40", 48, 696, kPcie4, 8, 6, 84},
    KnownCard{"A100 40GB", 40, 1555, kPcie4, 8, 0, 108},
    KnownCard{"A100 80GB", 80, 2039, kPcie4, 8, 0, 108},
    KnownCard{"L4", 24, 300, kPcie4, 8, 9, 58},
    KnownCard{"L40S", 48, 864, kPcie4, 8, 9, 142},
    KnownCard{"H20", 96, 4000, kPcie5, 9, 0, 78},
    KnownCard{"H100", 80, 3350, kPcie5, 9, 0, 132},
    KnownCard{"H100 PCIe", 80, 2039, kPcie5, 9, 0, 114},
    KnownCard{"H200", 141, 4800, kPcie5, 9, 0, 132},
};

/// Lower case, letters and digits alone.
std::string plain(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
      out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
  }
  return out;
}

/// plain() without the words that stand on every box.
std::string key_of(std::string_view text) {
  std::string out = plain(text);
  for (const std::string_view word : {"nvidia", "geforce", "rtx"}) {
    if (out.starts_with(word)) out.erase(0, word.size());
  }
  return out;
}

Card card_of(const KnownCard& known) {
  constexpr double kGib = 1024.0 * 1024 * 1024, kGb = 1e9;
  return {known.name,
          static_cast<uint64_t>(known.gib * kGib),
          known.bandwidth * kGb,
          known.bus * kGb,
          known.major,
          known.minor,
          known.multiprocessors};
}

std::string names_of(const std::vector<const KnownCard*>& cards) {
  std::string out;
  for (const KnownCard* card : cards) out += (out.empty() ? "" : ", ") + std::string(card->name);
  return out;
}

/// Reads "8.9" or the like. text: the whole card.
void read_capability(std::string_view text, std::string_view capability, Card& card) {
  constexpr int kLeast = 8, kMost = 99;
  const char* const end = capability.data() + capability.size();
  int major = 0, minor = 0;
  const auto [point, failed] = std::from_chars(capability.data(), end, major);
  if (failed == std::errc() && point != end && *point == '.') {
    const auto [rest, broken] = std::from_chars(point + 1, end, minor);
    if (broken == std::errc() && rest == end && major >= kLeast && major <= kMost && minor >= 0 &&
        minor <= 9) {
      card.compute_major = major;
      card.compute_minor = minor;
      return;
    }
  }
  throw UsageError("--card " + std::string(text) + ": '" + std::string(capability) +
                   "' is no compute capability from 8.0 on, such as 8.9");
}

Card read_card(std::string_view text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  constexpr size_t kParts = 3;
  if (parts.size() != kParts && parts.size() != kParts + 1) {
    throw UsageError("--card " + std::string(text) + " has " + std::to_string(parts.size()) +
                     " parts; needed: MEMORY,BANDWIDTH,BUS or MEMORY,BANDWIDTH,BUS,CAPABILITY, "
                     "e.g. 24GiB,1008GB,25GB,8.9");
  }
  Card card;
  card.name = "a card of your own";
  card.memory = parse_bytes(parts[0]);
  card.bandwidth = static_cast<double>(parse_bytes(parts[1]));
  card.bus = static_cast<double>(parse_bytes(parts[2]));
  if (parts.size() > kParts) read_capability(text, parts[kParts], card);
  if (card.memory == 0 || card.bandwidth == 0.0 || card.bus == 0.0) {
    throw UsageError("--card " + std::string(text) + ": a part is 0; needed: more");
  }
  return card;
}

}  // namespace

uint64_t Card::shared_bytes() const {
  // NVIDIA's programming guide, "Technical Specifications per Compute Capability".
  constexpr uint64_t kKib = 1024, kLess = 99 * kKib, kAmpere = 163 * kKib, kMost = 227 * kKib;
  if (compute_major >= 12) return kLess;
  if (compute_major >= 9) return kMost;
  return compute_minor == 6 || compute_minor == 9 ? kLess : kAmpere;
}

std::string Card::capability() const {
  return std::to_string(compute_major) + "." + std::to_string(compute_minor);
}

Card find_card(std::string_view text) {
  if (text.find(',') != std::string_view::npos) return read_card(text);
  const std::string key = key_of(text);
  std::vector<const KnownCard*> all, like;
  for (const KnownCard& card : kCards) {
    if (key_of(card.name) == key) return card_of(card);
    all.push_back(&card);
    if (!key.empty() && key_of(card.name).find(key) != std::string::npos) like.push_back(&card);
  }
  throw UsageError("--card " + std::string(text) + " is not known; " +
                   (like.empty() ? "known: " + names_of(all) : "like it: " + names_of(like)) +
                   ". Another one: MEMORY,BANDWIDTH,BUS,CAPABILITY, e.g. 24GiB,1008GB,25GB,8.9");
}

}  // namespace keyhole::tools

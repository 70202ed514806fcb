#include "tools/commands/common/ways.h"

#include <algorithm>

namespace keyhole::tools {
namespace {

constexpr NamedWay kWays[] = {
    {"exact", "every token, the truth to compare with", KEYHOLE_MODE_EXACT, std::nullopt},
    {kFullWay, "the same as exact; in eval with all tokens where sink and window lie",
     KEYHOLE_MODE_EXACT, std::nullopt},
    {"none", "sink and window only", KEYHOLE_MODE_RESIDENT, std::nullopt},
    {"q8_0",
     "every token, K and V turned by a Hadamard matrix and in 8 bits with a scale for 32 numbers, "
     "as caches of llama.cpp have "
     "them",
     KEYHOLE_MODE_EXACT, KvFormat::q8_0},
    {"q4_0", "the same in 4 bits", KEYHOLE_MODE_EXACT, KvFormat::q4_0},
    {"q8_0_plain", "q8_0 as it was before April 2026, not turned", KEYHOLE_MODE_EXACT,
     KvFormat::q8_0_plain},
    {"q4_0_plain", "q4_0 as it was then", KEYHOLE_MODE_EXACT, KvFormat::q4_0_plain},
    {"kivi2",
     "KIVI: older tokens in 2 bits, keys with a step for 32 tokens of a channel, values for 32 "
     "channels of a token; the newest in 16 bits",
     KEYHOLE_MODE_EXACT, KvFormat::kivi2},
    {"kivi4", "the same in 4 bits", KEYHOLE_MODE_EXACT, KvFormat::kivi4},
    {"kvarn2",
     "KVarN: tiles of 128 tokens in 2 bits, turned and scaled to equal variance of channels and "
     "tokens; the first tile and the unfinished one in 16 bits",
     KEYHOLE_MODE_EXACT, KvFormat::kvarn2},
    {"kvarn_k4v2", "the same with keys in 4 bits", KEYHOLE_MODE_EXACT, KvFormat::kvarn_k4v2},
    {"oscar2",
     "OSCAR: 2 bits behind rotations that --calibration fits to queries and outputs; the first 64 "
     "and the newest 512 tokens in 16 bits",
     KEYHOLE_MODE_EXACT, KvFormat::oscar2},
};

}  // namespace

std::span<const NamedWay> named_ways() { return kWays; }

const NamedWay* find_way(std::string_view name) {
  const auto* way = std::find_if(std::begin(kWays), std::end(kWays),
                                 [name](const NamedWay& w) { return w.name == name; });
  return way == std::end(kWays) ? nullptr : way;
}

std::string ways_help() {
  std::string text;
  for (const NamedWay& way : kWays) {
    text +=
        (text.empty() ? "" : ", ") + std::string(way.name) + " (" + std::string(way.meaning) + ")";
  }
  return text;
}

}  // namespace keyhole::tools

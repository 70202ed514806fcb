// The codec parameter, which is the same in every type that has one.
#pragma once

#include <cstdint>
#include <string_view>

namespace keyhole::index {

/// The form of keys that a search reads: the keys themselves, or int8 codes (key_codes.h), of which the best are
/// scored again in full precision (rerank.h).
enum Codec : int64_t { kNoCodec, kInt8 };
inline constexpr std::string_view kCodecOptions[] = {"none", "int8"};

#define KEYHOLE_CODEC_TEXT "the keys, or an int8 copy whose best are scored again in full precision"

}  // namespace keyhole::index

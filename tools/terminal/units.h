// Quantities as people write and read them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace keyhole::tools {

/// Bytes with three significant digits and powers of 1024: "512 B", "1.5 KiB", "16 GiB".
[[nodiscard]] std::string format_bytes(uint64_t bytes);

/// The size of a file, as format_bytes() writes it; "no file" for a device or a pipe, which have none.
[[nodiscard]] std::string file_size_text(const std::filesystem::path& path);

/// A duration as text: "412 us", "1.25 ms", "3.1 s", "2 min 05 s", "1 h 02 min".
[[nodiscard]] std::string format_duration(double seconds);

/// A count with separators: "131,072".
[[nodiscard]] std::string format_count(uint64_t count);

/// A number with `digits` significant digits, without an exponent where that stays short; "-" for NaN, "inf" and
/// "-inf".
[[nodiscard]] std::string format_number(double value, int digits = 3);

/// Reads "17179869184", "16GiB", "24G", "1.5 TiB", "512kb" and the like. K, M, G, T and KiB, MiB, GiB, TiB are powers
/// of 1024, because memory is meant; kB, MB, GB, TB are powers of 1000. Throws UsageError.
[[nodiscard]] uint64_t parse_bytes(std::string_view text);

/// Reads "131072", "128k", "1M" (powers of 1024, as context lengths are written). Throws UsageError.
[[nodiscard]] uint64_t parse_tokens(std::string_view text);

}  // namespace keyhole::tools

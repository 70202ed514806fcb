// Safetensors files as bytes, put together by hand rather than by the writer under test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace keyhole {

/// The bytes of a file: header length, header, and `data_bytes` bytes 0, 1, 2, ...
inline std::vector<std::byte> safetensors_bytes(const std::string& header, size_t data_bytes,
                                                uint64_t header_length) {
  std::vector<std::byte> out;
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<std::byte>(header_length >> (8 * i)));
  for (const char c : header) out.push_back(static_cast<std::byte>(c));
  for (size_t i = 0; i < data_bytes; ++i) out.push_back(static_cast<std::byte>(i));
  return out;
}

inline std::vector<std::byte> safetensors_bytes(const std::string& header, size_t data_bytes) {
  return safetensors_bytes(header, data_bytes, header.size());
}

}  // namespace keyhole

// Writes a file of log-probabilities as llama.cpp's llama-perplexity does, from double precision, independently of the
// reader.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace keyhole::tools {

/// The numbers of such a file. logits: `[chunks * rows][vocabulary]`, each row up to a constant.
struct KldBaseNumbers {
  uint32_t context = 0, vocabulary = 0, chunks = 0;
  std::vector<uint32_t> tokens;
  std::vector<std::vector<double>> logits;
};

inline void put_little_endian(std::string& bytes, uint64_t value, int count) {
  for (int i = 0; i < count; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xFFU);
}
inline void put_float(std::string& bytes, double value) {
  const auto narrow = static_cast<float>(value);
  uint32_t bits = 0;
  static_assert(sizeof bits == sizeof narrow);
  std::copy_n(reinterpret_cast<const char*>(&narrow), 4, reinterpret_cast<char*>(&bits));
  put_little_endian(bytes, bits, 4);
}

inline double log_sum_of(const std::vector<double>& logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const double x : logits) sum += std::exp(x - most);
  return most + std::log(sum);
}

inline std::string kld_base_bytes(const KldBaseNumbers& numbers) {
  std::string bytes = "_logits_";
  for (const uint32_t n : {numbers.context, numbers.vocabulary, numbers.chunks}) {
    put_little_endian(bytes, n, 4);
  }
  for (const uint32_t token : numbers.tokens) put_little_endian(bytes, token, 4);
  for (const std::vector<double>& logits : numbers.logits) {
    const auto [low, high] = std::minmax_element(logits.begin(), logits.end());
    const double least = std::max(*low, *high - 16.0), step = (*high - least) / 65535.0;
    put_float(bytes, step);
    put_float(bytes, least - log_sum_of(logits));
    for (const double x : logits) {
      const double steps = step > 0 ? std::round((std::max(x, least) - least) / step) : 0.0;
      put_little_endian(bytes, static_cast<uint64_t>(steps), 2);
    }
    if (logits.size() % 2 != 0) put_little_endian(bytes, 0xABCD, 2);
  }
  return bytes;
}

}  // namespace keyhole::tools

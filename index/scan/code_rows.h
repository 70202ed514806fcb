// How some hundred rows of one KV head are encoded about means of their own, and read again. A run is up to 256 rows
// in tiles of 16, laid out as cpu/code_layout.h says: a block of consecutive rows (index/scan/kv_codes.h), or a list
// of rows that are near each other (index/scan/code_lists.h).
#pragma once

#include <algorithm>
#include <span>

#include "cpu/code_doubt.h"
#include "cpu/code_layout.h"
#include "cpu/half.h"
#include "cpu/kernels.h"
#include "index/scan/balance.h"

namespace keyhole::index {

/// Where the parts of a run lie. Means and noise are one for all rows; the other parts are arrays over tiles.
template <class Byte>
struct CodeRunOf {
  Byte* keys = nullptr;        ///< `[tiles, 32, key_words]` uint32
  Byte* values = nullptr;      ///< `[tiles, 32, value_words]` uint32
  Byte* factors = nullptr;     ///< `[tiles, 16, 2]` fp16: f, g
  Byte* key_mean = nullptr;    ///< `[dim]` fp16, balanced and rotated
  Byte* value_mean = nullptr;  ///< `[dim]` fp16, divided by the head's value scale and rotated
  float noise = 0.0F;          ///< mean over the keys of |r/f - level|^2 / dim, or kUnknownNoise
  uint32_t rows = 0;           ///< 1..kCodeBlock; the rows of the last tile beyond them are 0

  [[nodiscard]] uint32_t tiles() const { return (rows + kCodeTile - 1) / kCodeTile; }
};
using CodeRun = CodeRunOf<const std::byte>;

/// Applies the rotation to `row` `[dim]` in place; rotate_codes_back() is its inverse. fp32, in a fixed order: the
/// same bits on every machine.
void rotate_codes(float* row, uint32_t dim);
void rotate_codes_back(float* row, uint32_t dim);

/// Brings queries q `[group, dim]` into the space of the codes, out `[group, dim]`: divided by the balance and
/// rotated. norms: null, or out `[group]`, |q|^2 there. A query that is longer there than kLongestQuery is written
/// with that length or less, divided by a power of 2: it has its direction, so that scores have their order, but no
/// logits. Returns whether there was one.
bool rotate_queries(const Balance& balance, const float* q, uint32_t group, float* out,
                    float* norms = nullptr);

/// Up to this length the square of a query, its products with keys and their squares are numbers in fp32. Logits of
/// longer ones are read exactly, of all rows.
inline constexpr double kLongestQuery = 1e15;

/// The figures of a run beside its codes.
struct CodeRunFigures {
  float noise = 0.0F;   ///< as CodeRunOf::noise
  float spread = 0.0F;  ///< mean over the keys of |k - mean|^2 / dim, balanced
};

/// Encodes the rows `ids` of kv into `out`, whose parts are zeroed. Without values (count 0, value_bits 0) their mean
/// is 0. All arithmetic is fp32 in a fixed order, each operation rounded by itself, so that every implementation
/// gives the same bits.
CodeRunFigures encode_rows(const CodeShape& shape, const Balance& balance,
                           const cpu::Kernels& kernels, const KvView& kv,
                           std::span<const uint32_t> ids, const CodeRunOf<std::byte>& out);

/// Whether every number of a run beside its codes is one that encode_rows() can give: factors and means finite,
/// factors of keys and the noise at least 0. A file may hold other numbers, which would make attention NaN.
[[nodiscard]] bool is_sound_run(const CodeShape& shape, const CodeRun& run);

/// The largest key factor of a run.
[[nodiscard]] float widest_factor(const CodeRun& run);

/// Reads one run component by component.
class CodeRunReader {
 public:
  CodeRunReader(const CodeShape& shape, const CodeRun& run) : shape_(shape), run_(run) {}

  [[nodiscard]] float key_level(uint32_t row, uint32_t j) const {
    const std::byte* words =
        run_.keys + size_t{row / kCodeTile} * kCodeLanes * shape_.key_words() * 4;
    return level(code(words, shape_.key_place(row % kCodeTile, j), shape_.key_bits),
                 shape_.key_bits);
  }
  [[nodiscard]] float value_level(uint32_t row, uint32_t j) const {
    if (shape_.value_bits == 0) return 0.0F;
    const std::byte* words =
        run_.values + size_t{row / kCodeTile} * kCodeLanes * shape_.value_words() * 4;
    return level(code(words, shape_.value_place(row % kCodeTile, j), shape_.value_bits),
                 shape_.value_bits);
  }
  [[nodiscard]] float key_factor(uint32_t row) const { return half(run_.factors, 2 * row); }
  [[nodiscard]] float value_factor(uint32_t row) const { return half(run_.factors, 2 * row + 1); }
  [[nodiscard]] float key_mean(uint32_t j) const { return half(run_.key_mean, j); }
  [[nodiscard]] float value_mean(uint32_t j) const { return half(run_.value_mean, j); }
  [[nodiscard]] float noise() const { return run_.noise; }

  /// Writes g level + value mean, `[dim]`: the value before it is rotated back and scaled.
  void rotated_value(uint32_t row, float* out) const;

 private:
  static uint32_t code(const std::byte* words, CodePlace place, uint32_t bits);
  static float level(uint32_t code, uint32_t bits) {
    return static_cast<float>(2 * static_cast<int>(code) - ((1 << bits) - 1));
  }
  static float half(const std::byte* at, uint32_t i);

  const CodeShape& shape_;
  CodeRun run_;
};

}  // namespace keyhole::index

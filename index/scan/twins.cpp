#include "index/scan/twins.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "cpu/row_access.h"
#include "index/serial.h"

namespace keyhole::index {
namespace {

constexpr uint32_t kWordRows = 64;

struct HashedRow {
  uint64_t hash;
  uint32_t row;
};

// Keys as the numbers that they stand for: 0 and -0 are equal (RoPE gives keys of zeros different signs), and int8 rows
// of different scales may be.
class KeyOrder {
 public:
  KeyOrder(const cpu::Kernels& kernels, const RowsView& keys) : kernels_(kernels), keys_(keys) {}

  [[nodiscard]] HashedRow hashed(uint32_t row) const {
    float key[kMaxHeadDim];
    read(row, key);
    return {Checksum::of(key, bytes()), row};
  }
  [[nodiscard]] bool same(const HashedRow& a, const HashedRow& b) const {
    return a.hash == b.hash && compare(a.row, b.row) == 0;
  }
  // Sorts rows so that those of equal keys follow each other, rising.
  void sort(std::vector<HashedRow>& rows) const {
    std::sort(rows.begin(), rows.end(), [](const HashedRow& a, const HashedRow& b) {
      return a.hash != b.hash ? a.hash < b.hash : a.row < b.row;
    });
    for (auto first = rows.begin(); first != rows.end();) {
      const auto end = std::find_if(first, rows.end(),
                                    [&](const HashedRow& r) { return r.hash != first->hash; });
      // Different keys of one hash: whoever forges a file may have chosen many, so they are not compared all with all.
      if (!std::all_of(first, end, [&](const HashedRow& r) { return same(*first, r); })) {
        std::sort(first, end, [&](const HashedRow& a, const HashedRow& b) {
          const int order = compare(a.row, b.row);
          return order != 0 ? order < 0 : a.row < b.row;
        });
      }
      first = end;
    }
  }

 private:
  [[nodiscard]] size_t bytes() const { return keys_.dim * sizeof(float); }
  void read(uint32_t row, float* key) const {
    cpu::read_row(kernels_, keys_, row, key);
    for (uint32_t j = 0; j < keys_.dim; ++j) key[j] += 0.0F;  // -0 becomes 0
  }
  [[nodiscard]] int compare(uint32_t a, uint32_t b) const {
    const size_t row_bytes = keys_.row_bytes();
    const bool is_scaled = keys_.dtype == DType::i8;
    if (!is_scaled && std::memcmp(keys_.row(a), keys_.row(b), row_bytes) == 0) return 0;
    float x[kMaxHeadDim];
    float y[kMaxHeadDim];
    read(a, x);
    read(b, y);
    return std::memcmp(x, y, bytes());
  }

  const cpu::Kernels& kernels_;
  const RowsView& keys_;
};

// Leaves the rows whose hashes name the same of eight bits per row as another's: all rows of equal keys, and an eighth
// of the others, so that little is sorted where no keys are equal.
void keep_suspects(std::vector<HashedRow>& rows) {
  const uint64_t bits = std::bit_ceil(8 * uint64_t{rows.size()} + kWordRows);
  std::vector<uint64_t> once(bits / kWordRows), twice(bits / kWordRows);
  for (const HashedRow& r : rows) {
    const uint64_t at = r.hash & (bits - 1);
    const uint64_t mask = uint64_t{1} << (at % kWordRows);
    twice[at / kWordRows] |= once[at / kWordRows] & mask;
    once[at / kWordRows] |= mask;
  }
  std::erase_if(rows, [&](const HashedRow& r) {
    const uint64_t at = r.hash & (bits - 1);
    return (twice[at / kWordRows] >> (at % kWordRows) & 1) == 0;
  });
}

}  // namespace

Twins Twins::grown(const cpu::Kernels& kernels, const RowsView& keys) const {
  const KeyOrder order(kernels, keys);
  std::vector<uint32_t> representative = representatives(keys.tokens);
  std::vector<HashedRow> rows;
  rows.reserve(keys.tokens - size());
  for (uint32_t row = 0; row < keys.tokens; ++row) {
    if (representative[row] == row) rows.push_back(order.hashed(row));
  }
  keep_suspects(rows);
  order.sort(rows);
  size_t lowest = 0;  // of the rows with the key of row i
  bool is_new = false;
  for (size_t i = 1; i < rows.size(); ++i) {
    if (!order.same(rows[lowest], rows[i])) {
      lowest = i;
      continue;
    }
    representative[rows[i].row] = rows[lowest].row;
    is_new = true;
  }
  return is_new ? Twins(representative) : *this;
}

Twins::Twins(std::span<const uint32_t> representative) {
  const auto n = static_cast<uint32_t>(representative.size());
  size_t twins = 0;
  uint32_t highest = 0;
  for (uint32_t row = 0; row < n; ++row) {
    if (representative[row] == row) continue;
    ++twins;
    highest = std::max(highest, representative[row]);
  }
  if (twins == 0) return;
  words_.resize(highest / kWordRows + 1);
  for (uint32_t row = 0; row < n; ++row) {
    const uint32_t lowest = representative[row];
    if (lowest != row) words_[lowest / kWordRows].bits |= uint64_t{1} << (lowest % kWordRows);
  }
  uint32_t groups = 0;
  for (Word& word : words_) {
    word.before = groups;
    groups += static_cast<uint32_t>(std::popcount(word.bits));
  }
  starts_.resize(groups + size_t{1});
  for (uint32_t row = 0; row < n; ++row) {
    if (representative[row] != row) ++starts_[place(representative[row]) + size_t{1}];
  }
  std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
  std::vector<uint32_t> ends(starts_.begin(), starts_.end() - 1);
  rows_.resize(twins);
  for (uint32_t row = 0; row < n; ++row) {
    if (representative[row] != row) rows_[ends[place(representative[row])]++] = row;
  }
}

void Twins::truncate(size_t count) {
  if (std::all_of(rows_.begin(), rows_.end(), [&](uint32_t row) { return row < count; })) return;
  *this = Twins(representatives(count));
}

uint32_t Twins::place(uint32_t row) const {
  const Word& word = words_[row / kWordRows];
  const uint64_t below = word.bits & ((uint64_t{1} << (row % kWordRows)) - 1);
  return word.before + static_cast<uint32_t>(std::popcount(below));
}

std::span<const uint32_t> Twins::of(uint32_t row) const {
  if (row / kWordRows >= words_.size()) return {};
  if ((words_[row / kWordRows].bits >> (row % kWordRows) & 1) == 0) return {};
  const uint32_t at = place(row);
  return std::span(rows_).subspan(starts_[at], starts_[at + 1] - starts_[at]);
}

std::vector<uint32_t> Twins::representatives(size_t count) const {
  std::vector<uint32_t> out(count);
  std::iota(out.begin(), out.end(), 0U);
  for (uint32_t w = 0; w < words_.size(); ++w) {
    for (uint64_t bits = words_[w].bits; bits != 0; bits &= bits - 1) {
      const uint32_t row = w * kWordRows + static_cast<uint32_t>(std::countr_zero(bits));
      for (const uint32_t twin : of(row)) {
        if (twin < count) out[twin] = row;
      }
    }
  }
  return out;
}

std::vector<uint32_t> Twins::distinct(size_t count) const {
  if (empty()) return {};
  const std::vector<uint32_t> representative = representatives(count);
  std::vector<uint32_t> rows;
  for (uint32_t row = 0; row < count; ++row) {
    if (representative[row] == row) rows.push_back(row);
  }
  return rows;
}

size_t Twins::bytes() const {
  return words_.size() * sizeof(Word) + (starts_.size() + rows_.size()) * sizeof(uint32_t);
}

}  // namespace keyhole::index

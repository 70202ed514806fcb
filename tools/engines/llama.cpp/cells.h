// What lies in the cells of llama.cpp's cache. A cell is room for one token in every layer; which sequence it belongs
// to and at which position only llama.cpp knows. Here each write gives a cell a number of its own, so that "the same
// cell with the same number" is the same token.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace keyhole::llama_cpp {

/// A token: a cell of a stream, and the number of the write that filled it.
struct Token {
  uint32_t cell = 0;
  uint64_t stamp = 0;
};

/// The numbers of the writes, for `streams` times `cells` cells. Numbers rise with time, are never used twice, and 0
/// means that nothing was written. llama.cpp has one stream, or one for each sequence.
class Cells {
 public:
  Cells(uint32_t streams, uint32_t cells)
      : streams_(streams), cells_(cells), stamps_(size_t{streams} * cells, 0) {}

  [[nodiscard]] uint32_t streams() const { return streams_; }
  [[nodiscard]] uint32_t cells() const { return cells_; }
  [[nodiscard]] uint64_t stamp(uint32_t stream, uint32_t cell) const {
    return stamps_[size_t{stream} * cells_ + cell];
  }
  [[nodiscard]] bool holds(uint32_t stream, const Token& token) const {
    return stamp(stream, token.cell) == token.stamp;
  }

  /// The number of the latest write.
  [[nodiscard]] uint64_t last() const { return last_; }
  /// How often a cell has changed: what is known of the cells holds as long as this has not risen.
  [[nodiscard]] uint64_t changes() const { return changes_; }

  void write(uint32_t stream, uint32_t cell) {
    stamps_[size_t{stream} * cells_ + cell] = ++last_;
    ++changes_;
  }
  /// As write() for each cell whose number in `by`, `[streams, cells]`, is not 0.
  void write_where(const int32_t* by) {
    for (size_t i = 0; i < stamps_.size(); ++i) {
      if (by[i] != 0) stamps_[i] = ++last_;
    }
    ++changes_;
  }
  /// The tokens of `from` lie in `to` as well: they keep their numbers.
  void copy_stream(uint32_t from, uint32_t to) {
    const auto at = [&](uint32_t stream) {
      return stamps_.begin() + static_cast<ptrdiff_t>(size_t{stream} * cells_);
    };
    std::copy(at(from), at(from) + cells_, at(to));
    ++changes_;
  }
  /// What lies in the cells has changed, in each stream by itself: every token whose number is above `after` gets a new
  /// one, in the same order.
  void renew(uint64_t after = 0);
  void clear() {
    std::fill(stamps_.begin(), stamps_.end(), 0);
    ++changes_;
  }

 private:
  uint32_t streams_;
  uint32_t cells_;
  uint64_t last_ = 0;
  uint64_t changes_ = 0;
  std::vector<uint64_t> stamps_;
};

inline void Cells::renew(uint64_t after) {
  std::vector<std::pair<uint64_t, size_t>> written;
  for (size_t i = 0; i < stamps_.size(); ++i) {
    if (stamps_[i] > after) written.emplace_back(stamps_[i], i);
  }
  std::sort(written.begin(), written.end());
  for (const auto& [stamp, i] : written) stamps_[i] = ++last_;
  ++changes_;
}

}  // namespace keyhole::llama_cpp

#include "runtime/save/checksum_io.h"

#include <algorithm>
#include <ostream>

namespace keyhole::runtime {
namespace {

/// Arrays seen as one row of bytes.
template <class Byte>
class Row {
 public:
  explicit Row(std::span<const std::span<Byte>> all) : all_(all) {
    starts_.reserve(all.size());
    for (const auto& array : all) {
      starts_.push_back(bytes_);
      bytes_ += array.size();
    }
  }
  [[nodiscard]] uint64_t bytes() const { return bytes_; }
  /// f(number, at, part) for the parts of arrays that lie in bytes [begin, begin + n); `at`: where the part begins.
  template <class F>
  void for_parts(uint64_t begin, uint64_t n, F&& f) const {
    const auto next = std::upper_bound(starts_.begin(), starts_.end(), begin);
    auto number = static_cast<size_t>(next - starts_.begin());
    if (number != 0) --number;
    for (; n != 0; ++number) {
      const uint64_t inside = begin - starts_[number];
      const size_t part = std::min<uint64_t>(n, all_[number].size() - inside);
      if (part != 0) f(number, begin, all_[number].subspan(inside, part));
      begin += part;
      n -= part;
    }
  }

 private:
  std::span<const std::span<Byte>> all_;
  std::vector<uint64_t> starts_;
  uint64_t bytes_ = 0;
};

/// How a row of bytes is cut into what fills the chunk under way, whole chunks, and the rest.
struct Cut {
  Cut(uint64_t bytes, const ChunkSums& sums)
      : head(std::min<uint64_t>(bytes, sums.left() % ChunkSums::kChunk)),
        chunks((bytes - head) / ChunkSums::kChunk),
        tail(head + chunks * ChunkSums::kChunk) {}
  uint64_t head;    ///< bytes of it
  uint64_t chunks;  ///< number of them
  uint64_t tail;    ///< where the rest begins
  [[nodiscard]] uint64_t chunk(uint64_t i) const { return head + i * ChunkSums::kChunk; }
};

[[nodiscard]] size_t padding(uint64_t at) {
  return (kArrayAlignment - at % kArrayAlignment) % kArrayAlignment;
}

/// Runs task(i) for all i below n, by a pool where there is one.
template <class Task>
void for_all(cpu::Pool* pool, uint64_t n, Task&& task) {
  // A pool counts tasks in 32 bits: 2^32 chunks are more than any file has.
  if (pool != nullptr) {
    return pool->run(static_cast<uint32_t>(n), [&](uint32_t i, uint32_t) { task(i); });
  }
  for (uint64_t i = 0; i < n; ++i) task(i);
}

}  // namespace

// ---- Writer -------------------------------------------------------------------------------------

void ChecksumWriter::bytes(const std::byte* data, size_t n) {
  sums_.update(data, n);
  out_->write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(n));
  at_ += n;
}

void ChecksumWriter::arrays(std::span<const std::span<const std::byte>> all) {
  const std::byte zeros[kArrayAlignment]{};
  bytes(zeros, padding(at_));
  const Row row(all);
  const auto in_order = [&](uint64_t begin, uint64_t n) {
    row.for_parts(begin, n, [&](size_t, uint64_t, std::span<const std::byte> part) {
      bytes(part.data(), part.size());
    });
  };
  const Cut cut(row.bytes(), sums_);
  in_order(0, cut.head);
  std::vector<uint64_t> sums(cut.chunks);
  // One thread writes, as the system lets only one at a time into a file; the others sum meanwhile.
  for_all(pool_, cut.chunks == 0 ? 0 : 1 + cut.chunks, [&](uint64_t i) {
    index::Checksum sum;
    row.for_parts(i == 0 ? cut.head : cut.chunk(i - 1),
                  i == 0 ? cut.tail - cut.head : ChunkSums::kChunk,
                  [&](size_t, uint64_t, std::span<const std::byte> part) {
                    if (i != 0) return sum.update(part.data(), part.size());
                    out_->write(reinterpret_cast<const char*>(part.data()),
                                static_cast<std::streamsize>(part.size()));
                  });
    if (i != 0) sums[i - 1] = sum.value();
  });
  for (const uint64_t sum : sums) sums_.add_chunk(sum);
  at_ += cut.tail - cut.head;
  in_order(cut.tail, row.bytes() - cut.tail);
}

void ChecksumWriter::finish() {
  const uint64_t sum = sums_.finish();
  out_->write(reinterpret_cast<const char*>(&sum), sizeof sum);
}

// ---- Reader -------------------------------------------------------------------------------------

ChecksumReader::ChecksumReader(const ByteSource& source, cpu::Pool* pool)
    : source_(&source), pool_(pool) {}

void ChecksumReader::need(uint64_t n, const char* what) const {
  if (n > left()) {
    throw Error(Status::corrupt, std::string("the file ends inside ") + what + " (" +
                                     std::to_string(left()) + " bytes are left)");
  }
}

void ChecksumReader::bytes(std::byte* data, size_t n, const char* what) {
  need(n, what);
  if (n >= kAhead) {
    source_->read(at_, data, n);
  } else if (n != 0) {
    if (at_ < ahead_at_ || at_ + n > ahead_at_ + ahead_.size()) {
      ahead_.resize(std::min<uint64_t>(kAhead, left()));
      ahead_at_ = at_;
      source_->read(ahead_at_, ahead_.data(), ahead_.size());
    }
    std::copy_n(ahead_.begin() + static_cast<std::ptrdiff_t>(at_ - ahead_at_), n, data);
  }
  sums_.update(data, n);
  at_ += n;
}

void ChecksumReader::arrays(std::span<const std::span<std::byte>> all, const char* what,
                            const Check& check) {
  std::byte zeros[kArrayAlignment]{};
  bytes(zeros, padding(at_), what);
  if (std::any_of(std::begin(zeros), std::end(zeros),
                  [](std::byte b) { return b != std::byte{0}; })) {
    throw Error(Status::corrupt, std::string("bytes before ") + what + " that are not 0");
  }
  const Row row(all);
  need(row.bytes(), what);
  const auto in_order = [&](uint64_t begin, uint64_t n) {
    row.for_parts(begin, n, [&](size_t number, uint64_t, std::span<std::byte> part) {
      bytes(part.data(), part.size(), what);
      if (check) check(number, part.data(), part.size());
    });
  };
  const Cut cut(row.bytes(), sums_);
  in_order(0, cut.head);
  std::vector<uint64_t> sums(cut.chunks);
  for_all(pool_, cut.chunks, [&](uint64_t i) {
    index::Checksum sum;
    row.for_parts(cut.chunk(i), ChunkSums::kChunk,
                  [&](size_t number, uint64_t at, std::span<std::byte> part) {
                    source_->read(at_ + (at - cut.head), part.data(), part.size());
                    sum.update(part.data(), part.size());
                    if (check) check(number, part.data(), part.size());
                  });
    sums[i] = sum.value();
  });
  for (const uint64_t sum : sums) sums_.add_chunk(sum);
  at_ += cut.tail - cut.head;
  in_order(cut.tail, row.bytes() - cut.tail);
}

void ChecksumReader::finish() {
  const uint64_t computed = sums_.finish();
  if (left() != sizeof computed) {
    throw Error(Status::corrupt, std::to_string(left()) + " bytes are left at the end, needed: " +
                                     std::to_string(sizeof computed));
  }
  uint64_t stored = 0;
  source_->read(at_, reinterpret_cast<std::byte*>(&stored), sizeof stored);
  if (index::checks_sums && stored != computed) {
    throw Error(Status::corrupt, "the checksum does not match");
  }
}

}  // namespace keyhole::runtime

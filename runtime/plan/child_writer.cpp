// ChildWriter of child_file.h.
#include <algorithm>
#include <array>
#include <cstring>
#include <ostream>

#include "runtime/plan/child_format.h"
#include "runtime/plan/chunk_sums.h"

namespace keyhole::runtime {
namespace {

constexpr size_t kWindow = 64;
constexpr size_t kStride = 4096;  // from anchor to anchor
// What is pending and written then, and what of it is kept, as a run may begin in it.
constexpr size_t kMostPending = size_t{1} << 20, kKept = size_t{64} << 10;
constexpr size_t kAhead = size_t{256} << 10;

/// Hash of a window: sum of byte i times kBase^(63 - i).
constexpr uint64_t kBase = 0x9E3779B97F4A7C15;
constexpr uint64_t power(uint32_t n) {
  uint64_t p = 1;
  for (; n != 0; --n) p *= kBase;
  return p;
}
uint64_t add(uint64_t hash, char c) { return hash * kBase + static_cast<uint8_t>(c); }
uint64_t remove(uint64_t hash, char c) {
  constexpr uint64_t kOldest = power(kWindow);
  return hash - static_cast<uint8_t>(c) * kOldest;
}
uint64_t hash_of(const std::byte* window) {
  uint64_t hash = 0;
  for (size_t i = 0; i < kWindow; ++i) hash = add(hash, static_cast<char>(window[i]));
  return hash;
}
/// One number over and over, as zeros: it is anywhere.
bool is_plain(const std::byte* window) { return std::memcmp(window, window + 8, kWindow - 8) == 0; }

}  // namespace

// ---- Anchors -------------------------------------------------------------------------------------

/// The parent's windows by their hash: of equal ones the first.
class ChildWriter::Anchors {
 public:
  Anchors(const ByteSource& parent, cpu::Pool* pool) {
    if (!is_saved_session(parent)) {
      throw Error(Status::corrupt, "not a saved session (wrong magic)");
    }
    const ParentId id = parent_id(parent);
    const uint64_t summed = id.size - sizeof id.checksum;
    const uint64_t chunks = (summed + ChunkSums::kChunk - 1) / ChunkSums::kChunk;
    std::vector<uint64_t> sums(chunks), hashes((id.size + kStride - 1) / kStride, kNone);
    // A pool counts tasks in 32 bits: 2^32 chunks are more than any file has.
    const auto look = [&](uint32_t chunk, uint32_t) {
      const uint64_t begin = uint64_t{chunk} * ChunkSums::kChunk;
      std::vector<std::byte> bytes(std::min<uint64_t>(ChunkSums::kChunk, summed - begin));
      parent.read(begin, bytes.data(), bytes.size());
      index::Checksum sum;
      sum.update(bytes.data(), bytes.size());
      sums[chunk] = sum.value();
      for (size_t i = 0; i + kWindow <= bytes.size(); i += kStride) {
        if (!is_plain(bytes.data() + i)) hashes[(begin + i) / kStride] = hash_of(bytes.data() + i);
      }
    };
    cpu::run_on(pool, chunks, look);
    ChunkSums all;
    for (const uint64_t sum : sums) all.add_chunk(sum);
    if (index::checks_sums && all.finish() != id.checksum) {
      throw Error(Status::corrupt, "the checksum does not match");
    }
    while ((uint64_t{1} << bits_) < 2 * hashes.size()) ++bits_;
    table_.resize(size_t{1} << bits_, {kNone, 0});
    maybe_.resize(size_t{1} << bits_, false);
    for (size_t i = 0; i < hashes.size(); ++i) put(hashes[i], i * kStride);
  }

  /// Where such a window may be; false: nowhere.
  [[nodiscard]] bool find(uint64_t hash, uint64_t& at) const {
    if (!maybe_[hash >> (64 - bits_)]) return false;
    for (size_t i = slot(hash); table_[i].hash != kNone; i = (i + 1) & (table_.size() - 1)) {
      if (table_[i].hash != hash) continue;
      at = table_[i].at;
      return true;
    }
    return false;
  }

 private:
  static constexpr uint64_t kNone = UINT64_MAX;
  struct Entry {
    uint64_t hash, at;
  };
  [[nodiscard]] size_t slot(uint64_t hash) const { return hash * kBase >> (64 - bits_); }
  void put(uint64_t hash, uint64_t at) {
    if (hash == kNone) return;
    size_t i = slot(hash);
    for (; table_[i].hash != kNone; i = (i + 1) & (table_.size() - 1)) {
      if (table_[i].hash == hash) return;
    }
    table_[i] = {hash, at};
    maybe_[hash >> (64 - bits_)] = true;
  }

  uint32_t bits_ = 4;
  std::vector<Entry> table_;  // at most half of it is taken
  std::vector<bool> maybe_;   // small enough for a cache: most windows are at no anchor
};

// ---- Writer --------------------------------------------------------------------------------------

ChildWriter::ChildWriter(std::ostream& out, const ByteSource& parent, const std::string& name,
                         cpu::Pool* pool)
    : out_(&out), parent_(&parent), anchors_(std::make_unique<Anchors>(parent, pool)) {
  const ParentId id = parent_id(parent);
  ChildHeader header{};
  std::copy(std::begin(kChildMagic), std::end(kChildMagic), header.magic);
  header.version = kChildVersion;
  header.name_bytes = static_cast<uint32_t>(std::min(name.size(), kMostNameBytes));
  header.parent_size = id.size;
  header.parent_checksum = id.checksum;
  out_->write(reinterpret_cast<const char*>(&header), sizeof header);
  out_->write(name.data(), header.name_bytes);
}

ChildWriter::~ChildWriter() = default;

ChildWriter::int_type ChildWriter::overflow(int_type c) {
  if (traits_type::eq_int_type(c, traits_type::eof())) return traits_type::not_eof(c);
  const char byte = traits_type::to_char_type(c);
  (void)xsputn(&byte, 1);
  return c;
}

std::streamsize ChildWriter::xsputn(const char* data, std::streamsize n) {
  auto left = static_cast<size_t>(n);
  total_ += left;
  while (left != 0) {
    const size_t taken = in_run_ ? follow(data, left) : search(data, left);
    data += taken;
    left -= taken;
    if (in_run_ && taken == 0) end_run();
  }
  return n;
}

size_t ChildWriter::search(const char* data, size_t n) {
  n = std::min(n, kMostPending);
  if (pending_.size() > kMostPending) write_pending(pending_.size() - kKept);
  const size_t begin = pending_.size();
  pending_.insert(pending_.end(), data, data + n);
  for (size_t i = begin; i < begin + n; ++i) {
    hash_ = add(hash_, pending_[i]);
    if (filled_ == kWindow) {
      hash_ = remove(hash_, pending_[i - kWindow]);
    } else if (++filled_ < kWindow) {
      continue;
    }
    if (begin_run(i + 1)) return i + 1 - begin;
  }
  return n;
}

bool ChildWriter::begin_run(size_t end) {
  uint64_t at = 0;
  if (!anchors_->find(hash_, at)) return false;
  if (room() < kWindow) return false;
  const size_t window = end - kWindow;
  std::array<char, kStride> bytes;
  parent_->read(at, reinterpret_cast<std::byte*>(bytes.data()), kWindow);
  if (!std::equal(bytes.begin(), bytes.begin() + kWindow,
                  pending_.begin() + static_cast<std::ptrdiff_t>(window))) {
    return false;
  }
  size_t start = window;
  for (bool same = true; same;) {
    const size_t n = std::min<uint64_t>({start, at, bytes.size(), room() - (end - start)});
    if (n == 0) break;
    parent_->read(at - n, reinterpret_cast<std::byte*>(bytes.data()), n);
    size_t equal = 0;
    while (equal < n && bytes[n - 1 - equal] == pending_[start - 1 - equal]) ++equal;
    same = equal == n;
    start -= equal;
    at -= equal;
  }
  write_pending(start);
  pending_.clear();
  filled_ = 0;
  hash_ = 0;
  in_run_ = true;
  run_at_ = at;
  run_ = end - start;
  return true;
}

size_t ChildWriter::follow(const char* data, size_t n) {
  size_t same = 0;
  while (same < n) {
    const uint64_t at = run_at_ + run_;
    if (at == parent_->size() || room() == 0) break;
    if (at < ahead_at_ || at >= ahead_at_ + ahead_.size()) {
      ahead_.resize(std::min<uint64_t>(kAhead, parent_->size() - at));
      ahead_at_ = at;
      parent_->read(at, ahead_.data(), ahead_.size());
    }
    const auto* theirs = reinterpret_cast<const char*>(ahead_.data()) + (at - ahead_at_);
    const size_t most = std::min<uint64_t>({n - same, ahead_at_ + ahead_.size() - at, room()});
    size_t equal = most;
    if (std::memcmp(theirs, data + same, most) != 0) {
      equal = static_cast<size_t>(std::mismatch(theirs, theirs + most, data + same).first - theirs);
    }
    same += equal;
    run_ += equal;
    if (equal != most) break;
  }
  return same;
}

void ChildWriter::end_run() {
  record(run_, run_at_);
  copied_ += run_;
  run_ = 0;
  in_run_ = false;
}

void ChildWriter::write_pending(size_t n) {
  if (n == 0) return;
  record(n, kOwnBytes);
  out_->write(pending_.data(), static_cast<std::streamsize>(n));
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(n));
}

void ChildWriter::record(uint64_t length, uint64_t place) {
  const ChildRecord r{length, place};
  out_->write(reinterpret_cast<const char*>(&r), sizeof r);
}

void ChildWriter::finish() {
  if (in_run_) end_run();
  write_pending(pending_.size());
  record(0, total_);
}

}  // namespace keyhole::runtime

// A file that holds only what is not in another one, its parent, which it names by length and checksum. What it stands for is
// a row of bytes as any other: a saved session that is read through ChildSource is, bit for bit, the one that ChildWriter was
// given, and whatever checks that checks this, too.
//
// Bytes are found in the parent by their content, so nothing has to be known of what they mean: every 4 KiB of the parent
// has an anchor, the hash of 64 bytes; where a window of 64 bytes has the same hash, what follows is compared with the parent
// until it differs, and so is what came before. So a child holds what differs, but for runs below some 4 KiB, and 16
// bytes for each run.
//
// Layout, little-endian: magic "KEYCHLD\x1a", u32 format version, u32 length of the parent's name; u64 length and u64 checksum
// of what the parent stands for; the name, a hint for people; then records of u64 length, u64 place:
//     place < 2^64 - 1: bytes [place, place + length) of what the parent stands for
//     place = 2^64 - 1: the `length` bytes that follow the record
// and last one of length 0 whose place is the length of all. A child takes at most as many bytes from its parent as this has,
// so that no small file stands for more than all files together have.
#pragma once

#include <iosfwd>
#include <memory>
#include <streambuf>
#include <string>
#include <vector>

#include "cpu/pool.h"
#include "runtime/plan/byte_source.h"

namespace keyhole::runtime {

/// What tells one parent from another: of what its file stands for, length and last eight bytes, a session's checksum.
struct ParentId {
  uint64_t size = 0;
  uint64_t checksum = 0;
  bool operator==(const ParentId&) const = default;
  /// "N bytes with checksum HEX", for people.
  [[nodiscard]] std::string text() const;
};
/// Throws Error(corrupt) for less than eight bytes.
[[nodiscard]] ParentId parent_id(const ByteSource& source);

/// A stream's buffer that writes the bytes that it is given as a child's file.
class ChildWriter final : public std::streambuf {
 public:
  /// All outlive it; pool null: the calling thread reads the parent alone. name: up to 255 bytes are kept. Throws
  /// Error(corrupt) where the parent's checksum does not match, Error(io).
  ChildWriter(std::ostream& out, const ByteSource& parent, const std::string& name,
              cpu::Pool* pool = nullptr);
  ~ChildWriter() override;
  /// After the last byte.
  void finish();

 protected:
  std::streamsize xsputn(const char* data, std::streamsize n) override;
  int_type overflow(int_type c) override;

 private:
  class Anchors;
  /// Looks for the parent's bytes in the first of n bytes; returns how many it has taken.
  size_t search(const char* data, size_t n);
  /// Where the window that ends with byte `end` of pending_ is at an anchor, begins a run there.
  [[nodiscard]] bool begin_run(size_t end);
  /// How many of the n bytes go on as the parent does.
  [[nodiscard]] size_t follow(const char* data, size_t n);
  void end_run();
  /// Bytes that may still come from the parent.
  [[nodiscard]] uint64_t room() const { return parent_->size() - copied_ - run_; }
  /// Writes the first n bytes of pending_ as they are.
  void write_pending(size_t n);
  void record(uint64_t length, uint64_t place);

  std::ostream* out_;
  const ByteSource* parent_;
  std::unique_ptr<Anchors> anchors_;
  uint64_t total_ = 0, copied_ = 0;
  std::vector<char> pending_;  ///< not found in the parent so far
  uint64_t hash_ = 0;          ///< of the last 64 bytes of pending_
  size_t filled_ = 0;          ///< bytes that are in hash_, up to 64
  bool in_run_ = false;
  uint64_t run_at_ = 0, run_ = 0;  ///< place in the parent, length
  std::vector<std::byte> ahead_;   ///< bytes of the parent from ahead_at_ on
  uint64_t ahead_at_ = 0;
};

/// What a child's file stands for.
class ChildSource final : public ByteSource {
 public:
  [[nodiscard]] static bool is_child(const ByteSource& file);
  /// Of a child's file: what it says of its parent, "N bytes with checksum HEX ("NAME")". Throws Error(corrupt | io).
  [[nodiscard]] static std::string parent_text(const ByteSource& file);

  /// Throws Error(invalid_argument) where the parent is another one than the file names, Error(corrupt | io | version).
  ChildSource(std::unique_ptr<const ByteSource> file, std::unique_ptr<const ByteSource> parent);

  [[nodiscard]] uint64_t size() const override { return size_; }
  void read(uint64_t offset, std::byte* to, size_t n) const override;

 private:
  struct Run {
    uint64_t begin;  ///< of what it stands for
    uint64_t place;  ///< in the file, or the parent
    bool is_parents;
  };
  std::unique_ptr<const ByteSource> file_, parent_;
  std::vector<Run> runs_;
  uint64_t size_ = 0;
};

}  // namespace keyhole::runtime

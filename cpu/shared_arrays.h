// Arrays that grow in place and whose pages copies share (copy on write).
//
// A copy reads the same physical pages at addresses of its own, so its arrays are contiguous, too: first the pages
// that it has taken over, then its own. Pages that several objects read are never written. An object that cuts its
// arrays and writes there again first gets other pages, and copies what it keeps of the page that it cuts.
//
// How. Pages are those of shared memory (a MAP_SHARED mapping without a file), as only such pages can have several
// addresses: mremap() with an old size of 0 gives a range another one. No file descriptor is needed. Memory like
// this has no huge pages by itself on most systems, so ranges of 2 MiB are made huge one by one where a prompt fills
// them (MADV_COLLAPSE, Linux 6.1): gathers of 256-byte rows over 1 GiB take 10.1 ns a row with them, as over private
// memory with huge pages, and 11.5 ns without.
//
// A copy takes two mappings for each array, and a process has 65530 (vm.max_map_count). Where half of them are taken,
// where a mapping fails, or where the system has no such memory, a copy copies the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace keyhole::cpu {

class Pool;

/// Groups of equally many arrays, all of the same size. The arrays of a group grow and are cut together. Objects that
/// share pages may be used, and destroyed, by different threads at once and in any order; each by one thread at a time.
class SharedArrays {
 public:
  /// Reserves addresses; memory is taken as bytes are written, and reads as zero before. array_bytes: whole pages.
  /// Arrays of whole huge pages begin on one. Throws Error(out_of_memory).
  SharedArrays(size_t groups, size_t arrays, size_t array_bytes);
  ~SharedArrays();
  SharedArrays(const SharedArrays&) = delete;
  SharedArrays& operator=(const SharedArrays&) = delete;

  /// The first byte of an array. It never moves.
  [[nodiscard]] std::byte* at(size_t group, size_t array) const {
    return view_ + (group * arrays_ + array) * array_bytes_;
  }

  /// Call before bytes [from, to) of the group's arrays are written; the bytes from `from` on hold nothing yet.
  /// Afterwards nobody else reads them. Throws Error(out_of_memory), and then the bytes before `from` are unchanged.
  /// pool: its threads make pages huge, one array each, because one thread alone clears 2 to 5 GB/s; null: the caller
  /// does. kept: of the bytes from `from` on, those before `kept` do hold something, which stays, also where it throws.
  void prepare(size_t group, size_t from, size_t to, Pool* pool = nullptr, size_t kept = 0);
  /// Says that the bytes from `from` on hold nothing any more: pages that nobody reads go back to the system.
  void truncate(size_t group, size_t from) noexcept;
  /// Lets the first `bytes` of each of the group's arrays, which hold nothing yet, be those of `from`, an object of
  /// the same shape that nobody uses meanwhile. Throws Error(out_of_memory).
  void share(size_t group, const SharedArrays& from, size_t bytes);

  /// Whether what is written lies in pages of shared memory; false: in private memory, which the system had alone.
  [[nodiscard]] bool has_shared_pages() const { return own_ != nullptr; }

  /// Whether prepare() from byte `from` on would exchange pages.
  [[nodiscard]] bool is_shared(size_t group, size_t from) const;

  /// The number n for which bytes [0, n) of both objects' arrays of the group, which have the same shape, are the
  /// same memory. As far as both hold bytes there, they are equal.
  [[nodiscard]] size_t common_bytes(size_t group, const SharedArrays& other) const;

  /// Bytes of memory, divided so that every page is counted once over all objects: the first object that still has a
  /// shared page counts it, the others do not.
  struct Bytes {
    uint64_t counted = 0;
    uint64_t counted_by_others = 0;
  };
  /// The memory of the first `bytes` of the group's arrays, all arrays together.
  [[nodiscard]] Bytes bytes(size_t group, size_t bytes) const;

 private:
  class Region;
  /// A piece of the group's arrays that lies in one region: the bytes [end of the piece before, end).
  struct Piece {
    std::shared_ptr<Region> region;
    size_t end = 0;
  };
  struct Group {
    std::vector<Piece> pieces;
    size_t held = 0;           ///< bytes that the regions know to be held here
    size_t writable_from = 0;  ///< nobody else reads bytes [writable_from, held)
    bool is_mixed = false;     ///< pages may be others than pieces say: nobody can share them
  };

  [[nodiscard]] size_t offset(size_t group, size_t array) const {
    return (group * arrays_ + array) * array_bytes_;
  }
  /// Exchanges the pages of bytes [from, array_bytes) of the group's arrays, and holds them up to `end`; the bytes
  /// before `kept` go with them, kept >= from.
  void exchange(size_t group, size_t from, size_t end, size_t kept);
  /// Asks for huge pages for bytes [from, to).
  void make_huge(size_t group, size_t from, size_t to, Pool* pool);

  size_t groups_count_, arrays_, array_bytes_;
  std::byte* view_ = nullptr;
  std::vector<Group> groups_;
  std::shared_ptr<Region>
      own_;               ///< whose pages others can only share; null: there is only private memory
  int64_t mappings_ = 0;  ///< mappings that this object has added to its first
};

}  // namespace keyhole::cpu

#include "cpu/shared_arrays.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <mutex>
#include <string>

#include "cpu/aligned.h"
#include "cpu/memory.h"
#include "cpu/pool.h"
#include "cpu/types.h"

namespace keyhole::cpu {
namespace {

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

size_t down(size_t n, size_t unit) { return n / unit * unit; }
size_t up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

[[noreturn]] void refuse_mapping(size_t bytes, int error) {
  throw Error(Status::out_of_memory,
              "cannot map " + std::to_string(bytes) + " bytes of memory: " + std::strerror(error));
}

/// Reserves addresses, from a huge page's first byte on; null: none.
std::byte* reserve(size_t bytes, int flags) {
  void* const mapping = mmap(nullptr, bytes + kHugePageBytes, PROT_READ | PROT_WRITE,
                             flags | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(mapping);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const size_t before = up(address, kHugePageBytes) - address;
  if (before > 0) munmap(begin, before);
  if (kHugePageBytes > before) munmap(begin + before + bytes, kHugePageBytes - before);
  return begin + before;
}

/// n bytes of private memory that begin with `kept` bytes of `from`, in place of what is there. Throws
/// Error(out_of_memory).
void map_private_copy(const std::byte* from, size_t kept, size_t n, std::byte* at) {
  void* const pages =
      mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) refuse_mapping(n, errno);
  std::copy_n(from, kept, static_cast<std::byte*>(pages));
  if (mremap(pages, n, n, MREMAP_MAYMOVE | MREMAP_FIXED, at) != MAP_FAILED) return;
  const int error = errno;
  munmap(pages, n);
  refuse_mapping(n, error);
}

/// How shared memory gets huge pages.
enum class Huge { no, advised, collapsed };

/// The choice in brackets, as in "always [madvise] never".
std::string chosen(const char* file) {
  std::ifstream in(std::string("/sys/kernel/mm/transparent_hugepage/") + file);
  std::string text;
  std::getline(in, text);
  const size_t begin = text.find('['), end = text.find(']');
  return begin == std::string::npos || end == std::string::npos
             ? std::string()
             : text.substr(begin + 1, end - begin - 1);
}

Huge huge_pages() {
  static const Huge huge = [] {
    const std::string any = chosen("enabled"), shared = chosen("shmem_enabled");
    if (any.empty() || any == "never" || shared == "deny") return Huge::no;
    return shared == "never" ? Huge::collapsed : Huge::advised;
  }();
  return huge;
}

/// Mappings that copies have added in this process, and how many there may be.
std::atomic<int64_t> added_mappings{0};
int64_t most_mappings() {
  static const int64_t most = [] {
    std::ifstream in("/proc/sys/vm/max_map_count");
    int64_t count = 0;
    if (!(in >> count)) count = 65530;
    return count / 2;
  }();
  return most;
}

}  // namespace

// ---- Memory that several objects map ---------------------------------------------------------------

/// Memory laid out like each of the objects. An object that maps its pages holds, in each group, bytes up to an end;
/// a page goes back to the system when nobody holds it.
class SharedArrays::Region {
 public:
  /// Throws Error(out_of_memory).
  Region(size_t groups, size_t arrays, size_t array_bytes)
      : groups_(groups), arrays_(arrays), array_bytes_(array_bytes) {
    home_ = reserve(bytes(), MAP_SHARED);
    if (home_ == nullptr) refuse_mapping(bytes(), errno);
    (void)madvise(home_, bytes(), MADV_DONTDUMP);  // a core has the pages at their users' addresses
  }
  ~Region() { munmap(home_, bytes()); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  [[nodiscard]] size_t bytes() const { return groups_ * arrays_ * array_bytes_; }

  /// Gives bytes [offset, offset + n) a second address, `to`, in place of what is there. False: it failed, and what
  /// was there may be gone.
  [[nodiscard]] bool map_at(size_t offset, size_t n, std::byte* to) const {
    return mremap(home_ + offset, 0, n, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED;
  }
  /// The address where bytes that nobody has mapped yet are written.
  [[nodiscard]] std::byte* home(size_t offset) const { return home_ + offset; }

  void join(const void* who) {
    const std::lock_guard lock(mutex_);
    if (find(who) == nullptr) users_.push_back({who, std::vector<size_t>(groups_)});
  }
  /// After join().
  void hold(const void* who, size_t group, size_t end) {
    const std::lock_guard lock(mutex_);
    size_t& held = find(who)->ends[group];
    held = std::max(held, end);
  }
  /// Lets one object alone hold bytes [from, end) of the group. False, with nothing changed, where another one holds
  /// any of them.
  [[nodiscard]] bool claim(const void* who, size_t group, size_t from, size_t end) {
    const std::lock_guard lock(mutex_);
    if (end_of_others(who, group) > from) return false;
    size_t& held = find(who)->ends[group];
    held = std::max(held, end);
    return true;
  }
  [[nodiscard]] bool is_held_by_others(const void* who, size_t group, size_t from) const {
    const std::lock_guard lock(mutex_);
    return end_of_others(who, group) > from;
  }
  /// The largest end that an earlier user holds in the group.
  [[nodiscard]] size_t end_of_earlier(const void* who, size_t group) const {
    const std::lock_guard lock(mutex_);
    size_t end = 0;
    for (const User& user : users_) {
      if (user.who == who) break;
      end = std::max(end, user.ends[group]);
    }
    return end;
  }
  void lower(const void* who, size_t group, size_t end) noexcept {
    const std::lock_guard lock(mutex_);
    if (User* user = find(who); user != nullptr) lower(*user, group, end);
  }
  void leave(const void* who) noexcept {
    const std::lock_guard lock(mutex_);
    User* const user = find(who);
    if (user == nullptr) return;
    // When the last user leaves, all of it goes.
    for (size_t g = 0; users_.size() > 1 && g < groups_; ++g) lower(*user, g, 0);
    users_.erase(users_.begin() + (user - users_.data()));
  }

 private:
  struct User {
    const void* who;
    std::vector<size_t> ends;  ///< [group]
  };

  [[nodiscard]] User* find(const void* who) {
    const auto at =
        std::find_if(users_.begin(), users_.end(), [&](const User& u) { return u.who == who; });
    return at == users_.end() ? nullptr : &*at;
  }
  [[nodiscard]] size_t end_of_others(const void* who, size_t group) const {
    size_t end = 0;
    for (const User& user : users_) {
      if (user.who != who) end = std::max(end, user.ends[group]);
    }
    return end;
  }
  void lower(User& user, size_t group, size_t end) {
    const size_t before = user.ends[group];
    if (end >= before) return;
    user.ends[group] = end;
    const size_t from = std::max(end, end_of_others(user.who, group));
    if (from >= before) return;
    // Clears to the end of the array, because what is held may begin a huge page, all of which is there.
    for (size_t a = 0; a < arrays_; ++a) {
      const size_t array = (group * arrays_ + a) * array_bytes_;
      (void)madvise(home_ + array + from, array_bytes_ - from, MADV_REMOVE);
    }
  }

  size_t groups_, arrays_, array_bytes_;
  std::byte* home_ = nullptr;  ///< all of it, once; read and written elsewhere, but for home()
  mutable std::mutex mutex_;
  std::vector<User> users_;  ///< in the order in which they came
};

// ---- Arrays ----------------------------------------------------------------------------------------

SharedArrays::SharedArrays(size_t groups, size_t arrays, size_t array_bytes)
    : groups_count_(groups), arrays_(arrays), array_bytes_(array_bytes), groups_(groups) {
  const size_t bytes = groups * arrays * array_bytes;
  if (bytes == 0) return;
  if (bytes > SIZE_MAX / 4) refuse_mapping(bytes, ENOMEM);
  for (Group& g : groups_) g.pieces.reserve(1);
  try {
    own_ = std::make_shared<Region>(groups, arrays, array_bytes);
    own_->join(this);
  } catch (const Error&) {
    own_.reset();
  }
  view_ = reserve(bytes, MAP_PRIVATE);
  if (view_ == nullptr) refuse_mapping(bytes, errno);
  if (own_ != nullptr && !own_->map_at(0, bytes, view_)) {
    own_.reset();
    void* const again = mmap(view_, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (again == MAP_FAILED) {
      const int error = errno;
      munmap(view_, bytes);
      refuse_mapping(bytes, error);
    }
  }
  for (Group& g : groups_) {
    g.is_mixed = own_ == nullptr;
    if (own_ != nullptr) g.pieces.push_back({own_, array_bytes_});
  }
}

SharedArrays::~SharedArrays() {
  if (view_ != nullptr) munmap(view_, groups_count_ * arrays_ * array_bytes_);
  for (const Group& g : groups_) {
    for (const Piece& piece : g.pieces) piece.region->leave(this);
  }
  if (own_ != nullptr) own_->leave(this);
  added_mappings -= mappings_;
}

bool SharedArrays::is_shared(size_t group, size_t from) const {
  const size_t page = down(from, page_size());
  const std::vector<Piece>& pieces = groups_[group].pieces;
  return std::any_of(pieces.begin(), pieces.end(), [&](const Piece& piece) {
    return piece.end > page && piece.region->is_held_by_others(this, group, page);
  });
}

void SharedArrays::prepare(size_t group, size_t from, size_t to, Pool* pool, size_t kept) {
  Group& g = groups_[group];
  // Of bytes that are held copies may have been made since they were writable.
  const bool is_writable = from >= g.writable_from && to <= g.held && kept <= from;
  if (to <= from || is_writable) return;
  const size_t page = down(from, page_size()), end = up(std::max(to, kept), page_size());
  bool is_mine = true;
  size_t begin = 0;
  for (const Piece& piece : g.pieces) {
    const size_t first = std::max(page, begin), last = std::min(end, piece.end);
    begin = piece.end;
    if (first < last) is_mine = is_mine && piece.region->claim(this, group, first, last);
  }
  if (!is_mine) exchange(group, from, end, std::max(from, kept));
  make_huge(group, std::max(from, g.held), to, pool);
  g.held = std::max(g.held, end);
  g.writable_from = std::min(g.writable_from, page);
}

void SharedArrays::exchange(size_t group, size_t from, size_t end, size_t kept) {
  Group& g = groups_[group];
  const size_t page = down(from, page_size());
  g.pieces.reserve(g.pieces.size() + 1);
  const size_t copied = kept - page;
  std::shared_ptr<Region> region = own_;
  if (region->is_held_by_others(this, group, page)) {
    region = std::make_shared<Region>(groups_count_, arrays_, array_bytes_);
  }
  region->join(this);
  region->hold(this, group, end);  // before the first byte is there: others may leave meanwhile
  own_ = region;
  // Until all arrays have their new pages, some of them have other pages than the pieces say.
  g.is_mixed = true;
  for (size_t a = 0; a < arrays_; ++a) {
    std::byte* const at = view_ + offset(group, a) + page;
    // Audits and builds may be reading the kept bytes, so these are in the new pages before the kernel, in one step,
    // puts the new pages in place of the old.
    std::byte* const fresh = region->home(offset(group, a) + page);
    std::copy_n(at, copied, fresh);
    if (region->map_at(offset(group, a) + page, array_bytes_ - page, at)) continue;
    const int error = errno;
    map_private_copy(fresh, copied, array_bytes_ - page, at);
    refuse_mapping(array_bytes_ - page, error);
  }
  added_mappings += static_cast<int64_t>(arrays_);
  mappings_ += static_cast<int64_t>(arrays_);
  size_t begin = 0, kept_pieces = 0;
  for (const Piece& piece : g.pieces) {
    const bool is_kept = begin < page;
    if (piece.region != region) piece.region->lower(this, group, is_kept ? page : 0);
    if (is_kept) kept_pieces += 1;
    begin = piece.end;
  }
  g.pieces.resize(kept_pieces);
  if (kept_pieces != 0) g.pieces.back().end = page;
  g.pieces.push_back({std::move(region), array_bytes_});
  g.is_mixed = false;
}

void SharedArrays::truncate(size_t group, size_t from) noexcept {
  Group& g = groups_[group];
  const size_t end = up(from, page_size());
  g.writable_from = SIZE_MAX;  // what is cut may be others' as well
  if (end >= g.held) return;
  for (size_t a = 0; g.is_mixed && a < arrays_; ++a) {
    (void)madvise(view_ + offset(group, a) + end, g.held - end, MADV_DONTNEED);
  }
  g.held = end;
  size_t begin = 0;
  for (const Piece& piece : g.pieces) {
    piece.region->lower(this, group, begin < end ? end : 0);
    begin = piece.end;
  }
}

void SharedArrays::share(size_t group, const SharedArrays& from, size_t bytes) {
  if (bytes == 0) return;
  Group& g = groups_[group];
  const Group& theirs = from.groups_[group];
  const size_t whole = down(bytes, page_size());
  // One mapping for each array and piece, and one for each array's own memory behind them.
  const auto more = static_cast<int64_t>(arrays_ * theirs.pieces.size());
  const bool can_share = whole != 0 && own_ != nullptr && !g.is_mixed && !theirs.is_mixed &&
                         added_mappings.load() + 2 * more <= most_mappings();
  size_t shared = 0;
  if (can_share) {
    added_mappings += 2 * more;
    mappings_ += 2 * more;
    std::vector<Piece> pieces;
    pieces.reserve(theirs.pieces.size() + 1);
    for (const Piece& piece : theirs.pieces) {
      if (shared == whole) break;
      pieces.push_back({piece.region, std::min(piece.end, whole)});
      shared = pieces.back().end;
    }
    pieces.push_back({own_, array_bytes_});
    std::swap(g.pieces, pieces);
    size_t begin = 0;
    for (size_t i = 0; i + 1 < g.pieces.size(); ++i) {
      Region& region = *g.pieces[i].region;
      const size_t n = g.pieces[i].end - begin;
      region.join(this);
      region.hold(this, group, g.pieces[i].end);
      for (size_t a = 0; a < arrays_; ++a) {
        const size_t at = offset(group, a) + begin;
        if (region.map_at(at, n, view_ + at)) continue;
        const int error = errno;
        g.is_mixed = true;
        void* const again = mmap(view_ + at, n, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        if (again == MAP_FAILED) refuse_mapping(n, error);
        std::copy_n(from.view_ + at, n, view_ + at);
      }
      begin = g.pieces[i].end;
    }
    g.held = g.writable_from = shared;
  }
  prepare(group, shared, bytes);
  for (size_t a = 0; a < arrays_; ++a) {
    std::copy_n(from.at(group, a) + shared, bytes - shared, at(group, a) + shared);
  }
}

size_t SharedArrays::common_bytes(size_t group, const SharedArrays& other) const {
  const Group &mine = groups_[group], &theirs = other.groups_[group];
  if (mine.is_mixed || theirs.is_mixed) return 0;
  size_t common = 0;
  for (size_t p = 0; p < std::min(mine.pieces.size(), theirs.pieces.size()); ++p) {
    const Piece &a = mine.pieces[p], &b = theirs.pieces[p];
    if (a.region != b.region) break;
    common = std::min(a.end, b.end);
    if (a.end != b.end) break;
  }
  return common;
}

SharedArrays::Bytes SharedArrays::bytes(size_t group, size_t bytes) const {
  const Group& g = groups_[group];
  Bytes all;
  size_t begin = 0;
  for (const Piece& piece : g.pieces) {
    const size_t end = std::min(piece.end, bytes);
    if (begin >= end) break;
    const size_t others = std::clamp(piece.region->end_of_earlier(this, group), begin, end);
    all.counted += (end - others) * arrays_;
    all.counted_by_others += (others - begin) * arrays_;
    begin = end;
  }
  all.counted += (bytes - begin) * arrays_;  // private memory
  return all;
}

void SharedArrays::make_huge(size_t group, size_t from, size_t to, Pool* pool) {
  // The first 2 MiB of an array stay on small pages: a short context would otherwise touch a huge page of each of the
  // hundreds of arrays (1 GiB for 32 layers of 8 heads).
  const Group& g = groups_[group];
  if (array_bytes_ % kHugePageBytes != 0) return;
  const size_t last = up(to, kHugePageBytes);
  size_t first = std::max(up(from, kHugePageBytes), kHugePageBytes);
  if (g.pieces.size() > 1)
    first = std::max(first, up(g.pieces[g.pieces.size() - 2].end, kHugePageBytes));
  if (first >= last || huge_pages() == Huge::no) return;
  const bool is_private = own_ == nullptr;
  const bool is_collapsed = !is_private && huge_pages() == Huge::collapsed;
  // Collapsing a range takes a little longer than the kernel's clearing of 2 MiB: a prompt can wait for that, but not
  // a step that moves a few rows out of the window.
  if (is_collapsed && to - from < kHugePageBytes / 8) return;
  const auto make = [&](size_t a) {
    std::byte* const array = view_ + offset(group, a);
    if (!is_collapsed) {
      (void)madvise(array + first, array_bytes_ - first, MADV_HUGEPAGE);
      return;
    }
    for (size_t at = first; at < last; at += kHugePageBytes) {
      array[at] = std::byte{0};  // a range without any page cannot be made huge
      if (madvise(array + at, kHugePageBytes, MADV_COLLAPSE) != 0) return;
    }
  };
  if (pool != nullptr && is_collapsed) {
    pool->run(static_cast<uint32_t>(arrays_), [&](uint32_t a, uint32_t) { make(a); });
  } else {
    for (size_t a = 0; a < arrays_; ++a) make(a);
  }
}

}  // namespace keyhole::cpu

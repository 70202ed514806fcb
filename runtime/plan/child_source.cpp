// ChildSource of child_file.h.
#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "index/serial.h"
#include "runtime/plan/child_format.h"
#include "runtime/plan/refusals.h"

namespace keyhole::runtime {
namespace {

bool begins_with(const ByteSource& source, const char (&magic)[8]) {
  char bytes[sizeof magic];
  if (source.size() < sizeof bytes) return false;
  source.read(0, reinterpret_cast<std::byte*>(bytes), sizeof bytes);
  return std::equal(std::begin(bytes), std::end(bytes), std::begin(magic));
}

/// Values of a file, one after the other.
class Cursor {
 public:
  explicit Cursor(const ByteSource& file) : file_(&file) {}
  [[nodiscard]] uint64_t at() const { return at_; }
  void read(void* to, size_t n) {
    need(n);
    file_->read(at_, static_cast<std::byte*>(to), n);
    at_ += n;
  }
  void skip(uint64_t n) {
    need(n);
    at_ += n;
  }
  void need(uint64_t n) const {
    if (n > file_->size() - at_) {
      corrupt("the child's file ends inside its records (" + std::to_string(file_->size() - at_) +
              " bytes are left)");
    }
  }
  [[nodiscard]] bool is_at_end() const { return at_ == file_->size(); }

 private:
  const ByteSource* file_;
  uint64_t at_ = 0;
};

struct Head {
  ParentId parent;
  std::string name;
  [[nodiscard]] std::string text() const { return parent.text() + " (\"" + name + "\")"; }
};

Head read_head(Cursor& in) {
  ChildHeader header;
  in.read(&header, sizeof header);
  if (!std::equal(std::begin(header.magic), std::end(header.magic), std::begin(kChildMagic))) {
    corrupt("not a saved session (wrong magic)");
  }
  if (header.version != kChildVersion) {
    throw Error(Status::version, "format version " + std::to_string(header.version) +
                                     " of a child's file, this library reads " +
                                     std::to_string(kChildVersion));
  }
  if (header.name_bytes > kMostNameBytes) {
    corrupt("the name of the parent has " + std::to_string(header.name_bytes) +
            " bytes, allowed: up to " + std::to_string(kMostNameBytes));
  }
  Head head{{header.parent_size, header.parent_checksum}, std::string(header.name_bytes, '\0')};
  in.read(head.name.data(), head.name.size());
  // It comes into texts for people.
  std::replace_if(
      head.name.begin(), head.name.end(), [](char c) { return c < ' ' || c > '~' || c == '"'; },
      '?');
  return head;
}

}  // namespace

std::string ParentId::text() const {
  char hex[17];
  (void)std::snprintf(hex, sizeof hex, "%016" PRIx64, checksum);
  return std::to_string(size) + " bytes with checksum " + hex;
}

ParentId parent_id(const ByteSource& source) {
  ParentId id{source.size(), 0};
  if (id.size < sizeof id.checksum) {
    corrupt("it has " + std::to_string(id.size) + " bytes, less than a checksum");
  }
  source.read(id.size - sizeof id.checksum, reinterpret_cast<std::byte*>(&id.checksum),
              sizeof id.checksum);
  return id;
}

bool is_saved_session(const ByteSource& source) { return begins_with(source, kSessionMagic); }

bool ChildSource::is_child(const ByteSource& file) { return begins_with(file, kChildMagic); }

std::string ChildSource::parent_text(const ByteSource& file) {
  Cursor in(file);
  return read_head(in).text();
}

ChildSource::ChildSource(std::unique_ptr<const ByteSource> file,
                         std::unique_ptr<const ByteSource> parent)
    : file_(std::move(file)), parent_(std::move(parent)) {
  Cursor in(*file_);
  const Head head = read_head(in);
  const ParentId given = parent_id(*parent_);
  if (index::checks_sums ? given != head.parent : given.size != head.parent.size) {
    throw Error(Status::invalid_argument,
                "its parent has " + head.text() + ", the one given has " + given.text());
  }
  uint64_t copied = 0;
  for (;;) {
    ChildRecord r;
    in.read(&r, sizeof r);
    if (r.length == 0) {
      if (r.place != size_) {
        corrupt("the child's records are " + std::to_string(size_) + " bytes, it says " +
                std::to_string(r.place));
      }
      break;
    }
    const bool is_parents = r.place != kOwnBytes;
    runs_.push_back({size_, is_parents ? r.place : in.at(), is_parents});
    if (!is_parents) {
      in.skip(r.length);
    } else {
      if (r.place > given.size || r.length > given.size - r.place ||
          r.length > given.size - copied) {
        corrupt("a record of bytes that the parent does not have");
      }
      copied += r.length;
    }
    size_ += r.length;  // below 2^64, as both files are
  }
  if (!in.is_at_end()) corrupt("bytes behind the child's last record");
}

void ChildSource::read(uint64_t offset, std::byte* to, size_t n) const {
  auto next = std::upper_bound(runs_.begin(), runs_.end(), offset,
                               [](uint64_t at, const Run& run) { return at < run.begin; });
  while (n != 0) {
    const Run& run = *(next - 1);
    const uint64_t end = next == runs_.end() ? size_ : next->begin;
    const size_t part = std::min<uint64_t>(n, end - offset);
    const ByteSource& from = run.is_parents ? *parent_ : *file_;
    from.read(run.place + (offset - run.begin), to, part);
    offset += part;
    to += part;
    n -= part;
    ++next;
  }
}

}  // namespace keyhole::runtime

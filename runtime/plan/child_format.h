// What a child's file consists of, see child_file.h.
#pragma once

#include "runtime/plan/child_file.h"

namespace keyhole::runtime {

inline constexpr char kSessionMagic[8] = {'K', 'E', 'Y', 'H', 'O', 'L', 'E', '\x1a'};
inline constexpr char kChildMagic[8] = {'K', 'E', 'Y', 'C', 'H', 'L', 'D', '\x1a'};
inline constexpr uint32_t kChildVersion = 1;
inline constexpr size_t kMostNameBytes = 255;
inline constexpr uint64_t kOwnBytes = UINT64_MAX;  ///< a record's place

struct ChildHeader {
  char magic[8];
  uint32_t version;
  uint32_t name_bytes;
  uint64_t parent_size, parent_checksum;
};
struct ChildRecord {
  uint64_t length, place;
};

/// Whether it begins like one.
[[nodiscard]] bool is_saved_session(const ByteSource& source);

}  // namespace keyhole::runtime

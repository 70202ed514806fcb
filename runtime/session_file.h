// A session as a file: save, load, and the copy that fork makes by the same road.
//
// Layout, little-endian: magic "KEYHOLE\x1a", u32 format version, shape and parameters, those of every
// head (index, budget), where there are audits the step number of every layer and what every head reads because
// of them (their figures stay behind); then per layer the token counts, the end of the block that is on its way
// into the index (0: none), the resident K and V `[tokens, kv_heads, head_dim]`, and per KV head the offloaded K
// and V `[rows, head_dim]`, the query sample and the index's own bytes; last a 64-bit checksum of all that came
// before.
#pragma once

#include <memory>
#include <string>

#include "runtime/session.h"

namespace keyhole::runtime {

class SessionFile {
 public:
  /// For both, no audit may be under way.
  /// Writes `path`.tmp and renames it. Throws Error(io); then no file of that name has changed.
  static void save(const Session& session, const std::string& path);

  /// Throws Error(io | corrupt | version), and Error(invalid_argument) for an engine of another shape.
  [[nodiscard]] static std::unique_ptr<Session> load(const std::shared_ptr<const Engine>& engine,
                                                     const std::string& path);

  [[nodiscard]] static std::unique_ptr<Session> fork(const Session& session);

 private:
  static void write_audits(const Session& s, class ChecksumWriter& out);
  static void read_audits(Session& s, class ChecksumReader& in);
  static void write_layer(const Session& s, uint32_t layer, class ChecksumWriter& out);
  /// Returns the end of the block that was on its way into the indexes.
  static uint32_t read_layer(Session& s, uint32_t layer, class ChecksumReader& in);
  static std::unique_ptr<index::Index> load_index(const Session& s, uint32_t layer,
                                                  uint32_t kv_head, const std::string& bytes);
  static std::unique_ptr<index::TailTree> load_tail(const Session& s, uint32_t layer,
                                                    uint32_t kv_head, size_t rows,
                                                    const std::string& bytes);
};

}  // namespace keyhole::runtime

// A spread session on disk: a session file of each rank beside PATH, and at PATH a small one that names them. Layout of
// that, little-endian: magic "KEYHOLE\x1e", u32 version, u64 id of the save, u32 ranks, u32 tokens of a block, u32
// layers, u32 tokens of each; last a checksum. The rank's file is PATH.ID.R-of-N. It is replaced when all ranks have
// written theirs: whenever one dies, the file at PATH names whole files.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/parallel/spread_session.h"
#include "runtime/session/identity.h"

namespace keyhole::runtime {

/// Collective. Throws Error(io) and leaves what was saved before.
void save_spread(const Session& own, const SpreadSession& spread, const std::string& path);

/// A session with its place in the whole: `tokens` of each layer of the text.
struct LoadedShare {
  std::unique_ptr<Session> own;
  std::vector<uint32_t> tokens;
};
/// What save_spread() wrote on any number of ranks, or an ordinary session's file, for the engine's ranks or for none;
/// collective with these. Throws what load_session() throws.
[[nodiscard]] LoadedShare load_spread(const std::shared_ptr<const Engine>& engine,
                                      const std::string& path, const ExpectedIdentity& expected);
/// Whether a file is one that names those of ranks. Throws Error(io).
[[nodiscard]] bool is_spread_file(const std::string& path);

}  // namespace keyhole::runtime

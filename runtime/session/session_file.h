// A session as a file: save, load; and the copy that fork makes.
//
// Layout, little-endian: magic "KEYHOLE\x1a", u32 format version, shape, identity and number of tokens,
// parameters, those of every head (index, budget); then what the parts save of themselves: SessionAudits, Sequence,
// IndexKeeper; last a 64-bit checksum of all that came before (save/chunk_sums.h).
#pragma once

#include <memory>
#include <string>

#include "runtime/save/byte_source.h"
#include "runtime/session/session.h"

namespace keyhole::runtime {

// For save and fork no step and no audit may be under way.

/// Replaces the file of that name, see replace_file(). Throws Error(io), and then leaves it as it
/// was.
void save_session(const Session& session, const std::string& path);

/// Throws Error(io | corrupt | version), and Error(invalid_argument) for an engine of another shape, and for another
/// identity than is expected.
[[nodiscard]] std::unique_ptr<Session> load_session(const std::shared_ptr<const Engine>& engine,
                                                    const std::string& path,
                                                    const ExpectedIdentity& expected = {});
/// The same of bytes that need not be a file's.
[[nodiscard]] std::unique_ptr<Session> load_session(const std::shared_ptr<const Engine>& engine,
                                                    const ByteSource& source,
                                                    const ExpectedIdentity& expected = {});

/// A session that answers as `session` does, with the same bits.
[[nodiscard]] std::unique_ptr<Session> fork_session(const Session& session);

}  // namespace keyhole::runtime

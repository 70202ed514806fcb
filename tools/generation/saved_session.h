// A decoded prompt on disk: the library's session file, and beside it the tokens that it holds.
//
// PATH is a JSON file: the token ids, the model's identity, and which of PATH.kv0 and PATH.kv1 holds K, V and
// indexes. A save writes the one that the old PATH does not name, replaces PATH, and removes the other, so that PATH
// leads to a whole session whenever the machine stops. All are for their owner alone (mode 0600): they hold what was
// said.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tools/generation/model_identity.h"
#include "tools/generation/sampler.h"
#include "tools/llama/keyhole_cache.h"

namespace keyhole::tools {

struct SavedSession {
  std::string model;  ///< its name, for messages
  ModelIdentity identity;
  std::string kv_dtype;          ///< "f16", "bf16" or "f32": the engine's
  std::vector<uint32_t> tokens;  ///< of the conversation
  /// The number of tokens in the session. The others, at most a few, were sampled last and are still to be taken.
  uint32_t taken = 0;
  /// Decoder::rope_tokens() of the content of the session; nothing in files of older versions.
  std::optional<uint64_t> rope_tokens;
  /// The position of the random numbers of sampled answers; no draws: no answer was sampled.
  SamplerState sampler;
  std::filesystem::path kv;  ///< the library's file; of read_session() alone
};

/// What the library is told of a session: the model by both fingerprints, and the tokens that were taken.
[[nodiscard]] KeyholeCache::Contents contents_of(const SavedSession& session);

/// Throws std::system_error where save_session() could not write PATH now: a folder, a device or a pipe, or a path
/// without permission. Call it before the work that is to be saved.
void check_session_path(const std::filesystem::path& path);

/// Saves. Links are followed: the session lies beside the file that PATH leads to. Throws LibraryError or
/// std::exception with the name of the file that cannot be written; then the old PATH is unchanged.
void save_session(const std::filesystem::path& path, KeyholeCache& cache,
                  const SavedSession& session);

/// Reads PATH and checks that its session file is the one that was saved with it. Throws std::runtime_error that names
/// the file and what is wrong with it.
[[nodiscard]] SavedSession read_session(const std::filesystem::path& path);

/// Throws std::runtime_error unless `session` was made with this model, its vocabulary and at most `vocab_size` tokens.
void check_session(const SavedSession& session, const std::filesystem::path& path,
                   const std::string& model, const ModelIdentity& identity, uint32_t vocab_size);

}  // namespace keyhole::tools

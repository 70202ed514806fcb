// The first part of a session file, before the tokens: the model's shape, every setting of the table, and index and
// budget of every head. The order of fields is that of runtime/files/settings.h.
#pragma once

#include <span>
#include <vector>

#include "runtime/plan/config.h"
#include "runtime/save/checksum_io.h"

namespace keyhole::runtime {

/// Writes the model's shape. Of layers of different shapes it writes the largest numbers; save_layer_shapes() writes
/// all.
void save_shape(const ModelShape& model, ChecksumWriter& out);
/// Throws Error(invalid_argument) that names the first field in which the file's model is another.
void check_shape(ChecksumReader& in, const ModelShape& model);

/// Writes every setting except `heads`.
void save_params(const SessionParams& params, ChecksumWriter& out);
/// Reads what save_params() wrote. Throws Error(corrupt) for values that no session has. The budgets file is not read
/// again: load_heads() reads what it said of the heads.
[[nodiscard]] SessionParams load_params(ChecksumReader& in, const ModelShape& model);

void save_heads(std::span<const HeadParams* const> heads, ChecksumWriter& out);
[[nodiscard]] std::vector<HeadParams> load_heads(ChecksumReader& in, size_t heads);

/// Writes the windows of all layers. check_windows() throws Error(invalid_argument) where they are not the model's.
void save_windows(const ModelShape& model, ChecksumWriter& out);
void check_windows(ChecksumReader& in, const ModelShape& model);

/// Writes the shapes of all layers, where these differ. check_layer_shapes(), called after check_shape(), throws
/// Error(invalid_argument) where they are not the model's. has_any: false for files that know of none.
void save_layer_shapes(const ModelShape& model, ChecksumWriter& out);
void check_layer_shapes(ChecksumReader& in, const ModelShape& model, bool has_any);

}  // namespace keyhole::runtime

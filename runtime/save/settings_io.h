// What a session file says before its tokens: the model's shape, every setting of the table, and
// index and budget of every head. One order of fields, that of runtime/files/settings.h.
#pragma once

#include <span>
#include <vector>

#include "runtime/plan/config.h"
#include "runtime/save/checksum_io.h"

namespace keyhole::runtime {

/// Of layers of different shapes the largest numbers of each; all of them by save_layer_shapes().
void save_shape(const ModelShape& model, ChecksumWriter& out);
/// Throws Error(invalid_argument) that names the first field in which the file's model is another.
void check_shape(ChecksumReader& in, const ModelShape& model);

/// Every setting, but not `heads`.
void save_params(const SessionParams& params, ChecksumWriter& out);
/// Throws Error(corrupt) for values that no session has. The budgets file is not read again: what
/// it said of the heads is what load_heads() reads.
[[nodiscard]] SessionParams load_params(ChecksumReader& in, const ModelShape& model);

void save_heads(std::span<const HeadParams* const> heads, ChecksumWriter& out);
[[nodiscard]] std::vector<HeadParams> load_heads(ChecksumReader& in, size_t heads);

/// Windows of all layers. check_windows() throws Error(invalid_argument) where they are not the model's.
void save_windows(const ModelShape& model, ChecksumWriter& out);
void check_windows(ChecksumReader& in, const ModelShape& model);

/// Shapes of all layers, where these differ. After check_shape(), check_layer_shapes() throws Error(invalid_argument) where they
/// are not the model's; has_any: false for files that know of none.
void save_layer_shapes(const ModelShape& model, ChecksumWriter& out);
void check_layer_shapes(ChecksumReader& in, const ModelShape& model, bool has_any);

}  // namespace keyhole::runtime

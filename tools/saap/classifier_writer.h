// The classifier file: what the engine reads to make `saap` indexes (keyhole_engine_config.classifiers).
//
// FILE. A safetensors file. For each trained head, of layer L and KV head H (d = head_dim, C partitions)
//
//     layer.L.kv.H.centroids  [C, d]       F32  a key x with its RoPE undone belongs to the partition
//     layer.L.kv.H.offsets    [C]          F32  of largest x . centroid + offset
//     layer.L.kv.H.w1         [hidden, d]  F16  p(partition | query x with its RoPE undone) =
//     layer.L.kv.H.b1         [hidden]     F32      softmax(w2 relu(w1 x + b1) + b2)
//     layer.L.kv.H.w2         [C, hidden]  F16
//     layer.L.kv.H.b2         [C]          F32
//
// and as metadata (strings) "keyhole_classifiers", the format's version, 1; q_heads, kv_heads, head_dim,
// partitions, hidden; rope_theta, rope_scaling, rope_factor, rope_low_freq_factor, rope_high_freq_factor,
// rope_original_context as in a trace; model, its name. Heads may be absent.
#pragma once

#include <filesystem>
#include <vector>

#include "tools/io/trace.h"
#include "tools/saap/train_head.h"

namespace keyhole::tools {

/// Writes the heads, which all have the same shape, of the model that `info` describes. Throws
/// std::runtime_error for numbers that are not finite or overflow F16, and where the file cannot be written.
void write_classifiers(const std::filesystem::path& path, const TraceInfo& info,
                       const std::vector<SaapHead>& heads);

}  // namespace keyhole::tools

// Names and metadata of a trace file, shared by its reader and its writer.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tools/io/trace.h"

namespace keyhole::tools {

inline constexpr const char* kTraceVersion = "1";
inline constexpr const char* kQueryPositions = "query_positions";
inline constexpr const char* kTrainingPositions = "training_positions";

/// The name of a tensor: "layer.4.kv.1.keys".
[[nodiscard]] std::string trace_tensor_name(uint32_t layer, uint32_t kv_head, const char* part);

[[nodiscard]] std::map<std::string, std::string> to_metadata(const TraceInfo& info);
/// Reads the metadata. Throws std::runtime_error that names the key, the value seen and what is needed.
[[nodiscard]] TraceInfo from_metadata(const std::map<std::string, std::string>& metadata);

/// Checks what reader and writer both demand of shape and positions. Throws std::runtime_error.
void check_trace_info(const TraceInfo& info);
void check_trace_positions(const TraceInfo& info, std::span<const uint32_t> queries,
                           std::span<const uint32_t> training);

}  // namespace keyhole::tools

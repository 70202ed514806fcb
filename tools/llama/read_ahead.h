// Brings weights from the disk into memory by several threads, before they are needed.
#pragma once

#include <cstdint>
#include <functional>

#include "tools/llama/team.h"

namespace keyhole::tools {

struct LlamaModel;

/// Called on the calling thread now and then with the bytes that are loaded, rising, of all.
using LoadProgress = std::function<void(uint64_t done, uint64_t total)>;

/// Maps every page of the model's matrices, reading those that are not in memory. Without it the first token pays for
/// them, one page fault after the other. Each byte is touched once; nothing is copied.
void read_ahead(const LlamaModel& model, Team& team, const LoadProgress& progress = {});

}  // namespace keyhole::tools

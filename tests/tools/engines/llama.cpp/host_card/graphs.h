// CUDA graphs of the card made of host memory: what is enqueued during a capture is kept, and done with each launch.
#pragma once

#include <cstdint>
#include <functional>

struct ggml_cgraph;

namespace keyhole::llama_cpp {

/// The number of the capture that is under way; 0: there is none, and what is enqueued is done at once.
[[nodiscard]] uint64_t host_capture();
/// Something was enqueued during the capture. An exception that it throws fails the launch.
void keep_for_launches(std::function<void()> work);
/// Nodes of a ggml graph, by compute(graph): of copies, as llama.cpp makes others in the place of its nodes.
void keep_for_launches(const ggml_cgraph* graph, const std::function<void(ggml_cgraph*)>& compute);

}  // namespace keyhole::llama_cpp

// Buffers on a card that hold a cache of llama.cpp.
#pragma once

#include <ggml-backend-impl.h>

#include <cstddef>
#include <optional>

#include "tools/engines/llama.cpp/cuda/card_stream.h"
#include "tools/engines/llama.cpp/nodes.h"

namespace keyhole::llama_cpp {

class CardCache;

/// Streams of Keyhole on a card.
struct CardStreams {
  CardStreams(int ordinal, ggml_backend_dev_t cuda)
      : sessions(ordinal, cuda), prompts(ordinal, cuda) {}
  CardStream sessions;
  CardStream prompts;
};

/// A buffer of `type` with addresses alone, which have memory as they are used. `streams` outlive it. NULL, with a line
/// in the log, where that fails.
[[nodiscard]] ggml_backend_buffer_t make_card_buffer(ggml_backend_buffer_type_t type, size_t size,
                                                     CardStreams& streams);

/// The cache, and the place in it, of a tensor that lies in such a buffer, or of what it is a view of.
struct CardPlace {
  CardCache* cache = nullptr;
  CacheName name;
};
[[nodiscard]] std::optional<CardPlace> card_place(const ggml_tensor* tensor);

}  // namespace keyhole::llama_cpp

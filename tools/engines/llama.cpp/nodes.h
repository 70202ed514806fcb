// What the nodes of llama.cpp's graphs say that have to do with its cache. Names and layouts are those of the version
// that `get` brings; nothing here is documented by llama.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "tools/engines/llama.cpp/session.h"
#include "tools/engines/llama.cpp/store.h"

struct ggml_tensor;

namespace keyhole::llama_cpp {

/// A tensor of the cache: keys or values of a layer, in all cells.
struct CacheName {
  int layer = 0;
  bool values = false;
};

/// The tensor of which `tensor` is a view, or itself.
[[nodiscard]] const ggml_tensor* root(const ggml_tensor* tensor);
/// Of a tensor, or of what it is a view of: its place in the cache, if its name is one of the cache's.
[[nodiscard]] std::optional<CacheName> cache_name(const ggml_tensor* tensor);
/// The dtype of K and V that Keyhole keeps as they are; none for quantised ones.
[[nodiscard]] std::optional<Number> number_of(const ggml_tensor* tensor);

/// Parameters of FLASH_ATTN_EXT, with the learned sinks that it names, which may have to be brought from a card.
[[nodiscard]] LayerShape layer_shape(const ggml_tensor* attention);
/// Whether its parameters are these; the sinks, which are weights, are not looked at.
[[nodiscard]] bool has_shape(const ggml_tensor* attention, const LayerShape& shape);
/// Why Keyhole does not take this FLASH_ATTN_EXT over the cache, whatever is in its mask and whatever its shape. "": it
/// takes it.
[[nodiscard]] std::string why_not(const ggml_tensor* attention);

/// "FLASH_ATTN_EXT 'kqv_out-3' of layer 3", for messages.
[[nodiscard]] std::string node_text(const ggml_tensor* node);

/// By how much a ROPE over a cache of `cells` cells, all streams' together, moves the position of each: `[cells]`, I32,
/// wherever it lies. Throws std::runtime_error where the node is none.
[[nodiscard]] const ggml_tensor* shifts_of(const ggml_tensor* node, size_t cells);

/// Tensors that only look at others.
[[nodiscard]] bool is_view_node(const ggml_tensor* node);

}  // namespace keyhole::llama_cpp

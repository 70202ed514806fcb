// What a store of codes on a CUDA device holds: its layers, where the arrays of each lie in its memory, which blocks
// copies of a session share, and the account that learns of the memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpu/code_family.h"
#include "gpu/codes_layout.h"
#include "gpu/cuda/codes/codes_kernels.h"
#include "gpu/cuda/codes/codes_variants.h"
#include "gpu/cuda/codes/cuda_codes.h"
#include "gpu/cuda/codes/encode.h"
#include "gpu/cuda/codes/make_lists.h"
#include "gpu/cuda/codes/row_exchange.h"
#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/kernel_generation.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/paged_memory.h"
#include "gpu/cuda/common/stream.h"

namespace keyhole::gpu {

[[noreturn]] inline void refuse_codes(const std::string& text) {
  throw Error(Status::invalid_argument, "codes on a CUDA device: " + text);
}

/// Returns the shape. Throws Error(unsupported) where no kernel is for it.
inline const CodesShape& with_kernels(const CodesShape& shape) {
  if (const std::string why = why_no_codes(shape); !why.empty()) {
    throw Error(Status::unsupported, "codes on a CUDA device: " + why);
  }
  return shape;
}

/// The shape with what the device can use.
inline CodesShape on_device(CodesShape shape, int device) {
  if (!chooses_among_lists(shape, kernel_limits(device))) shape.list_rows = 0;
  return shape;
}

/// The slot of a layer that has no memory yet.
inline constexpr uint32_t kNoSlot = ~0U;

struct CudaCodes::Impl {
  struct Layer {
    KvView rows;              ///< see Codes::set_rows()
    uint32_t count = 0;       ///< blocks, after all that was enqueued
    uint32_t slot = kNoSlot;  ///< its place among the layers that there is memory for
    CodeFamily family;        ///< copies that have first blocks in common
    bool is_used = false;     ///< something was enqueued that reads its balance
    /// Rows that were put in lists together, one stretch behind the other.
    struct Stretch {
      uint32_t begin, end;  ///< blocks
    };
    std::vector<Stretch> stretches{};
    /// Rows whose lists are being made, behind these.
    struct Making {
      uint32_t begin, end;  ///< blocks
      std::unique_ptr<Event> done;
    };
    std::vector<Making> making{};

    [[nodiscard]] uint32_t listed() const { return stretches.empty() ? 0 : stretches.back().end; }
    [[nodiscard]] uint32_t made() const { return making.empty() ? listed() : making.back().end; }
  };

  Impl(const CodesShape& wanted, int device, const RowWaits& row_waits, uint32_t resident)
      : shape(on_device(with_kernels(wanted), device)),
        layout(shape),
        ordinal(device),
        waits(row_waits),
        layers(wanted.layers) {
    const DeviceScope scope(ordinal);
    const BesideCapture beside;
    variants = CodesVariants(shape, layout, ordinal, resident);
    ahead = kernels_have_clusters(ordinal);
    memory = DeviceBuffer(layout.others_bytes);
    memory.clear();  // counts are 0
    coded = std::make_unique<PagedMemory>(layout.blocks_bytes);
    if (variants.has_lists()) {
      in_lists = DeviceBuffer(layout.list_bytes);
      in_lists.clear();  // no stretch has any
      maker = std::make_unique<OwnStream>();
      turns = std::vector<Event>(kListingsAtOnce);
    }
    if (!shape.blocks_later) coded->own(0, layout.blocks_bytes);
    if (shape.sinks != nullptr) {
      check(
          cudaMemcpy(memory.data() + layout.sinks, shape.sinks,
                     size_t{shape.layers} * shape.q_heads * sizeof(float), cudaMemcpyHostToDevice),
          "copying learned sinks to the device");
    }
    encoder = std::make_unique<EncodeLauncher>(shape.code, shape.dtype);
    if (shape.rows_by_host) {
      exchange = std::make_unique<RowExchange>(shape, memory.as<uint32_t>(layout.row_steps));
    }
    own = std::make_unique<OwnStream>();
    changed = std::make_unique<Event>();
    if (shape.coded_layers != 0) return;
    while (slots < shape.layers) layers[slots].slot = slots, ++slots;
  }
  ~Impl() {
    if (maker != nullptr) (void)cudaStreamSynchronize(maker->get());
    (void)cudaEventSynchronize(changed->get());
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  [[nodiscard]] uint32_t group() const { return shape.q_heads / shape.kv_heads; }
  [[nodiscard]] uint32_t capacity() const { return std::max(shape.blocks, 1U); }

  void check_layer(uint32_t layer) const {
    if (layer >= shape.layers) {
      refuse_codes("layer " + std::to_string(layer) + " of " + std::to_string(shape.layers));
    }
  }
  const Layer& layer_at(uint32_t layer) const {
    check_layer(layer);
    if (layers[layer].slot == kNoSlot) {
      refuse_codes("layer " + std::to_string(layer) + ", which was not named to set_rows()");
    }
    return layers[layer];
  }
  Layer& layer_at(uint32_t layer) {
    return const_cast<Layer&>(std::as_const(*this).layer_at(layer));
  }
  /// Gives the layer a slot of memory where it has none, and returns it.
  Layer& name_layer(uint32_t layer) {
    check_layer(layer);
    Layer& l = layers[layer];
    if (l.slot == kNoSlot && slots == coded_layers(shape)) {
      refuse_codes("layer " + std::to_string(layer) + " beside " + std::to_string(slots) +
                   " others, for which there is memory");
    }
    if (l.slot == kNoSlot) l.slot = slots++;
    return l;
  }
  void check_head(uint32_t kv_head) const {
    if (kv_head >= shape.kv_heads) {
      refuse_codes("KV head " + std::to_string(kv_head) + " of " + std::to_string(shape.kv_heads));
    }
  }

  [[nodiscard]] std::byte* blocks(uint32_t layer) const {
    return coded->data() + layers[layer].slot * layout.layer_stride;
  }
  [[nodiscard]] float* key_scales(uint32_t layer) const {
    return memory.as<float>(layout.key_scales) +
           size_t{layers[layer].slot} * shape.kv_heads * shape.code.dim;
  }
  [[nodiscard]] float* value_scales(uint32_t layer) const {
    return memory.as<float>(layout.value_scales) + size_t{layers[layer].slot} * shape.kv_heads;
  }
  /// The device's copy; null where rows are not int8.
  [[nodiscard]] uint16_t* row_scales(uint32_t layer) const {
    if (shape.dtype != DType::i8) return nullptr;
    return memory.as<uint16_t>(layout.row_scales) +
           size_t{layers[layer].slot} * capacity() * shape.kv_heads * 2 * shape.code.dim;
  }
  [[nodiscard]] uint32_t* device_count(uint32_t layer) const {
    return memory.as<uint32_t>(layout.counts) + 2 * layers[layer].slot;
  }
  [[nodiscard]] CodeFigures* figures(uint32_t layer) const {
    return memory.as<CodeFigures>(layout.figures) + size_t{layers[layer].slot} * shape.kv_heads;
  }
  /// The device's copy of what the layer's family shares.
  [[nodiscard]] uint32_t* device_shared(uint32_t layer) const { return device_count(layer) + 1; }

  [[nodiscard]] DoubtLayout doubt_layout() const {
    const uint32_t tokens = most_codes_tokens(shape);
    return {shape.kv_heads, size_t{group()} * tokens, shape.code.dim, tokens};
  }
  /// Bytes from the rows of a head to those of the next: kernels and copies move rows as bytes.
  [[nodiscard]] size_t head_bytes(uint32_t layer) const {
    return layers[layer].rows.keys.head_stride * dtype_size(shape.dtype);
  }
  [[nodiscard]] CodesStep step(uint32_t layer, const TensorView& q, uint32_t tokens) const {
    (void)layer_at(layer);
    // A graph that is captured while the first lists are being made finds them later: kernels ask for the number in
    // use.
    const uint64_t from =
        std::max(shape.lists_from, 1U) + uint64_t{tokens - 1} * shape.lists_from_more;
    const bool is_listed =
        tokens <= variants.most_listed() && layers[layer].made() * kCodeBlock >= from;
    CodesStep s = is_listed ? variants.listed(tokens) : variants.of(tokens);
    s.block_count = device_count(layer);
    s.family = layers[layer].family.id();
    s.family_count = device_shared(layer);
    s.blocks = blocks(layer);
    s.key_scale = key_scales(layer);
    s.value_scale = value_scales(layer);
    s.q = q;
    s.keys = layers[layer].rows.keys.data;
    s.values = layers[layer].rows.values.data;
    s.kv_head_stride = head_bytes(layer);
    s.row_scales = row_scales(layer);
    s.logits = shape.logits_of(layer);
    if (shape.sinks != nullptr) {
      s.sinks = memory.as<float>(layout.sinks) + size_t{layer} * shape.q_heads;
    }
    if (exchange != nullptr) {
      s.host_rows = exchange->params(layer, waits);
      s.keys = s.values = nullptr;  // the device does not know where they lie
    }
    if (shape.asks_doubt) {
      s.doubt = doubt_in(memory.data() + layout.doubt, doubt_layout(), figures(layer));
    }
    s.work = memory.data() + layout.work;
    if (is_listed) find_lists(layer, s.lists);
    return s;
  }
  void find_lists(uint32_t layer, CodesLists& l) const {
    std::byte* const data = list_memory(layer);
    l.listed = reinterpret_cast<const uint32_t*>(data + layout.list_counts);
    l.counts = l.listed + 1;
    l.pairs = data + layout.list_pairs;
    l.ids = reinterpret_cast<const uint32_t*>(data + layout.list_ids);
    l.places = reinterpret_cast<const ListPlace*>(data + layout.list_places);
    l.figures = reinterpret_cast<const ListFigures*>(data + layout.list_figures);
    l.key_means = reinterpret_cast<const uint16_t*>(data + layout.list_key_means);
    l.value_means = reinterpret_cast<const uint16_t*>(data + layout.list_value_means);
    l.mean_tiles = reinterpret_cast<const uint32_t*>(data + layout.list_mean_tiles);
    l.memory = step_memory(layer);
    l.arrivals = reinterpret_cast<uint32_t*>(data + layout.list_arrivals);
  }
  [[nodiscard]] std::byte* list_memory(uint32_t layer) const {
    return in_lists.data() + layers[layer].slot * layout.list_stride;
  }
  [[nodiscard]] ListMemory* step_memory(uint32_t layer) const {
    return reinterpret_cast<ListMemory*>(list_memory(layer) + layout.list_memory);
  }
  /// What KV heads have in the first `stretches` stretches of the layer.
  [[nodiscard]] ListTotals* list_totals(uint32_t layer, size_t stretches) const {
    return reinterpret_cast<ListTotals*>(list_memory(layer) + layout.list_totals) +
           stretches * shape.kv_heads;
  }
  /// Enqueues that steps find the lists of the layer's stretches, and know of no step before them.
  void count_lists(uint32_t layer, Stream stream) const {
    launch_use_lists(list_totals(layer, layers[layer].stretches.size()), shape.kv_heads,
                     layers[layer].listed(),
                     reinterpret_cast<uint32_t*>(list_memory(layer) + layout.list_counts),
                     step_memory(layer), stream_of(stream));
  }
  /// Takes the lists of rows in blocks from `first` on out of use, and of all rows that were listed with them. Waits
  /// until none of these rows is read for lists.
  void drop_lists(uint32_t layer, uint32_t first, Stream stream) {
    std::vector<Layer::Making>& making = layers[layer].making;
    if (!making.empty() && making.back().end > first) {
      const BesideCapture beside;
      maker->wait("making lists of codes");
      while (!making.empty() && making.back().end > first) making.pop_back();
    }
    std::vector<Layer::Stretch>& stretches = layers[layer].stretches;
    if (stretches.empty() || stretches.back().end <= first) return;
    while (!stretches.empty() && stretches.back().end > first) stretches.pop_back();
    count_lists(layer, stream);
  }
  /// What the device is told of KV heads [first_head, ..) of rows of the layer whose lists it makes. heads: of the
  /// layer, all.
  [[nodiscard]] MakeLists listing(uint32_t layer, uint32_t begin, uint32_t rows,
                                  uint32_t first_head) const;

  /// Enqueues how many blocks the layer has in common with its family.
  void tell_family(uint32_t layer, Stream stream) const {
    launch_set_count(device_shared(layer), layers[layer].family.shared(), stream_of(stream));
  }
  /// Takes the blocks from `first` on out of the family.
  void leave_family(uint32_t layer, uint32_t first, Stream stream) {
    if (layers[layer].family.cut(first)) tell_family(layer, stream);
  }
  /// Enqueues that nothing is known of the layer's rows: there are none.
  void forget_figures(uint32_t layer, Stream stream) const {
    check(
        cudaMemsetAsync(figures(layer), 0, shape.kv_heads * sizeof(CodeFigures), stream_of(stream)),
        "clearing figures of codes");
  }
  /// Enqueues the layer's new count, and marks the place in the stream for those that wait for it.
  void set_count(uint32_t layer, uint32_t count, Stream stream) {
    launch_set_count(device_count(layer), count, stream_of(stream));
    layers[layer].count = count;
    layers[layer].is_used = true;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    (void)cudaStreamIsCapturing(stream_of(stream), &status);
    if (status == cudaStreamCaptureStatusNone) changed->record(stream_of(stream));
  }

  CodesShape shape;
  CodesLayout layout;
  int ordinal;
  RowWaits waits;
  std::vector<Layer> layers;
  uint32_t slots = 0;  // that are taken
  CodesVariants variants;
  bool ahead = false;  // kernels start before those in front of them have ended
  /// Device memory that is taken, or is about to be: the account learns of it.
  void account_for(size_t now) {
    if (now > claimed && account.claim) account.claim(now - claimed);
    if (now < claimed && account.release) account.release(claimed - now);
    claimed = now;
  }
  [[nodiscard]] size_t bytes() const {
    return layout.others_bytes + in_lists.bytes() + coded->held_bytes();
  }
  /// Called before bytes [begin, end) of the blocks are written: exchanges memory that others share for memory of
  /// their own.
  void own_blocks(size_t begin, size_t end) {
    if (coded->owns(begin, end)) return;
    account_for(claimed + coded->missing_bytes(begin, end));
    try {
      coded->own(begin, end);
    } catch (...) {
      account_for(bytes());
      throw;
    }
    account_for(bytes());
  }

  DeviceBuffer in_lists;               // lists, where there are any
  DeviceBuffer memory;                 // but for blocks and lists,
  std::unique_ptr<PagedMemory> coded;  // which copies share
  CudaCodes::Account account;
  size_t claimed = 0;
  std::unique_ptr<EncodeLauncher> encoder;
  std::unique_ptr<RowExchange> exchange;  // null: the device reads rows itself
  std::unique_ptr<OwnStream> own;         // of balances, and of what is read back
  std::vector<Event> turns;               // of the newest calls that make lists
  size_t begun = 0;                       // such calls
  std::unique_ptr<OwnStream> maker;       // of lists that are being made; null: there are none
  std::unique_ptr<Event> changed;         // the newest change of blocks
};

}  // namespace keyhole::gpu

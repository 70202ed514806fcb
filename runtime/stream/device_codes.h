// Codes of offloaded tokens on the device (gpu/codes.h): which layers have theirs there, and keeping them as the
// sequence grows and shrinks.
//
// The codes of a layer cover all of its offloaded rows, or the layer has none: then the host attends it. Where there is
// no room for all layers, or no more memory can be pinned, these are the first layers (plan/code_plan.h). Rows come in
// whole blocks (Sequence::row_block()), are pinned where they lie when they come, and are encoded by the device, which
// reads them there, in the order of the session's stream. So a step needs nothing of the host, and a graph of steps
// stays valid while tokens come. Lists of near rows, where they are wanted, the device makes beside all that, and steps
// use those that are ready. A prompt waits for none of it: its rows are pinned beside it (PinQueue), and encoded while
// the host takes the next ones in, of whatever layer, or before the next step.
//
// Where memory cannot be pinned, or not for all layers, a thread of the host reads the rows of a step (RowServer), of
// all layers of the session, and the device copies those that it encodes (keyhole_rows_by). Nothing is pinned then.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gpu/codes.h"
#include "gpu/step.h"
#include "index/scan/balance.h"
#include "runtime/engine/log.h"
#include "runtime/plan/code_plan.h"
#include "runtime/stream/pin_queue.h"
#include "runtime/stream/row_server.h"

namespace keyhole::runtime {

/// So many rows, and more, that have come since the last are put in lists before a step, or fewer where these make a
/// layer's rows in lists as many as steps choose among (CodesShape::lists_from); while a prompt comes,
/// gpu::kListStretch.
inline constexpr size_t kRowsListed = 4096;

/// What codes are made of.
class CodeSource {
 public:
  virtual ~CodeSource() = default;
  /// All offloaded rows of all KV heads, without gaps in each; they stay where they are.
  [[nodiscard]] virtual KvView rows(uint32_t layer) const = 0;
  /// Scales of the layer's rows where these are int8, `[blocks, kv_heads, 2, head_dim]` bf16, on a page's first byte
  /// and within whole pages; they stay where they are, too. Else null.
  [[nodiscard]] virtual const uint16_t* scales(uint32_t layer) const = 0;
  /// Offloaded rows come in multiples of it.
  [[nodiscard]] virtual uint32_t row_block() const = 0;
  /// Learns the balanced space of each of the layer's heads that has none, from its rows.
  virtual void learn_balances(uint32_t layer) = 0;
  /// Of a head that has one.
  [[nodiscard]] virtual const index::Balance& balance(uint32_t layer, uint32_t kv_head) = 0;
  /// Memory of the first `rows` rows of the layer's heads is pinned, or about to be: it cannot be given back. Throws
  /// Error(out_of_memory) where it is more than before.
  virtual void set_pinned(uint32_t layer, size_t rows) = 0;
  /// Whether rows that come in the place of those from `row` on will lie on other pages: copies of the session read
  /// those that are there.
  [[nodiscard]] virtual bool is_shared(uint32_t layer, size_t row) const = 0;
};

/// From one thread at a time, and not while a step is under way; but for of_layer().
class DeviceCodes {
 public:
  using Make = std::function<std::unique_ptr<gpu::Codes>(const gpu::CodesShape&)>;
  using MakePin = std::function<std::unique_ptr<gpu::PinnedMemory>()>;
  /// Bytes of device memory that codes may take when `held` bytes of them are given back; UINT64_MAX: not known.
  using Room = std::function<uint64_t(size_t held)>;

  /// All that it is given outlives it; the params may change. Nothing is made before plan().
  DeviceCodes(const SessionParams& params, const ModelShape& model, Make make, MakePin make_pin,
              Room room, CodeSource& source, const Log& log, const RowServer::Waits& waits = {});

  /// Takes the memory for the codes of a session with these heads (`[layers, kv_heads]`), all of it, where it does not
  /// have it already. Lists make way for layers. Layers for which there is no room, or all where the device has no
  /// kernel for their shape, stay with the host, and the log says which and why; with KEYHOLE_PLACE_DEVICE it throws
  /// Error(out_of_device_memory | out_of_memory | unsupported), and Error(invalid_argument) where the heads have no
  /// codes.
  void plan(std::span<const HeadParams* const> heads);
  /// Before the first plan(): the session is to be a copy of one whose codes are `from`, which outlive copy(). Until
  /// that, memory is taken for what is not shared alone.
  void expect_copy_of(const DeviceCodes& from) { copied_ = &from; }
  /// Takes over the codes of all layers that have some there and here; rows and balances are copied already. Where
  /// memory is lacking for what is not shared, the host attends all layers, as the log says, or with
  /// KEYHOLE_PLACE_DEVICE it throws Error(out_of_device_memory).
  void copy();
  /// plan() tries again what the device had no room for.
  void retry() { tries_again_ = true; }

  /// Whether steps of a layer attend its codes.
  [[nodiscard]] bool layer_has(uint32_t layer) const { return plan_.layers[layer] != 0; }
  /// What a step of the layer attends; null: it has none.
  [[nodiscard]] gpu::Codes* of_layer(uint32_t layer) const {
    return layer_has(layer) ? codes_.get() : nullptr;
  }
  /// Whether all rows of a layer that has codes are encoded, and pinned where the device is to read them.
  [[nodiscard]] bool is_current(uint32_t layer) const;
  /// A step over the codes of a layer is about to be enqueued, or to be announced.
  void expect_step() {
    if (reader_ != nullptr) reader_->expect();
  }
  /// Begins to pin the layer's rows that have come, when they are many, or when rows of another layer come, and waits
  /// for nothing. Throws Error(out_of_memory | device_error).
  void pin_beside(uint32_t layer);
  /// Enqueues the encoding of all rows, of any layer, that are pinned by now. Throws Error(device_error), and what has
  /// kept rows from being pinned, until a layer is given up.
  void encode_pinned(gpu::Stream stream);
  /// Waits until all rows of the layer are pinned, and enqueues the encoding of those that are not encoded. Throws as
  /// both.
  void update(uint32_t layer, gpu::Stream stream);
  /// The layer is about to keep its first `rows` rows. No work on the stream is under way.
  void truncate(uint32_t layer, size_t rows, gpu::Stream stream);
  /// Memory could not be pinned: the host reads rows from now on, if it may, and all of them are encoded anew; the log
  /// says `why`. False: it may not, or does so already. No work on the stream is under way.
  [[nodiscard]] bool let_host_read(const std::string& why);
  /// The host attends the first of the layers that have codes from now on, whose memory is not pinned any more; the log
  /// says `why`. Other heads or budgets, or a copy of the session, try again. No work on the stream is under way, and
  /// some layer has codes.
  void give_up_first(const std::string& why);
  /// The host attends all layers from now on, until retry(); the log says `why`. No work on the stream is under way.
  void give_up(const std::string& why);

  /// Changes with all that a captured graph has in it.
  [[nodiscard]] uint64_t version() const { return version_; }
  /// Of device memory, now and at most so far.
  [[nodiscard]] size_t bytes() const { return codes_ == nullptr ? 0 : codes_->bytes(); }
  [[nodiscard]] size_t bytes_peak() const { return bytes_peak_; }
  /// Heads in doubt, in all steps that the device has done so far.
  [[nodiscard]] gpu::CodesDoubts doubts() const;
  /// For tests: the specs of heads that plan() has parsed so far.
  [[nodiscard]] size_t parsed_specs() const { return specs_.parsed(); }
  [[nodiscard]] size_t pinned_bytes() const {
    return exchange_bytes_ + (pins_ == nullptr ? 0 : pins_->bytes());
  }
  /// Whether the host reads the rows that steps attend exactly.
  [[nodiscard]] bool rows_by_host() const { return plan_.rows_by_host; }
  [[nodiscard]] uint32_t layers() const { return plan_.count(); }
  /// Of the rows of a layer with codes, those that are pinned from the first one on; all, where the host reads them.
  [[nodiscard]] size_t pinned_rows(uint32_t layer) const;
  /// Bytes that the codes of one row of a layer with codes take in blocks, K and V of all KV heads.
  [[nodiscard]] double code_row_bytes(uint32_t layer) const {
    const LayerShape shape = model_.of(layer);
    CodeShape code = plan_.shape;
    code.dim = shape.head_dim;
    return static_cast<double>(code.block_bytes()) / kCodeBlock * shape.kv_heads;
  }

 private:
  /// Rows of all heads of a layer that are pinned together.
  struct Piece {
    size_t begin = 0, end = 0;
    uint64_t batch = 0;  ///< of the queue
  };
  struct Layer {
    std::vector<Piece> pieces;
    bool has_balance = false;
    bool is_copy =
        false;  ///< its codes are, so that they are here before its rows are pinned; until update()
    [[nodiscard]] size_t end() const { return pieces.empty() ? 0 : pieces.back().end; }
  };

  /// Device memory of the codes that are to be copied, which the copy shares.
  [[nodiscard]] uint64_t shared_bytes() const;
  /// What is wanted, but for layers that were given up.
  [[nodiscard]] CodePlan wanted() const;
  /// The part of it that there is room for when `held` bytes are given back.
  [[nodiscard]] CodePlan fitting_room(size_t held) const;
  /// Throws Error(out_of_device_memory | out_of_memory) where there is room for fewer layers than the plan has.
  void check_room(const CodePlan& plan) const;
  [[nodiscard]] std::string too_much_to_pin(const CodePlan& plan) const;
  /// Waits until all rows of the layer are pinned, and enqueues the encoding of those that are not encoded.
  void make_current(uint32_t layer, gpu::Stream stream);
  /// Begins to put the layer's rows in lists, where these are wanted and enough have come that are not (kRowsListed):
  /// no step waits for it. What the device has no time for yet a later call begins.
  void list(uint32_t layer, bool is_before_step);
  void make(CodePlan plan);
  /// make(); where it fails there are none, which the log says, or, where they must be here, it throws.
  void try_to_make(const std::string& why_by_host = {});
  void drop();
  void tell(const std::string& why_not_all) const;
  void tell_reader(const std::string& why) const;
  /// Of the layers that have codes.
  [[nodiscard]] uint32_t most_kv_heads() const;
  /// Where the piece ends that holds the last of so many rows.
  [[nodiscard]] size_t piece_end(uint32_t layer, size_t rows) const;
  /// The memory of a piece of the layer, of all heads.
  [[nodiscard]] std::vector<PinQueue::Range> ranges(uint32_t layer, const Piece& piece) const;
  /// Hands memory of the first `rows` rows to the queue where it has not got it.
  void pin(uint32_t layer, size_t rows);
  /// Bytes of an offloaded row of a head of the layer.
  [[nodiscard]] size_t row_bytes(uint32_t layer) const {
    return model_.of(layer).row_bytes(params_->offload_dtype(model_));
  }
  /// Of the scales of a block of the layer's rows in int8.
  [[nodiscard]] size_t block_scale_bytes(uint32_t layer) const {
    const LayerShape shape = model_.of(layer);
    return size_t{2} * shape.kv_heads * shape.head_dim * sizeof(uint16_t);
  }
  /// Bytes from scales() on, in whole pages, that hold the scales of `rows` rows; 0 where there are none.
  [[nodiscard]] size_t scale_bytes(uint32_t layer, size_t rows) const;
  /// The newest batch that has rows in it; batches after it are of rows that may come.
  [[nodiscard]] uint64_t last_batch() const;
  /// Drops pieces that begin at `rows` or later.
  void drop_pieces(uint32_t layer, size_t rows);
  /// Unpins the pages that rows from `rows` on, a multiple of the block, lie on.
  void unpin_across(uint32_t layer, size_t rows);
  /// No layer is given up: what fails is tried again by the next call.
  [[nodiscard]] bool must_be_here() const {
    return params_->offload_placement == KEYHOLE_PLACE_DEVICE;
  }
  /// Enqueues the encoding of the layer's first `rows` rows, but for those that are encoded.
  void encode(uint32_t layer, size_t rows, gpu::Stream stream);
  void set_balance(uint32_t layer);

  const SessionParams* params_;
  ModelShape model_;
  Make make_;
  MakePin make_pin_;
  Room room_;
  CodeSource* source_;
  Log log_;
  CodeSpecs specs_;
  CodePlan wanted_;             ///< of the last plan(), were there room for all
  std::vector<char> given_up_;  ///< [layer] of wanted_
  bool cannot_pin_ = false;     ///< memory for wanted_
  CodePlan plan_;               ///< what has codes
  std::unique_ptr<PinQueue>
      pins_;  ///< with codes_, which read its memory until they end; null: rows_by_host()
  std::unique_ptr<gpu::Codes> codes_;  ///< null: no layer has any
  size_t lists_from_ =
      0;  ///< rows from which on steps of codes_ choose among lists, in whole blocks; 0: there are none
  std::unique_ptr<RowServer> reader_;  ///< with codes_, of rows_by_host()
  RowServer::Waits waits_;
  size_t exchange_bytes_ = 0;  ///< pinned, of codes_
  std::vector<Layer> layers_;
  uint32_t filling_ = 0;  ///< the layer that was named to pin_beside() last
  bool tries_again_ = false;
  const DeviceCodes* copied_ = nullptr;  ///< until copy()
  uint64_t version_ = 1;
  size_t bytes_peak_ = 0;
  gpu::CodesDoubts past_doubts_;  ///< of codes that were dropped
};

}  // namespace keyhole::runtime

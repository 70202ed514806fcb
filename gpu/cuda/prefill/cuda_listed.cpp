#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/session_memory.h"
#include "gpu/cuda/common/stream.h"
#include "gpu/cuda/prefill/blocked_kernels.h"
#include "gpu/cuda/prefill/new_tokens.h"
#include "gpu/cuda/prefill/prompt_lists.h"
#include "gpu/listed_layout.h"

namespace keyhole::gpu {
namespace {

static_assert(kMostListedRows == kMostPromptRows);

[[noreturn]] void refuse(const std::string& text) {
  throw Error(Status::invalid_argument, "attention of listed blocks: " + text);
}

/// Blocks that tiles of n queries see, the newest of `rows` tokens, of one query head.
uint64_t blocks_seen(uint32_t n, uint32_t rows) {
  uint64_t sum = 0;
  for (uint32_t first = 0; first < n; first += kListQueries) {
    const uint32_t end = rows - n + std::min(first + kListQueries, n);
    sum += (end + kListRows - 1) / kListRows;
  }
  return sum;
}

bool all_dense(std::span<const PromptPattern> patterns, uint32_t rows) {
  return std::all_of(patterns.begin(), patterns.end(),
                     [&](const PromptPattern& p) { return p.dense || rows <= p.dense_rows; });
}

class CudaListed final : public ListedAttention {
 public:
  CudaListed(const ResidentPlace& place, const BlockedShape& shape, size_t lot_bytes)
      : session_(place, "attention of listed blocks on a CUDA device"),
        shape_(shape),
        lot_bytes_(lot_bytes),
        layout_(shape, 0, 0, false) {
    if (const std::string why = why_no_blocked(shape); !why.empty()) {
      throw Error(Status::unsupported, "attention of listed blocks on a CUDA device: " + why);
    }
    const DeviceScope device(ordinal());
    const BesideCapture beside;
    // Rows of the next heads need few multiprocessors, but those soon.
    copies_ = std::make_unique<OwnStream>(OwnStream::Priority::high);
    for (auto* events : {filled_, used_, staged_}) {
      for (uint32_t i = 0; i < 2; ++i) events[i] = std::make_unique<Event>();
    }
    started_ = std::make_unique<Event>();
    finished_ = std::make_unique<Event>();
  }
  ~CudaListed() override {
    try {
      release();
    } catch (const Error&) {  // NOLINT: the device has failed, and the memory goes with it
    }
  }
  CudaListed(const CudaListed&) = delete;
  CudaListed& operator=(const CudaListed&) = delete;

  void attend(const ListedTurn& turn, std::span<const PromptPattern> patterns,
              Stream stream) override {
    const uint32_t rows = check_turn(turn, patterns);
    const DeviceScope device(ordinal());
    const bool has_low = turn.q.dtype != shape_.dtype;
    const ListedLayout layout(shape_, turn.n, rows, has_low, lot_bytes_);
    reserve(layout, turn.n, rows, patterns);
    layout_ = layout;
    auto* const s = stream_of(stream);
    check(cudaStreamWaitEvent(s, finished_->get()), "listed blocks");  // of another stream
    check(cudaMemsetAsync(at<uint32_t>(layout_.bad), 0, sizeof(uint32_t), s),
          "queries of listed blocks");
    started_->record(s);
    copies_->wait_for(started_->get());
    const Call call{turn, patterns, rows, has_low, all_dense(patterns, rows)};
    const bool waits_for_host = std::any_of(
        turn.before.begin(), turn.before.end(),
        [](const KvView& r) { return r.keys.memory == Memory::host && r.keys.tokens != 0; });
    fetch_scales(turn);
    fetch(call, 0);
    const uint32_t lots = shape_.kv_heads / layout_.heads;
    for (uint32_t lot = 0; lot < lots; ++lot) {
      // While the device attends, this thread copies what it has to copy.
      if (!waits_for_host && lot + 1 < lots) fetch(call, lot + 1);
      attend_lot(call, lot, s);
      if (waits_for_host && lot + 1 < lots) fetch(call, lot + 1);
    }
    finished_->record(s);
  }

  bool saw_bad_queries(Stream stream) override {
    if (memory_.bytes() == 0) return false;
    const DeviceScope device(ordinal());
    uint32_t bad = 0;
    check(cudaMemcpyAsync(&bad, at<uint32_t>(layout_.bad), sizeof bad, cudaMemcpyDeviceToHost,
                          stream_of(stream)),
          "queries of listed blocks");
    check(cudaStreamSynchronize(stream_of(stream)), "attention of listed blocks");
    return bad != 0;
  }

  PromptBlocks blocks() const override {
    PromptBlocks all = counted_;
    if (prompt_ == nullptr) return all;
    const PromptBlocks some = prompt_->blocks();
    return {all.attended + some.attended, all.seen + some.seen};
  }

  size_t bytes() const override {
    return memory_.bytes() + (prompt_ == nullptr ? 0 : prompt_->bytes());
  }

  void release() override {
    if (claimed_ == 0) return;
    const DeviceScope device(ordinal());
    const BesideCapture beside;
    finished_->wait("attention of listed blocks");
    copies_->wait("rows of listed blocks");
    drop_prompt();
    memory_ = DeviceBuffer();
    staging_ = PinnedBuffer();
    session_.release(std::exchange(claimed_, 0));
  }

 private:
  struct Call {
    const ListedTurn& turn;
    std::span<const PromptPattern> patterns;
    uint32_t rows;
    bool has_low, is_dense;
  };

  [[nodiscard]] int ordinal() const { return session_.ordinal(); }
  template <class T = std::byte>
  [[nodiscard]] T* at(size_t offset) const {
    return memory_.as<T>(offset);
  }
  /// Query heads of a lot.
  [[nodiscard]] uint32_t query_heads(uint32_t heads) const {
    return heads * (shape_.q_heads / shape_.kv_heads);
  }
  static std::span<const PromptPattern> patterns_of(std::span<const PromptPattern> all,
                                                    uint32_t first, uint32_t count) {
    return all.size() == 1 ? all : all.subspan(first, count);
  }

  /// Checks the turn. Returns the number of rows including the new ones.
  uint32_t check_turn(const ListedTurn& turn, std::span<const PromptPattern> patterns) const {
    if (turn.n == 0) refuse("0 tokens, allowed: 1 or more");
    if (patterns.size() != 1 && patterns.size() != shape_.q_heads) {
      refuse(std::to_string(patterns.size()) + " patterns of " + std::to_string(shape_.q_heads) +
             " query heads, allowed: 1, or one for each");
    }
    if (turn.before.size() > kMostListedPlaces) {
      refuse("rows in " + std::to_string(turn.before.size()) +
             " places, allowed: " + std::to_string(kMostListedPlaces));
    }
    uint64_t rows = turn.n;
    for (const KvView& r : turn.before) {
      const RowsView& k = r.keys;
      rows += k.tokens;
      const bool packed = k.dtype == DType::i8;
      const bool is_right = packed
                                ? !k.on_device() && shape_.rows_in_int8 && k.scales.data != nullptr
                                : k.dtype == shape_.dtype;
      if (is_right || k.tokens == 0) continue;
      refuse(std::string("rows in ") + dtype_name(k.dtype) + " of a shape in " +
             dtype_name(shape_.dtype) +
             (shape_.rows_in_int8 ? ", or of the host in int8 with scales" : ""));
    }
    if (rows > kMostListedRows) {
      refuse(std::to_string(rows) + " tokens, allowed: " + std::to_string(kMostListedRows));
    }
    return static_cast<uint32_t>(rows);
  }

  /// Takes all memory that the turn needs, because no part of the answers may be written if some of it is missing.
  void reserve(const ListedLayout& layout, uint32_t n, uint32_t rows,
               std::span<const PromptPattern> patterns) {
    const BesideCapture beside;
    if (layout.bytes > memory_.bytes()) {
      release();
      claim(layout.bytes);
      memory_ = DeviceBuffer(layout.bytes);
    }
    const uint32_t heads = query_heads(layout.heads);
    if (prompt_ == nullptr || prompt_heads_ != layout.heads) {
      drop_prompt();
      // Slices are as long as those of all heads together would be.
      const uint32_t lots = shape_.kv_heads / layout.heads;
      prompt_ = make_cuda_prompt(ordinal(), {heads, layout.heads, shape_.head_dim},
                                 SliceLimits{SliceLimits{}.bytes / lots});
      prompt_heads_ = layout.heads;
    }
    for (uint32_t first = 0; first < shape_.q_heads; first += heads) {
      const auto some = patterns_of(patterns, first, heads);
      claim(memory_.bytes() + prompt_->bytes_for(n, rows, shape_.dtype, some));
      prompt_->reserve(n, rows, shape_.dtype, some);
    }
  }
  /// Makes the session count at least this many bytes.
  void claim(size_t bytes) {
    if (bytes <= claimed_) return;
    session_.claim(bytes - claimed_, "attention of many tokens by lists of blocks");
    claimed_ = bytes;
  }
  void drop_prompt() {
    counted_ = blocks();
    prompt_.reset();
  }

  /// Fetches the scales of all rows in int8, one place after the other.
  void fetch_scales(const ListedTurn& turn) {
    std::byte* to = at(layout_.scales);
    for (const KvView& r : turn.before) {
      const size_t bytes = scale_bytes(r.keys);
      if (bytes == 0) continue;
      const auto* const from = reinterpret_cast<const std::byte*>(r.keys.scales.data);
      if (r.keys.memory == Memory::pinned) {
        launch_fetch(from, 0, 1, bytes, to, copies_->get());
      } else {
        copy_staged(from, bytes, layout_.piece_bytes,
                    [&](const std::byte* staged, size_t first, size_t count) {
                      copy(to + first, staged, count, cudaMemcpyHostToDevice);
                    });
      }
      to += bytes;
    }
  }
  /// Of keys and values together.
  [[nodiscard]] size_t scale_bytes(const RowsView& keys) const {
    if (keys.dtype != DType::i8) return 0;
    return (keys.tokens + kScaleRows - 1) / kScaleRows * shape_.kv_heads * 2 * shape_.head_dim *
           sizeof(uint16_t);
  }

  /// Fetches all rows of a lot of heads to the lot's place.
  void fetch(const Call& call, uint32_t lot) {
    const uint32_t number = lot % 2;
    copies_->wait_for(used_[number]->get());
    const size_t row = shape_.head_dim * dtype_size(shape_.dtype);
    for (const uint32_t which : {0U, 1U}) {
      for (uint32_t i = 0; i < layout_.heads; ++i) {
        std::byte* to = at(layout_.head_at(number, which, i));
        const std::byte* scales = at(layout_.scales);
        for (const KvView& r : call.turn.before) {
          fetch_rows(which == 0 ? r.keys : r.values, which, lot * layout_.heads + i, scales, to);
          to += r.keys.tokens * row;
          scales += scale_bytes(r.keys);
        }
      }
      const size_t before = call.rows - call.turn.n;
      const TensorView& fresh = which == 0 ? call.turn.k : call.turn.v;
      launch_gather_rows(fresh.some_heads(lot * layout_.heads, layout_.heads), shape_.dtype,
                         at(layout_.head_at(number, which, 0) + before * row),
                         layout_.head_bytes / dtype_size(shape_.dtype), copies_->get());
    }
    filled_[number]->record(copies_->get());
  }
  /// Fetches the rows of one head. scales: those of the place, on the device.
  void fetch_rows(const RowsView& r, uint32_t which, uint32_t head, const std::byte* scales,
                  std::byte* to) {
    const std::byte* const from = r.row(0, head);
    const bool packed = r.dtype == DType::i8, pinned = r.memory == Memory::pinned;
    const size_t row = shape_.head_dim * dtype_size(r.dtype);
    const size_t whole_row = shape_.head_dim * dtype_size(shape_.dtype);
    if (r.tokens == 0) return;
    if (r.on_device()) return copy(to, from, r.tokens * row, cudaMemcpyDeviceToDevice);
    if (pinned && !packed) {
      return launch_fetch(from, 0, 1, r.tokens * row, to, copies_->get());
    }
    const auto take = [&](const std::byte* source, size_t first, size_t count) {
      const size_t first_row = first / row, rows = count / row;
      std::byte* const at_row = to + first_row * whole_row;
      std::byte* const target = packed ? at(layout_.raw) : at_row;
      if (pinned) {
        launch_fetch(source, 0, 1, count, target, copies_->get());
      } else {
        copy(target, source, count, cudaMemcpyHostToDevice);
      }
      if (!packed) return;
      const size_t block = size_t{shape_.kv_heads} * 2 * shape_.head_dim;
      const auto* const of_rows = reinterpret_cast<const uint16_t*>(scales) +
                                  first_row / kScaleRows * block +
                                  size_t{head} * 2 * shape_.head_dim;
      launch_unpack_rows(target, of_rows, which, shape_.kv_heads, static_cast<uint32_t>(rows), 1,
                         shape_.head_dim, shape_.dtype, at_row, copies_->get());
    };
    const size_t piece = layout_.piece_rows * row;
    if (!pinned) return copy_staged(from, r.tokens * row, piece, take);
    for (size_t first = 0; first < r.tokens * row; first += piece) {
      take(from + first, first, std::min(piece, r.tokens * row - first));
    }
  }
  /// Pageable memory, piece by piece by way of pinned memory: take(staged, first byte, bytes) enqueues what reads it.
  template <class Take>
  void copy_staged(const std::byte* from, size_t bytes, size_t piece, const Take& take) {
    if (staging_.bytes() == 0) {
      const BesideCapture beside;
      staging_ = PinnedBuffer(2 * layout_.piece_bytes);
    }
    for (size_t first = 0; first < bytes; first += piece) {
      const uint32_t number = next_++ % 2;
      const size_t count = std::min(piece, bytes - first);
      std::byte* const staged = staging_.data() + number * layout_.piece_bytes;
      staged_[number]->wait("rows of listed blocks");
      std::memcpy(staged, from + first, count);
      take(staged, first, count);
      staged_[number]->record(copies_->get());
    }
  }
  void copy(std::byte* to, const std::byte* from, size_t bytes, cudaMemcpyKind kind) const {
    check(cudaMemcpyAsync(to, from, bytes, kind, copies_->get()), "copying rows to the device");
  }

  void attend_lot(const Call& call, uint32_t lot, cudaStream_t stream) {
    const uint32_t number = lot % 2, heads = query_heads(layout_.heads), first = lot * heads;
    const ListedTurn& turn = call.turn;
    launch_split_rows(turn.q.some_heads(first, heads), shape_.dtype, at(layout_.q),
                      call.has_low ? at(layout_.q_low) : nullptr, at<uint32_t>(layout_.bad),
                      stream);
    PromptStretch s;
    s.q = dense_tensor(at<const std::byte>(layout_.q), turn.n, heads, shape_.head_dim, shape_.dtype,
                       Memory::device);
    s.q_low = call.has_low ? at(layout_.q_low) : nullptr;
    s.k = {.data = at(layout_.head_at(number, 0, 0)),
           .token_stride = shape_.head_dim,
           .head_stride = static_cast<ptrdiff_t>(layout_.head_bytes / dtype_size(shape_.dtype)),
           .tokens = call.rows,
           .heads = layout_.heads,
           .dim = shape_.head_dim,
           .dtype = shape_.dtype,
           .memory = Memory::device};
    s.v = s.k;
    s.v.data = at(layout_.head_at(number, 1, 0));
    s.out = turn.out.some_heads(first, heads);
    s.lse = turn.lse == nullptr ? nullptr : at<float>(layout_.lse);
    s.n = turn.n;
    s.rows = call.rows;
    s.logits = turn.layer.logits;
    s.sinks = turn.layer.sinks == nullptr ? nullptr : turn.layer.sinks + first;
    check(cudaStreamWaitEvent(stream, filled_[number]->get()), "rows of listed blocks");
    const auto patterns = patterns_of(call.patterns, first, heads);
    prompt_->attend(s, patterns, stream);
    if (!call.is_dense && all_dense(patterns, call.rows)) {
      const uint64_t blocks = heads * blocks_seen(turn.n, call.rows);
      counted_ = {counted_.attended + blocks, counted_.seen + blocks};
    }
    if (turn.lse != nullptr) {
      const size_t width = heads * sizeof(float);
      check(cudaMemcpy2DAsync(turn.lse + first, shape_.q_heads * sizeof(float), s.lse, width, width,
                              turn.n, cudaMemcpyDeviceToDevice, stream),
            "sums of listed blocks");
    }
    used_[number]->record(stream);
  }

  SessionMemory session_;
  BlockedShape shape_;
  size_t lot_bytes_;
  ListedLayout layout_;  // of the last turn
  size_t claimed_ = 0;
  DeviceBuffer memory_;
  PinnedBuffer staging_;  // of rows that are not pinned
  std::unique_ptr<CudaPromptAttention> prompt_;
  uint32_t prompt_heads_ = 0;  // KV heads
  PromptBlocks counted_;       // beside those of prompt_
  uint32_t next_ = 0;          // pieces of pageable memory
  std::unique_ptr<OwnStream> copies_;
  std::unique_ptr<Event> filled_[2], used_[2], staged_[2];
  std::unique_ptr<Event> started_, finished_;
};

}  // namespace

std::unique_ptr<ListedAttention> make_cuda_listed(const ResidentPlace& place,
                                                  const BlockedShape& shape, size_t lot_bytes) {
  return std::make_unique<CudaListed>(place, shape, lot_bytes);
}

}  // namespace keyhole::gpu

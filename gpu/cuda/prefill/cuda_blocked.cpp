#include <algorithm>
#include <cstring>
#include <utility>

#include "gpu/blocked_layout.h"
#include "gpu/cuda/common/device_figures.h"
#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/kernel_generation.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/session_memory.h"
#include "gpu/cuda/common/stream.h"
#include "gpu/cuda/prefill/blocked_kernels.h"
#include "gpu/cuda/prefill/coded_turn.h"
#include "gpu/cuda/prefill/new_tokens.h"

namespace keyhole::gpu {
namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw Error(Status::invalid_argument, "blocked attention: " + text);
}

class CudaBlocked final : public BlockedAttention {
 public:
  CudaBlocked(const ResidentPlace& place, const BlockedShape& shape)
      : session_(place, "blocked attention on a CUDA device"), shape_(shape), layout_(shape, 0) {
    if (const std::string why = why_no_blocked(shape); !why.empty()) {
      throw Error(Status::unsupported, "blocked attention on a CUDA device: " + why);
    }
    const DeviceScope device(ordinal());
    const BesideCapture beside;
    has_hopper_ = hopper_kernels_run_on(ordinal());
    slowness_ = slowness_of(figures_of_device(ordinal()), has_hopper_);
    copies_ = std::make_unique<OwnStream>();
    for (Piece& p : pieces_) {
      p.filled = std::make_unique<Event>();
      p.used = std::make_unique<Event>();
    }
    finished_ = std::make_unique<Event>();
  }
  ~CudaBlocked() override {
    try {
      release();
    } catch (const Error&) {  // NOLINT: the device has failed, and the memory goes with it
    }
  }
  CudaBlocked(const CudaBlocked&) = delete;
  CudaBlocked& operator=(const CudaBlocked&) = delete;

  void begin(const TensorView& q, const BlockedLayer& layer, Stream stream) override {
    const auto n = static_cast<uint32_t>(q.tokens);
    if (n == 0 || n > kMostBlockedTokens) {
      refuse(std::to_string(n) + " tokens at once, allowed: 1.." +
             std::to_string(kMostBlockedTokens));
    }
    const DeviceScope device(ordinal());
    reserve(n);
    n_ = n;
    is_first_ = true;
    states_ = 0;
    is_coded_ = false;
    logits_ = layer.logits;
    has_low_ = q.dtype != shape_.dtype;
    has_sinks_ = layer.sinks != nullptr;
    if (has_sinks_) {
      // Pageable: it has been read when the call returns.
      check(cudaMemcpyAsync(at(layout_.sinks), layer.sinks, shape_.q_heads * sizeof(float),
                            cudaMemcpyHostToDevice, stream_of(stream)),
            "learned sinks");
    }
    check(cudaMemsetAsync(at<uint32_t>(layout_.bad), 0, sizeof(uint32_t), stream_of(stream)),
          "queries of blocked attention");
    launch_split_rows(q, shape_.dtype, at(layout_.q), at(layout_.q_low), at<uint32_t>(layout_.bad),
                      stream_of(stream));
  }

  void attend(const KvView& rows, Stream stream) override {
    if (n_ == 0) refuse("rows before begin()");
    const auto count = static_cast<uint32_t>(rows.keys.tokens);
    if (count == 0) return;
    const DType dtype = rows.keys.dtype;
    const bool on_device = rows.keys.on_device();
    if (dtype == DType::i8 ? on_device || !shape_.rows_in_int8 || rows.keys.scales.data == nullptr
                           : dtype != shape_.dtype) {
      refuse(std::string("rows in ") + dtype_name(dtype) + " of a shape in " +
             dtype_name(shape_.dtype) +
             (shape_.rows_in_int8 ? ", or of the host in int8 with scales" : ""));
    }
    const DeviceScope device(ordinal());
    if (on_device) {
      return launch(rows.keys.data, rows.values.data, rows.keys.head_stride, count, stream);
    }
    for (uint32_t first = 0; first < count; first += layout_.piece_rows) {
      attend_piece(rows.slice(first, std::min(layout_.piece_rows, count - first)), stream);
    }
  }

  void attend_new(const TensorView& k, const TensorView& v, const uint64_t* mask,
                  Stream stream) override {
    if (n_ == 0) refuse("new tokens before begin()");
    constexpr uint32_t kMostMasked = 64;
    if (mask != nullptr && n_ > kMostMasked) {
      refuse("a mask of " + std::to_string(n_) +
             " tokens, allowed: " + std::to_string(kMostMasked));
    }
    const DeviceScope device(ordinal());
    auto* const s = stream_of(stream);
    const size_t head = size_t{n_} * shape_.head_dim;
    launch_gather_rows(k, v, shape_.dtype, at(layout_.keys), at(layout_.values), head, s);
    if (mask != nullptr) {
      // Pageable: it has been read when the call returns.
      check(cudaMemcpyAsync(at(layout_.mask), mask, n_ * sizeof *mask, cudaMemcpyHostToDevice, s),
            "a mask");
    }
    BlockedParams p = params();
    p.keys = at(layout_.keys);
    p.values = at(layout_.values);
    p.head_stride = head;
    p.row_stride = shape_.head_dim;
    p.rows = n_;
    p.causal = true;
    p.mask = mask == nullptr ? nullptr : at<uint64_t>(layout_.mask);
    launch(p, s);
  }

  bool attends_codes(const CodedRows& rows) const override {
    return rows.kv_heads == shape_.kv_heads && rows.code.dim == shape_.head_dim &&
           CodedTurn::supports(rows);
  }

  bool chooses_codes(const CodedRows& rows) const override {
    return attends_codes(rows) && CodedTurn::chooses(rows, shape_.q_heads / shape_.kv_heads);
  }

  DeviceSlowness slowness() const override { return slowness_; }

  CodedAttention attend_codes(const CodedRows& rows, Stream stream,
                              const std::function<void()>& meanwhile) override {
    if (is_first_ || is_coded_) refuse("codes before other rows, or twice");
    if (!attends_codes(rows)) refuse("codes of another shape");
    const DeviceScope device(ordinal());
    merge_states(stream_of(stream));
    if (coded_ == nullptr) coded_ = std::make_unique<CodedTurn>(session_, has_hopper_);
    is_coded_ = true;  // for finish() in `meanwhile`
    CodedAttention end{.refused = true};
    try {
      end = coded_->attend(rows, params(), shape_.dtype,
                           has_sinks_ ? at<float>(layout_.sinks) : nullptr, stream_of(stream),
                           meanwhile);
    } catch (...) {
      is_coded_ = false;
      throw;
    }
    is_coded_ = !end.refused;
    return end;
  }

  void finish(const TensorOut& out, float* lse, Stream stream) override {
    if (is_first_) refuse("an end without rows");
    const DeviceScope device(ordinal());
    merge_states(stream_of(stream));
    launch_finish_blocked(is_coded_ ? coded_->o() : at<float>(layout_.o),
                          is_coded_ ? coded_->sums() : at<float2>(layout_.sums), n_, shape_.q_heads,
                          shape_.head_dim, unit(), has_sinks_ ? at<float>(layout_.sinks) : nullptr,
                          out, lse, stream_of(stream));
    finished_->record(stream_of(stream));
  }

  bool saw_bad_queries(Stream stream) override {
    const DeviceScope device(ordinal());
    uint32_t bad = 0;
    check(cudaMemcpyAsync(&bad, at<uint32_t>(layout_.bad), sizeof bad, cudaMemcpyDeviceToHost,
                          stream_of(stream)),
          "queries of blocked attention");
    check(cudaStreamSynchronize(stream_of(stream)), "blocked attention");
    return bad != 0;
  }

  size_t bytes() const override {
    return memory_.bytes() + (coded_ == nullptr ? 0 : coded_->bytes());
  }

  void release() override {
    if (memory_.bytes() == 0) return;
    const DeviceScope device(ordinal());
    const BesideCapture beside;
    finished_->wait("blocked attention");
    copies_->wait("rows of blocked attention");
    if (coded_ != nullptr) coded_->give_back();
    const size_t bytes = memory_.bytes();
    memory_ = DeviceBuffer();
    staging_ = PinnedBuffer();
    session_.release(bytes);
    capacity_ = n_ = 0;
  }

 private:
  struct Piece {
    std::unique_ptr<Event> filled, used;
  };

  [[nodiscard]] int ordinal() const { return session_.ordinal(); }
  template <class T = std::byte>
  [[nodiscard]] T* at(size_t offset) const {
    return memory_.as<T>(offset);
  }

  void reserve(uint32_t n) {
    if (n <= capacity_) return;
    release();
    const BlockedLayout layout(shape_, n);
    const BesideCapture beside;
    session_.claim(layout.bytes, "attention of many tokens");
    try {
      memory_ = DeviceBuffer(layout.bytes);
    } catch (...) {
      session_.release(layout.bytes);
      throw;
    }
    layout_ = layout;
    capacity_ = n;
  }

  [[nodiscard]] BlockedParams params() const {
    BlockedParams p;
    p.q = at(layout_.q);
    p.q_low = has_low_ ? at(layout_.q_low) : nullptr;
    p.q_token_stride = size_t{shape_.q_heads} * shape_.head_dim;
    p.q_head_stride = shape_.head_dim;
    p.n = n_;
    p.q_heads = shape_.q_heads;
    p.kv_heads = shape_.kv_heads;
    p.logits = logits_;
    p.o = at<float>(layout_.o);
    p.sums = at<float2>(layout_.sums);
    p.is_first = is_first_;
    return p;
  }
  void launch(const BlockedParams& p, cudaStream_t stream) {
    if (n_ <= kFewBlockedTokens) return launch_parts(p, stream);
    // Fewer queries leave most multiprocessors without a thread block of 128.
    constexpr uint32_t kLeastQueries = 192;
    const bool hopper =
        has_hopper_ && n_ >= kLeastQueries && p.mask == nullptr && p.q_low == nullptr;
    launch_blocked(p, shape_.dtype, shape_.head_dim, hopper, stream);
    is_first_ = false;
  }
  /// Has thread blocks share the rows, and keeps their states until merge_states().
  void launch_parts(BlockedParams p, cudaStream_t stream) {
    constexpr uint32_t kRows = 64, kMostParts = 8;
    if (states_ == kBlockedStates) merge_states(stream);
    p.parts = std::clamp((p.rows + kRows - 1) / kRows, 1U,
                         std::min(kMostParts, kBlockedStates - states_));
    const size_t at = size_t{states_} * n_ * shape_.q_heads;
    p.o += at * shape_.head_dim;
    p.sums += at;
    p.is_first = true;
    launch_blocked(p, shape_.dtype, shape_.head_dim, false, stream);
    states_ += p.parts;
    is_first_ = false;
  }
  void merge_states(cudaStream_t stream) {
    if (states_ > 1) {
      launch_merge_states(at<float>(layout_.o), at<float2>(layout_.sums), states_, n_,
                          shape_.q_heads, shape_.head_dim, unit(), stream);
    }
    states_ = std::min(states_, 1U);
  }
  /// What makes a logit of BlockedParams::sums' largest one.
  [[nodiscard]] float unit() const { return logits_.softcap > 0.0F ? 1.0F : logits_.scale; }

  /// head_stride: elements.
  void launch(const std::byte* keys, const std::byte* values, size_t head_stride, uint32_t rows,
              Stream stream) {
    BlockedParams p = params();
    p.keys = keys;
    p.values = values;
    p.head_stride = head_stride;
    p.row_stride = shape_.head_dim;
    p.rows = rows;
    launch(p, stream_of(stream));
  }

  /// Rows of the host's by way of a buffer.
  void attend_piece(const KvView& rows, Stream stream) {
    const uint32_t number = next_++ % 2;
    const Piece& piece = pieces_[number];
    const RowsView &k = rows.keys, &v = rows.values;
    const auto n = static_cast<uint32_t>(k.tokens);
    const bool packed = k.dtype == DType::i8;
    const size_t head = n * k.row_bytes(), plane = head * shape_.kv_heads;
    std::byte* const keys = at(layout_.pieces + number * layout_.piece_bytes);
    std::byte* const scales = at(layout_.scales + number * layout_.scale_bytes);
    const size_t block = size_t{2} * shape_.kv_heads * shape_.head_dim;
    const size_t scale_bytes =
        packed ? (n + kScaleRows - 1) / kScaleRows * block * sizeof(uint16_t) : 0;
    // Pieces are whole blocks of scales, and the scales of V lie between those of K.
    const auto* const first_scales = reinterpret_cast<const std::byte*>(k.scales.data);
    copies_->wait_for(piece.used->get());
    if (k.memory == Memory::pinned) {
      const size_t apart = k.head_stride * dtype_size(k.dtype);
      launch_fetch(k.data, apart, shape_.kv_heads, head, keys, copies_->get());
      launch_fetch(v.data, apart, shape_.kv_heads, head, keys + plane, copies_->get());
      if (packed) launch_fetch(first_scales, 0, 1, scale_bytes, scales, copies_->get());
    } else {
      // Such memory could be copied as pageable memory is, but a copy must not pass from pinned memory to memory that
      // is not.
      if (staging_.bytes() == 0) {
        const BesideCapture beside;
        staging_ = PinnedBuffer(2 * (layout_.piece_bytes + layout_.scale_bytes));
      }
      piece.filled->wait("rows of blocked attention");
      std::byte* const staged =
          staging_.data() + number * (layout_.piece_bytes + layout_.scale_bytes);
      for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
        std::memcpy(staged + h * head, k.row(0, h), head);
        std::memcpy(staged + plane + h * head, v.row(0, h), head);
      }
      if (packed) std::memcpy(staged + layout_.piece_bytes, first_scales, scale_bytes);
      copy(keys, staged, 2 * plane);
      if (packed) copy(scales, staged + layout_.piece_bytes, scale_bytes);
    }
    piece.filled->record(copies_->get());
    auto* const s = stream_of(stream);
    check(cudaStreamWaitEvent(s, piece.filled->get()), "rows of blocked attention");
    if (packed) {
      const auto* const read = reinterpret_cast<const uint16_t*>(scales);
      const size_t unpacked = size_t{n} * shape_.head_dim;
      std::byte* const to = at(layout_.unpacked);
      std::byte* const to_values = to + unpacked * shape_.kv_heads * dtype_size(shape_.dtype);
      launch_unpack_rows(keys, read, 0, shape_.kv_heads, n, shape_.kv_heads, shape_.head_dim,
                         shape_.dtype, to, s);
      launch_unpack_rows(keys + plane, read, 1, shape_.kv_heads, n, shape_.kv_heads,
                         shape_.head_dim, shape_.dtype, to_values, s);
      launch(to, to_values, unpacked, n, stream);
    } else {
      launch(keys, keys + plane, size_t{n} * shape_.head_dim, n, stream);
    }
    piece.used->record(s);
  }
  void copy(std::byte* to, const std::byte* from, size_t bytes) const {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, copies_->get()),
          "copying rows to the device");
  }

  SessionMemory session_;
  BlockedShape shape_;
  BlockedLayout layout_;
  uint32_t capacity_ = 0;  // tokens
  uint32_t n_ = 0;
  bool is_first_ = true;
  uint32_t states_ = 0;               // side by side, of few tokens
  bool is_coded_ = false;             // the state is that of coded_
  std::unique_ptr<CodedTurn> coded_;  // null: no codes so far
  LogitParams logits_;
  bool has_sinks_ = false;
  bool has_low_ = false;     // queries that the dtype rounds
  bool has_hopper_ = false;  // the device's own kernels
  DeviceSlowness slowness_;
  uint32_t next_ = 0;  // pieces
  DeviceBuffer memory_;
  PinnedBuffer staging_;  // of rows that are not pinned
  std::unique_ptr<OwnStream> copies_;
  Piece pieces_[2];
  std::unique_ptr<Event> finished_;
};

}  // namespace

std::unique_ptr<BlockedAttention> make_cuda_blocked(const ResidentPlace& place,
                                                    const BlockedShape& shape) {
  return std::make_unique<CudaBlocked>(place, shape);
}

}  // namespace keyhole::gpu

// Rows between pageable host memory and the device, through pieces of pinned memory in turn: while the device copies
// one piece, the thread fills or empties the next.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/tensor_view.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/stream.h"

namespace keyhole::gpu {

/// Bytes of a piece: 75 us at 55 GB/s over PCIe 5, much more than the call that starts a copy takes.
inline constexpr size_t kPieceBytes = size_t{4} << 20U;

class Staging {
 public:
  explicit Staging(size_t pieces) : pieces_(pieces) {}

  /// Enqueues the copy of rows of one head in host memory to `to`, where they are packed. The host memory may change
  /// when it returns.
  void send(const TensorView& rows, std::byte* to, cudaStream_t stream) {
    const size_t row_bytes = rows.row_bytes();
    const size_t most = std::max<size_t>(kPieceBytes / row_bytes, 1);
    for (size_t first = 0; first < rows.tokens; first += most) {
      const size_t n = std::min(most, rows.tokens - first);
      Piece& piece = next(n * row_bytes);
      if (rows.token_stride == ptrdiff_t{rows.dim}) {
        std::memcpy(piece.memory.data(), rows.row(first), n * row_bytes);
      } else {
        for (size_t i = 0; i < n; ++i) {
          std::memcpy(piece.memory.data() + i * row_bytes, rows.row(first + i), row_bytes);
        }
      }
      check(cudaMemcpyAsync(to + first * row_bytes, piece.memory.data(), n * row_bytes,
                            cudaMemcpyHostToDevice, stream),
            "copying to the device");
      piece.used.record(stream);
    }
  }

  /// Enqueues a copy to the host; `to` has it after receive_all(), or once its piece of memory is needed again.
  void receive(const void* from, size_t bytes, void* to, cudaStream_t stream) {
    const auto* source = static_cast<const std::byte*>(from);
    auto* target = static_cast<std::byte*>(to);
    for (size_t first = 0; first < bytes; first += kPieceBytes) {
      const size_t n = std::min(kPieceBytes, bytes - first);
      Piece& piece = next(n);
      check(cudaMemcpyAsync(piece.memory.data(), source + first, n, cudaMemcpyDeviceToHost, stream),
            "copying from the device");
      piece.used.record(stream);
      piece.target = target + first;
      piece.bytes = n;
    }
  }
  void receive_all() {
    for (Piece& piece : pieces_) finish(piece);
  }
  /// After an error: forgets the copies that have not arrived, as their targets may be gone.
  void drop() {
    for (Piece& piece : pieces_) piece.target = nullptr;
  }

 private:
  struct Piece {
    PinnedBuffer memory;
    Event used;
    std::byte* target = nullptr;
    size_t bytes = 0;
  };
  static void finish(Piece& piece) {
    piece.used.wait();
    if (piece.target != nullptr) std::memcpy(piece.target, piece.memory.data(), piece.bytes);
    piece.target = nullptr;
  }
  Piece& next(size_t bytes) {
    Piece& piece = pieces_[turn_++ % pieces_.size()];
    finish(piece);
    bytes = std::max(bytes, kPieceBytes);
    if (piece.memory.bytes() < bytes) {
      piece.memory = PinnedBuffer();  // the old one first: both may be too much to lock
      piece.memory = PinnedBuffer(bytes);
    }
    return piece;
  }

  std::vector<Piece> pieces_;
  size_t turn_ = 0;
};

}  // namespace keyhole::gpu

// Rows between pageable host memory and the device, through pieces of pinned memory in turn: while the device copies
// one, the thread fills or empties the next.
#pragma once

#include <cstring>
#include <vector>

#include "gpu/cuda/scratch.h"

namespace keyhole::gpu {

inline constexpr size_t kPieceBytes = size_t{4} << 20U;

class Staging {
 public:
  explicit Staging(size_t pieces) : pieces_(pieces) {}

  /// Enqueues the copy of `rows` rows of `row_bytes`, `stride` apart in host memory, to `to`, where they are packed.
  /// The host memory may change when it returns.
  void send(const std::byte* from, size_t stride, size_t rows, size_t row_bytes, std::byte* to,
            cudaStream_t stream) {
    const size_t most = std::max<size_t>(kPieceBytes / row_bytes, 1);
    for (size_t first = 0; first < rows; first += most) {
      const size_t n = std::min(most, rows - first);
      Piece& piece = next(n * row_bytes);
      if (stride == row_bytes) {
        std::memcpy(piece.data, from + first * stride, n * row_bytes);
      } else {
        for (size_t i = 0; i < n; ++i) {
          std::memcpy(piece.data + i * row_bytes, from + (first + i) * stride, row_bytes);
        }
      }
      check_cuda(cudaMemcpyAsync(to + first * row_bytes, piece.data, n * row_bytes,
                                 cudaMemcpyHostToDevice, stream),
                 "copying to the device");
      piece.used.record(stream);
    }
  }

  /// Enqueues a copy to the host; it arrives in receive_all(), or when its piece is needed again.
  void receive(const void* from, size_t bytes, void* to, cudaStream_t stream) {
    const auto* source = static_cast<const std::byte*>(from);
    auto* target = static_cast<std::byte*>(to);
    for (size_t first = 0; first < bytes; first += kPieceBytes) {
      const size_t n = std::min(kPieceBytes, bytes - first);
      Piece& piece = next(n);
      check_cuda(cudaMemcpyAsync(piece.data, source + first, n, cudaMemcpyDeviceToHost, stream),
                 "copying from the device");
      piece.used.record(stream);
      piece.target = target + first;
      piece.bytes = n;
    }
  }
  void receive_all() {
    for (Piece& piece : pieces_) land(piece);
  }
  /// After an error: what has not arrived never will.
  void drop() {
    for (Piece& piece : pieces_) piece.target = nullptr;
  }

 private:
  struct Piece {
    Scratch memory{true};
    std::byte* data = nullptr;
    OwnEvent used;
    std::byte* target = nullptr;
    size_t bytes = 0;
  };
  static void land(Piece& piece) {
    piece.used.wait();
    if (piece.target != nullptr) std::memcpy(piece.target, piece.data, piece.bytes);
    piece.target = nullptr;
  }
  Piece& next(size_t bytes) {
    Piece& piece = pieces_[turn_++ % pieces_.size()];
    land(piece);
    piece.data = piece.memory.reserve(std::max(bytes, kPieceBytes));
    return piece;
  }

  std::vector<Piece> pieces_;
  size_t turn_ = 0;
};

}  // namespace keyhole::gpu

#include "tools/llama/read_ahead.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "tools/llama/weights.h"

namespace keyhole::tools {
namespace {

struct Piece {
  const std::byte* data;
  size_t bytes;
};

/// Large enough that a disk reads at its full rate, small enough that the threads end together.
constexpr size_t kPieceBytes = size_t{16} << 20;

void add_pieces(const Matrix& matrix, std::vector<Piece>& pieces) {
  for (const MatrixPart& part : matrix.parts) {
    const size_t bytes = part.rows * matrix.cols * element_size(part.type);
    for (size_t at = 0; at < bytes; at += kPieceBytes) {
      pieces.push_back({part.data + at, std::min(kPieceBytes, bytes - at)});
    }
  }
}

void bring(const Piece& piece, size_t page) {
  const auto address = reinterpret_cast<uintptr_t>(piece.data);
  void* const start = const_cast<std::byte*>(piece.data) - address % page;
  const size_t bytes = piece.bytes + address % page;
  // The whole piece is asked for at once; without that, a fault reads 128 KiB and waits.
  (void)madvise(start, bytes, MADV_WILLNEED);
#ifdef MADV_POPULATE_READ
  if (madvise(start, bytes, MADV_POPULATE_READ) == 0) return;
#endif
  // Kernels before 5.14: a fault for every page. The sum is used, so that the loads cannot be left out.
  unsigned sum = 0;
  for (size_t at = 0; at < piece.bytes; at += page) {
    sum += std::to_integer<unsigned>(*static_cast<const volatile std::byte*>(piece.data + at));
  }
  (void)sum;
}

}  // namespace

void read_ahead(const LlamaModel& model, Team& team, const LoadProgress& progress) {
  std::vector<Piece> pieces;
  model.for_each_matrix([&](const Matrix& matrix) { add_pieces(matrix, pieces); });
  uint64_t total = 0;
  for (const Piece& piece : pieces) total += piece.bytes;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::atomic<uint64_t> done{0};
  team.for_each(pieces.size(), [&](size_t item, unsigned member) {
    bring(pieces[item], page);
    done.fetch_add(pieces[item].bytes, std::memory_order_relaxed);
    if (member == 0 && progress) progress(done.load(std::memory_order_relaxed), total);
  });
  if (progress) progress(total, total);
}

}  // namespace keyhole::tools

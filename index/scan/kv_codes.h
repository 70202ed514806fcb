// Codes of the keys and values of one KV head: 1 to 4 bits per element, in blocks of 256 consecutive rows that depend
// on nothing but their own rows and the head's balance (cpu/code_layout.h says where every bit lies). Every row can
// be attended by its code; the few that weigh most are then read exactly (the research behind it: RaBitQ's unbiased
// estimate, RetroInfer's tail). This is the reference, in scalar code and double sums. index/scan/code_scan.h attends
// the same codes at the speed of memory, gpu/cuda/codes on the device; index/types/codes.h is their index type.
//
//     logit by code   l = scale * <q', f level + key mean>,  q' = rotated (q / s)
//     weight          e^(l - min(t/2, 1)),  t = scale^2 |q'|^2 f^2 noise
//     value by code   value_scale * rotated back (g level + value mean)
//
// The estimate of a logit is unbiased with variance t, so e^l alone would be too large by e^(t/2) on average (3.1
// times with 1 bit at a spread of 2 nats, 1.3 times with 2 bits). Beyond t = 2 that correction makes no sense
// (kMostNoiseBias of cpu/code_layout.h). With a soft-cap, t is the variance of the capped logit to first order.
#pragma once

#include <span>
#include <vector>

#include "cpu/aligned.h"
#include "cpu/code_layout.h"
#include "cpu/kernels.h"
#include "cpu/shared.h"
#include "index/scan/balance.h"
#include "index/scan/code_rows.h"

namespace keyhole::index {

/// A group's queries in the space of the codes.
struct CodeQueries {
  uint32_t group = 0;
  std::vector<float> rows;  ///< `[group, dim]` of rotate_queries()
};

/// Encodes rows [first, first + kCodeBlock) of kv into `out` (CodeShape::block_bytes()). Without values (count 0,
/// value_bits 0) their mean is 0. All arithmetic is fp32 in a fixed order, each operation rounded by itself, so that
/// every implementation gives the same bits.
void encode_block(const CodeShape& shape, const Balance& balance, const cpu::Kernels& kernels,
                  const KvView& kv, size_t first, std::byte* out);

/// The codes of one KV head. Copies share the blocks, which lie in pieces: the last piece grows in place where no
/// other copy has it. A copy that appends to a piece that others have begins a further one; a copy that is cut only
/// forgets the end of the piece.
class KvCodes {
 public:
  KvCodes(const CodeShape& shape, Balance balance) : shape_(shape), balance_(std::move(balance)) {}
  /// Takes over whole blocks that exist already.
  KvCodes(const CodeShape& shape, Balance balance, const std::vector<std::byte>& blocks)
      : shape_(shape), balance_(std::move(balance)) {
    append(blocks);
  }

  /// Encodes the complete blocks of rows [count(), kv.keys.tokens).
  void extend(const cpu::Kernels& kernels, const KvView& kv);
  /// Takes in whole blocks that encode_block() has made from the rows from count() on. On an exception (no memory)
  /// nothing has changed.
  void append(const std::vector<std::byte>& blocks);
  /// Forgets blocks that hold a row >= rows.
  void truncate(size_t rows) noexcept;

  [[nodiscard]] size_t count() const { return blocks() * kCodeBlock; }  ///< rows in codes
  [[nodiscard]] size_t blocks() const { return pieces_.empty() ? 0 : pieces_.back().end; }
  /// Block i. The blocks of one piece lie one after the other; without copies there is only one piece.
  [[nodiscard]] const std::byte* block(size_t i) const {
    size_t p = pieces_.size() - 1;
    while (i < pieces_[p].begin) --p;
    return pieces_[p].data->data() + (i - pieces_[p].begin) * shape_.block_bytes();
  }
  [[nodiscard]] CodeRun run(size_t block) const;
  /// The number n of blocks [0, n) that are the same memory in both objects: what copies have had in common since
  /// they were made.
  [[nodiscard]] size_t common_blocks(const KvCodes& other) const;
  [[nodiscard]] size_t bytes() const;
  /// The part of bytes() that a copy counts, see cpu/shared.h.
  [[nodiscard]] size_t bytes_of_others() const;
  [[nodiscard]] const CodeShape& shape() const { return shape_; }
  [[nodiscard]] const Balance& balance() const { return balance_; }

  [[nodiscard]] CodeQueries queries(const float* q, uint32_t group) const;

  /// Writes inner products by code of rows [0, count()): scores[h * stride + i], an estimate of q_h . k_i.
  void score(const CodeQueries& queries, float* scores, size_t stride) const;

  /// Writes the state by codes of rows [0, count()) except `skipped` (rising): o `[group, dim]`, lse `[group]`.
  void attend(const CodeQueries& queries, const LogitParams& logits,
              std::span<const uint32_t> skipped, StateView out) const;

 private:
  using Data = cpu::LineVector<std::byte>;
  /// A piece holds blocks [begin, end). Its data may go on beyond them with blocks of other copies.
  struct Piece {
    cpu::Shared<Data> data;  ///< `[blocks, block_bytes]`
    size_t begin = 0, end = 0;
  };
  /// The most pieces of an object: copies of copies, each grown a little, would have more and more, so beyond this
  /// they become one.
  static constexpr size_t kMostPieces = 16;

  CodeShape shape_;
  Balance balance_;
  std::vector<Piece> pieces_;  ///< none is empty
};

}  // namespace keyhole::index

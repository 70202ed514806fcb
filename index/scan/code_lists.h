// Codes of the keys and values of one KV head (encoded as in index/scan/kv_codes.h) in lists of some 64 rows that are
// near each other in the head's balanced space. A list's mean key tells how much its rows weigh for a query; where
// that is little its mean value stands for them, and only the lists that weigh are read by their codes
// (index/scan/list_choice.h). Codes about the means of near rows are also finer: at 2 bits and 128k their error is
// half that of blocks of consecutive rows.
//
// Rows are clustered (k-means, as partitions of `ivf` are) in segments of the text, each a chunk that never changes,
// so that copies share chunks. Appended rows become chunks of their own, which are joined to larger ones as they fill
// a power of 2, so that a row is clustered some five times. When a truncation cuts a chunk, its remaining rows have
// no codes until more are appended.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "cpu/aligned.h"
#include "cpu/shared.h"
#include "index/base.h"
#include "index/scan/code_rows.h"
#include "index/serial.h"

namespace keyhole::index {

/// The most rows of a chunk.
inline constexpr size_t kListSegment = 16384;

/// Rows [begin, begin + rows) in lists.
struct CodeChunk {
  size_t begin = 0, rows = 0;
  std::vector<uint32_t> ids;            ///< `[rows]` the rows of the first list, of the second...
  std::vector<uint32_t> ends;           ///< `[lists]` where each list ends in ids; none is empty
  std::vector<size_t> at;               ///< `[lists]` where its codes begin in `codes`
  std::vector<float> sizes, log_sizes;  ///< `[lists]` rows, ln of them
  std::vector<float> spreads, noises;   ///< `[lists]` CodeRunFigures
  std::vector<float>
      widest;  ///< `[lists]` |k - mean|^2 / dim of the longest row, by its code; not saved
  bool has_unknown = false;  ///< whether the noise of a list is kUnknownNoise; not saved
  /// Memory of the chunk, shared by chunks that are made together and lie one after the other in it.
  std::shared_ptr<cpu::LineVector<std::byte>> memory;
  std::byte* means = nullptr;  ///< `[2 (key, value), lists, dim]` fp16
  std::byte* codes = nullptr;  ///< keys, values and factors of each list
  size_t means_bytes = 0, codes_bytes = 0;

  [[nodiscard]] size_t lists() const { return ends.size(); }
  [[nodiscard]] size_t bytes() const;
  void save(Writer& out) const;
  /// Reads a saved chunk. Throws Error(corrupt) for what save() cannot have written.
  static CodeChunk load(Reader& in, const CodeShape& shape, size_t begin, size_t end);
};

/// Parameters of the clustering into lists.
struct ListConfig {
  uint32_t rows = 64;  ///< average rows of a list
  uint32_t iterations = 8;
};

/// Moves chunks into one piece of memory.
void join_memory(std::span<CodeChunk> chunks);

/// Makes a chunk of rows [begin, begin + rows) of kv. Advances the meter by list_work().
[[nodiscard]] CodeChunk make_chunk(const Context& context, const CodeShape& shape,
                                   const Balance& balance, const KvView& kv, size_t begin,
                                   size_t rows, const ListConfig& config, ProgressMeter& meter);
[[nodiscard]] double list_work(size_t rows, const ListConfig& config);

class CodeLists {
 public:
  using Chunk = cpu::Shared<CodeChunk>;

  CodeLists(const CodeShape& shape, Balance balance)
      : shape_(shape), balance_(std::move(balance)) {}

  [[nodiscard]] const CodeShape& shape() const { return shape_; }
  [[nodiscard]] const Balance& balance() const { return balance_; }
  [[nodiscard]] size_t count() const { return chunks_.empty() ? 0 : end_of(chunks_.size() - 1); }
  [[nodiscard]] size_t lists() const { return first_.back(); }

  [[nodiscard]] size_t chunks() const { return chunks_.size(); }
  [[nodiscard]] const CodeChunk& chunk(size_t i) const { return *chunks_[i]; }
  /// The number of the chunk's first list.
  [[nodiscard]] size_t first_list(size_t chunk) const { return first_[chunk]; }
  [[nodiscard]] const std::byte* key_means(size_t chunk) const { return chunks_[chunk]->means; }
  [[nodiscard]] const std::byte* value_means(size_t chunk) const {
    return chunks_[chunk]->means + chunks_[chunk]->lists() * shape_.dim * 2;
  }

  [[nodiscard]] CodeRun run(size_t list) const;
  [[nodiscard]] std::span<const uint32_t> ids(size_t list) const;
  /// The row in place `place`, where place = list * kCodeBlock + the row's number in the list.
  [[nodiscard]] uint32_t id_of(size_t place) const {
    return ids(place / kCodeBlock)[place % kCodeBlock];
  }
  [[nodiscard]] size_t list_bytes(size_t list) const {
    return run(list).tiles() * tile_bytes(shape_);
  }
  [[nodiscard]] static size_t tile_bytes(const CodeShape& shape) {
    return size_t{kCodeLanes} * 4 * (shape.key_words() + shape.value_words()) + kCodeTile * 4;
  }

  /// Where the chunks for rows [count(), rows) begin, rising; the first begins at the first row that is clustered
  /// again. Whole segments are one chunk each, the rest is one. `rows` is a multiple of kCodeBlock above count().
  [[nodiscard]] std::vector<size_t> cuts(size_t rows) const;
  /// Takes in chunks that begin at cuts(), in their order. They replace all chunks from their first row on.
  void append(std::vector<Chunk> chunks);
  /// Forgets chunks that hold a row >= rows.
  void truncate(size_t rows);

  /// The number n of rows [0, n) whose chunks are the same memory in both objects: what copies have had in common
  /// since they were made.
  [[nodiscard]] size_t common_rows(const CodeLists& other) const;

  [[nodiscard]] size_t bytes() const;
  /// The part of bytes() that a copy counts, see cpu/shared.h.
  [[nodiscard]] size_t bytes_of_others() const;

 private:
  [[nodiscard]] size_t end_of(size_t chunk) const {
    return chunks_[chunk]->begin + chunks_[chunk]->rows;
  }
  [[nodiscard]] size_t chunk_of(size_t list) const;
  void count_lists();

  CodeShape shape_;
  Balance balance_;
  std::vector<Chunk> chunks_;
  std::vector<size_t> first_{0};  // `[chunks + 1]`
};

}  // namespace keyhole::index

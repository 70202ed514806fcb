// The tree of partitions behind a tail: what the keys that a step does not read weigh together.
//
// Two levels. Coarse partitions of 128 keys or so (k-means in segments of 8192 tokens) are divided into fine ones of
// a few keys each. A step looks at all coarse means, at the fine means of those coarse partitions that matter, and at
// keys only where a mean will not do. A partition holds its number of keys, their mean (int8 codes), the mean of
// their values, and how far the keys spread.
//
// Keys are clustered, and their spread taken, in the balanced space of the head (scan/balance.h): a few wide channels
// would otherwise decide what is near, and be multiplied by all of |q|^2 where the queries are narrow. With six
// channels times 16 the error of second-order tails rose from 0.019 to 0.214.
//
// Segments never change once they are clustered: rows that are appended become a segment of their own, and
// truncation computes the partitions of the segment that it cuts anew from the rows that remain. Means are
// those of the rows held, exactly, at all times.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "index/index.h"
#include "index/scan/key_codes.h"
#include "index/serial.h"

namespace keyhole::index {

struct TailParams {
  uint32_t keys_per_partition = 16;  ///< fine; 4..1024
};

/// One level of partitions, as arrays over them.
struct TailLevel {
  std::vector<float> sizes;  ///< keys, >= 1
  /// Mean, over the elements, of the variance of s * key around the mean key, where s is the tree's key_scale().
  std::vector<float> variances;
  std::vector<int8_t> keys;       ///< `[count, dim]` codes of the mean keys, see TailTree::codes()
  std::vector<std::byte> values;  ///< `[count, dim]` mean values, of K and V's dtype

  [[nodiscard]] size_t count() const { return sizes.size(); }
  [[nodiscard]] size_t bytes() const {
    return (sizes.size() + variances.size()) * sizeof(float) + keys.size() + values.size();
  }
};

/// Partitions of a range of rows, with numbers that begin at 0.
struct TailSegment {
  TailLevel coarse, fine;
  std::vector<uint32_t> fine_begin;  ///< `[coarse + 1]` the fine partitions of a coarse one
  std::vector<uint32_t> row_begin;   ///< `[fine + 1]` the places in `rows` of a fine one
  std::vector<uint32_t> rows;        ///< all rows, by fine partition, rising within it
  std::vector<uint32_t> parents;     ///< `[fine]` coarse partition
  std::vector<uint32_t> fine_of;     ///< `[row - first row]`
  double square_values = 0.0;        ///< sum of |v|^2
  /// The codes that a tree's first segment learns from its rows; they are the tree's from then on.
  std::optional<KeyCodes> codes;
  std::vector<float> key_scale;  ///< as codes: learned where the tree had none
};

class TailTree {
 public:
  /// key_scale: `[dim]` the scale of each channel in which keys are compared and their variances taken (the balanced
  /// space of the head, scan/balance.h); empty: learned from the first rows alone.
  TailTree(const Context& context, uint32_t dim, DType dtype, const TailParams& params,
           std::vector<float> key_scale = {});

  /// Partitions all rows of `kv`; replaces what was there. K and V are read, not kept. The result does not
  /// depend on the number of threads. Throws Error(cancelled), and then has changed nothing.
  void build(const KvView& kv, const Progress& progress);

  /// Prepare and take in rows [count(), kv.keys.tokens) as a segment, like Index::prepare_append() and
  /// commit_append(): the first may run while others read the tree.
  [[nodiscard]] std::unique_ptr<TailSegment> prepare_append(const KvView& kv,
                                                            const Progress& progress) const;
  void commit_append(const TailSegment& segment);
  /// Takes the memory that commit_append(segment) needs, so that it cannot fail. Without it commit_append() takes the
  /// memory first, and changes nothing where there is none.
  void make_room(const TailSegment& segment);

  /// Forgets rows >= count. `kv` holds at least the rows below.
  void truncate(size_t count, const KvView& kv);

  [[nodiscard]] size_t count() const { return segments_.empty() ? 0 : segments_.back().end; }
  [[nodiscard]] size_t bytes() const;
  [[nodiscard]] double build_seconds() const { return build_seconds_; }
  /// What bytes() will be for `rows` rows, about.
  [[nodiscard]] static size_t estimate(size_t rows, uint32_t dim, DType dtype,
                                       const TailParams& params);

  [[nodiscard]] uint32_t dim() const { return dim_; }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] const TailParams& params() const { return params_; }
  [[nodiscard]] const TailLevel& coarse() const { return coarse_; }
  [[nodiscard]] const TailLevel& fine() const { return fine_; }
  /// The first fine partition of coarse partition c, which has [fine_begin(c), fine_begin(c + 1)).
  [[nodiscard]] uint32_t fine_begin(size_t c) const { return fine_begin_[c]; }
  [[nodiscard]] std::span<const uint32_t> rows_of(size_t fine) const {
    return {rows_.data() + row_begin_[fine], rows_.data() + row_begin_[fine + 1]};
  }
  [[nodiscard]] uint32_t fine_of(size_t row) const { return fine_of_[row]; }
  void prefetch_fine_of(size_t row) const { __builtin_prefetch(fine_of_.data() + row); }
  [[nodiscard]] uint32_t parent(size_t fine) const { return parents_[fine]; }
  /// The scale s of each channel, empty where the tree has none yet. With it, |q / s|^2 * variance takes the place
  /// that |q|^2 * the variance of keys has where all channels are alike.
  [[nodiscard]] const std::vector<float>& key_scale() const { return key_scale_; }
  /// `[dim]` 1 / s; 1 where there is no s.
  [[nodiscard]] const std::vector<float>& query_scale() const { return query_scale_; }
  /// The centre and scales of the mean keys' codes.
  [[nodiscard]] const KeyCodes& codes() const { return codes_; }
  /// The mean of all values `[dim]`, and the mean of |v - mean|^2.
  [[nodiscard]] const std::vector<float>& mean_value() const { return mean_value_; }
  [[nodiscard]] float value_spread() const { return value_spread_; }

  void save(Writer& out) const;
  /// Replaces the tree by the one saved for rows [0, rows). Throws Error(corrupt).
  void load(Reader& in, size_t rows);

 private:
  struct Segment {
    size_t begin, end;           // rows
    size_t coarse, fine;         // where its partitions begin
    double square_values = 0.0;  // sum of |v|^2
  };

  [[nodiscard]] TailSegment cluster(const KvView& kv, size_t begin, size_t end,
                                    const Progress& progress) const;
  void set_scale(std::vector<float> key_scale);
  void add(const TailSegment& segment);
  void drop_last_segment();
  void update_values();

  Context context_;
  uint32_t dim_;
  DType dtype_;
  TailParams params_;
  std::vector<float> given_scale_, key_scale_, query_scale_;
  KeyCodes codes_;
  std::vector<Segment> segments_;
  TailLevel coarse_, fine_;
  std::vector<uint32_t> fine_begin_{0};  // [coarse + 1]
  std::vector<uint32_t> row_begin_{0};   // [fine + 1]
  std::vector<uint32_t> rows_, parents_, fine_of_;
  std::vector<float> mean_value_;
  float value_spread_ = 0.0F;
  double build_seconds_ = 0.0;
};

}  // namespace keyhole::index

// The lists of an ivf index: all rows, each list with the mean key by which it is probed.
//
// Rows come in two ways. Parts were clustered together and have lists of their own, which never move. The
// tail is the rows after the last part: they are spread over the lists that exist, in a second set of
// arrays, until they become a part. A list is therefore two streams.
#pragma once

#include "index/base.h"
#include "index/partitions/ivf_train.h"
#include "index/partitions/list_ranking.h"
#include "index/scan/rerank.h"

namespace keyhole::index {

/// Working memory of a search through lists.
struct ListScratch : SearchScratch {
  using SearchScratch::SearchScratch;
  /// Reserves memory for searches that rank `lists` lists; allocates only where that is more than before.
  void reserve(uint32_t dim, size_t lists) {
    if (queries.size() < size_t{max_group} * dim) queries.resize(size_t{max_group} * dim);
    ranking.reserve(max_group, lists);
  }
  ListRanking ranking;
  std::vector<float> queries;  ///< `[group, dim]`, RoPE undone
  Rerank rerank;               ///< for lists of codes
};

class IvfLists {
 public:
  /// Makes empty lists. with_means = false: something else ranks them, and no mean keys are kept. coded: lists hold
  /// int8 codes of the keys.
  IvfLists(const cpu::Kernels& kernels, uint32_t dim, DType dtype, bool with_means, bool coded)
      : kernels_(&kernels),
        dim_(dim),
        dtype_(dtype),
        mean_bytes_(with_means ? dim * dtype_size(dtype) : 0),
        coded_(coded),
        codes_(kernels, dim) {}

  /// Learns the codes from all keys. Called before the first parts, where lists are coded.
  void learn(const RowsView& keys) {
    if (coded_) codes_.learn(keys);
  }

  [[nodiscard]] size_t count() const { return trained_.size(); }
  [[nodiscard]] size_t parts() const { return parts_.size(); }
  [[nodiscard]] size_t trained_rows() const { return parts_.empty() ? 0 : parts_.back().end; }
  /// Whether every part has `lists` lists.
  [[nodiscard]] bool has_parts_of(size_t lists) const;
  /// The list of each row from trained_rows() on.
  [[nodiscard]] const std::vector<uint32_t>& tail_labels() const { return tail_labels_; }

  /// The mean keys, `[count(), dim]` of the keys' dtype: rounding them moves no rank that matters, and at
  /// 64 keys a list fp32 ones would be 3 % of K, a good part of what a search reads.
  [[nodiscard]] RowsView means() const { return dense_rows(means_.data(), count(), dim_, dtype_); }
  /// Scores all rows of some lists for the group and offers them to the scratch's collector. A part of a search takes
  /// every parts-th of the lists.
  void scan(std::span<const uint32_t> lists, const SearchArgs& args, const RowsView& keys,
            ListScratch& scratch, SearchCost& cost) const;
  [[nodiscard]] size_t size(size_t l) const { return trained_[l].size + tail_.list(l).size; }

  /// New lists, prepared beside the present ones and not yet part of them.
  struct Change {
    std::vector<Part> parts;  ///< to follow the last part
    std::vector<std::byte> means;
    std::vector<KeyList> trained;
    KeyLists tail;
    std::vector<uint32_t> tail_labels;
  };
  /// Prepares a change that adds `parts` behind the last one and empties the tail.
  [[nodiscard]] Change with_parts(std::vector<Part> parts) const;
  /// Prepares a change whose tail is rows [trained_rows(), trained_rows() + labels.size()) of `keys`.
  [[nodiscard]] Change with_tail(const RowsView& keys, std::vector<uint32_t> labels) const;
  /// Takes in a change that was prepared from these very lists, and leaves what it has replaced in `change`. On an
  /// exception (no memory) nothing has changed.
  void apply(Change&& change);

  /// Forgets rows >= rows.
  void truncate(size_t rows);

  [[nodiscard]] size_t bytes() const;
  /// The part of bytes() that a copy counts: copies share the keys in the lists.
  [[nodiscard]] size_t bytes_of_others() const;
  /// What bytes() will be for `rows` rows in `lists` lists without a tail.
  [[nodiscard]] static size_t estimate(size_t rows, size_t lists, uint32_t dim, DType dtype,
                                       bool coded);
  void describe(IndexInfo& info) const;

  void save(Writer& out) const;
  /// Reads the lists of rows [0, keys.tokens) into this object, which is empty.
  void load(Reader& in, const RowsView& keys);

 private:
  void scan(const KeyList& list, const SearchArgs& args, ListScratch& scratch,
            SearchCost& cost) const;
  [[nodiscard]] size_t row_bytes() const { return dim_ * dtype_size(dtype_); }
  [[nodiscard]] KeyLists in_codec(KeyLists lists) const {
    return coded_ ? lists.encoded(codes_, dim_, dtype_) : std::move(lists);
  }

  const cpu::Kernels* kernels_;
  uint32_t dim_;
  DType dtype_;
  size_t mean_bytes_;  // bytes of one mean key; 0: there are none
  bool coded_;
  KeyCodes codes_;           // centre and scales alone
  std::vector<Part> parts_;  // rows [0, trained_rows()) in order; their centroids are in means_
  std::vector<std::byte> means_;  // of all lists, parts in order
  std::vector<KeyList> trained_;  // of all parts in order
  KeyLists tail_;                 // over the same lists
  std::vector<uint32_t> tail_labels_;
};

}  // namespace keyhole::index

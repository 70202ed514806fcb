// What all index types share: argument checks, timing, the frame of a saved index, the top-k of a search.
// A type implements the do_* hooks and the two halves of its saved form.
#pragma once

#include <vector>

#include "index/index.h"
#include "index/progress.h"
#include "index/scan/collector.h"
#include "index/serial.h"
#include "index/spec.h"

namespace keyhole::index {

/// Row numbers are 32 bits wide, of which graphs keep one free for marks. Sessions hold no more tokens.
inline constexpr size_t kMaxRows = size_t{1} << 31;

/// Scores of one block of keys for a group of up to 16 heads: 16 KiB, a third of an L1 cache, and long
/// enough (64 KiB of fp16 keys at d = 128) that a kernel call's fixed cost vanishes.
inline constexpr size_t kScanBlock = 256;

/// Working memory that every search needs; a type adds its own.
class SearchScratch : public Scratch {
 public:
  SearchScratch(uint32_t group, uint32_t k)
      : max_group(group), max_k(k), scores(size_t{group} * kScanBlock) {}
  uint32_t max_group;
  uint32_t max_k;
  Collector collector;
  std::vector<float> scores;  ///< `[max_group, kScanBlock]`
};

/// The counters that a search adds to.
struct SearchCost {
  uint64_t keys_scored = 0;  ///< see Hits
  uint64_t bytes_read = 0;
  uint64_t exact_rows = 0;    ///< see Hits
  bool exact = true;          ///< the collected scores are those of the keys as they were given
  float* coverage = nullptr;  ///< see Hits
};

/// Scores the n rows ids[] of `keys` for all heads of the group: out[h * stride + i].
void score_ids(const cpu::Kernels& kernels, const RowsView& keys, const SearchArgs& args,
               const uint32_t* ids, size_t n, float* out, size_t stride);

class BasicIndex : public Index {
 public:
  BasicIndex(Spec spec, uint32_t dim, DType dtype, const Context& context);

  void build(const BuildInput& input, const Progress& progress) final;
  [[nodiscard]] std::unique_ptr<Addition> prepare_append(const RowsView& keys,
                                                         const Progress& progress) const final;
  [[nodiscard]] std::unique_ptr<Addition> prepare_append_kv(const KvView& kv,
                                                            const Progress& progress) const final;
  std::unique_ptr<Addition> commit_append(std::unique_ptr<Addition> addition) final;
  void truncate(size_t count) final;
  [[nodiscard]] std::unique_ptr<Index> share(const RowsView& keys) const final;
  [[nodiscard]] size_t count() const final { return keys_.tokens; }
  [[nodiscard]] uint32_t dim() const final { return dim_; }
  [[nodiscard]] const TypeDecl& type() const final { return spec_.type(); }
  using Index::search;
  void search(const SearchArgs& args, Scratch& scratch, Hits& hits) const final;
  void explore(const SearchArgs& args, Scratch& scratch, Scored& scored) const final;
  void reserve_explore(Scratch& scratch) const final;
  [[nodiscard]] IndexInfo info() const final;
  void set_search_params(std::string_view spec) final;
  void save(std::ostream& out) const final;
  void load(std::istream& in, const RowsView& keys) final;

 protected:
  BasicIndex(const BasicIndex&) = default;

  /// Learns the scale of each channel (`[dim]`, see scan/balance.h) in which an index whose first rows are input.keys
  /// compares keys with each other; empty if it never does. When an append brings an index its first rows, `input`
  /// has no queries.
  [[nodiscard]] virtual std::vector<float> learn_scale(const BuildInput& input) const;
  /// Replaces the index by one over all of input.keys; on an exception the index must be unchanged. scale: the result
  /// of learn_scale(), empty where there is no row; it is channel_scale() once the index is built.
  virtual void do_build(const BuildInput& input, const std::vector<float>& scale,
                        const Progress& progress) = 0;
  /// Prepares the addition of rows [count(), keys.tokens), at least one; changes nothing.
  [[nodiscard]] virtual std::unique_ptr<Addition> do_prepare(const RowsView& keys,
                                                             const std::vector<float>& scale,
                                                             const Progress& progress) const = 0;
  /// do_prepare() with values where they are given (count 0: none), for types that hold something of them.
  [[nodiscard]] virtual std::unique_ptr<Addition> do_prepare_kv(const KvView& kv,
                                                                const std::vector<float>& scale,
                                                                const Progress& progress) const {
    return do_prepare(kv.keys, scale, progress);
  }
  /// Takes in the addition that do_prepare() of the index in its present state returned, best by swapping it with
  /// what the index has. Does not throw.
  virtual void do_commit(Addition& addition) = 0;
  /// Forgets rows >= count, at least one.
  virtual void do_truncate(size_t count) = 0;
  /// Offers candidates to scratch.collector and adds to the cost; count() > 0. Rows offered to a collector that logs
  /// must be distinct, and scored for all heads.
  virtual void do_search(const SearchArgs& args, SearchScratch& scratch,
                         SearchCost& cost) const = 0;
  /// Reserves what a search with a logging collector needs beside the collector's own memory.
  virtual void do_reserve_log(SearchScratch& /*scratch*/) const {}
  /// Copies the object over the same keys. Its big parts are cpu::Shared, so that little is copied.
  [[nodiscard]] virtual std::unique_ptr<BasicIndex> do_share() const = 0;
  /// Adds diagnostics, and what `auto` parameters have become.
  virtual void describe(IndexInfo& info) const = 0;
  virtual void save_body(Writer& out) const = 0;
  /// Reads what save_body() wrote, for rows [0, keys.tokens); commits nothing before reader.finish(). channel_scale()
  /// is the saved scale meanwhile.
  virtual void load_body(Reader& in, const RowsView& keys) = 0;

  /// Scores all rows [0, count()) exactly and offers them.
  void scan_all(const SearchArgs& args, SearchScratch& scratch, SearchCost& cost) const;

  /// Scores the rows of a log exactly for all heads, for types that search head by head.
  void score_log(const SearchArgs& args, Collector& collector, SearchCost& cost) const;

  [[nodiscard]] const cpu::Kernels& kernels() const { return *context_.kernels; }
  [[nodiscard]] const Context& context() const { return context_; }
  [[nodiscard]] const Spec& spec() const { return spec_; }
  /// The scale of each channel, fixed with the first rows, saved and loaded with the index.
  [[nodiscard]] const std::vector<float>& channel_scale() const { return channel_scale_; }
  [[nodiscard]] const RowsView& keys() const { return keys_; }  ///< exactly the indexed rows
  /// The dtype of what the index copies from keys; keys() itself may be int8.
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] size_t row_bytes() const { return dim_ * dtype_size(keys_.dtype); }  ///< of keys()

 private:
  void check_keys(const RowsView& keys, size_t at_least) const;
  /// Throws Error(status) that names a parameter of `other` which the build of this index has fixed.
  void check_same_build(const Spec& other, Status status, const std::string& saved) const;
  [[nodiscard]] SearchScratch& check_search(const SearchArgs& args, Scratch& scratch) const;

  Spec spec_;
  uint32_t dim_;
  DType dtype_;
  Context context_;
  RowsView keys_;
  std::vector<float> channel_scale_;
  double build_seconds_ = 0.0;
  uint64_t version_ = 0;  ///< grows with every change
};

}  // namespace keyhole::index

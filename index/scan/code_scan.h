// Attention by codes at the speed of memory. One pass over the codes of a KV head gives the state of all its rows by
// their codes, and the rows that weigh most. These are then taken out of the state, to be attended exactly, so that
// every row is in the result once, by its code or exactly.
//
// The pass is cut into ranges of whole blocks whose number depends on the count alone; any thread may do any of them,
// and they are merged in their order, so that the bits of the result do not depend on threads.
//
// Rounding (cpu/code_kernels.h): queries have 16 bits for 4-bit keys and 8 bits for 1- and 2-bit keys. Weights are
// rounded to 16 bits of the largest in blocks where a row is heavy, that is, weighs a share of the rows seen so far,
// and to 8 bits in other blocks. There a block's sum is off by 0.02 of its largest weight, where the code of that one
// row is off by 0.6, 0.3 or 0.1 of it (1, 2, 4 bits). Searches take 16 bits.
//
// The rows to be read exactly are those of largest weight over the heads of the group: max over heads of log weight -
// lse, where lse is that of all rows by code. A row that is among the N best of a group is among the N best of the
// head where it weighs most, so each range keeps the N best of each head.
#pragma once

#include <span>
#include <vector>

#include "cpu/tensor_view.h"
#include "index/scan/code_parts.h"
#include "index/scan/kv_codes.h"
#include "index/scan/list_choice.h"
#include "index/scan/topk.h"

namespace keyhole::index {

/// The most rows that settle() reads exactly, and never more than an eighth of all; beyond that it reads all, because
/// a row read at random costs some five times as much as one read in order.
inline constexpr uint32_t kMostDoubtedRows = 16384;

/// The codes of an index, in blocks or in lists; both null: it has none.
struct CodedRows {
  const KvCodes* blocks = nullptr;
  const CodeLists* lists = nullptr;
  ListGoal goal{};  ///< how much of the lists a step reads

  [[nodiscard]] static CodedRows of(const Index& index) {
    return {index.codes(), index.lists(), index.list_goal()};
  }
  [[nodiscard]] explicit operator bool() const { return blocks != nullptr || lists != nullptr; }
  [[nodiscard]] const CodeShape& shape() const {
    return blocks != nullptr ? blocks->shape() : lists->shape();
  }
  [[nodiscard]] const Balance& balance() const {
    return blocks != nullptr ? blocks->balance() : lists->balance();
  }
  /// The number of rows that have codes: rows [0, count()).
  [[nodiscard]] size_t count() const {
    return blocks != nullptr ? blocks->count() : lists->count();
  }
  /// Number of parts of a pass. It depends on the number of rows or lists alone, because sums of floats depend on
  /// where they are cut.
  [[nodiscard]] uint32_t parts() const {
    return blocks != nullptr ? code_cut(blocks->blocks()).parts
                             : ListChoice::scan_parts(lists->lists());
  }
};

/// The search of one KV head in its codes.
struct CodeSearch {
  const cpu::Kernels* kernels = nullptr;
  CodedRows rows;
  const float* queries = nullptr;  ///< `[group, dim]` fp32
  uint32_t group = 0;
  LogitParams logits;
  uint32_t wanted =
      0;  ///< rows to be read exactly, at most kMostExactRows; more than there are: all
  ListChoice* choice = nullptr;  ///< the choice of its lists, where these are scanned

  [[nodiscard]] const CodeShape& shape() const { return rows.shape(); }
  /// How many runs a pass reads: all blocks, or the chosen lists. run_number() gives the number of the r-th.
  [[nodiscard]] size_t runs() const {
    return choice != nullptr ? choice->chosen().size() : rows.blocks->blocks();
  }
  [[nodiscard]] size_t run_number(size_t r) const {
    return choice != nullptr ? choice->chosen()[r] : r;
  }
  /// The codes of block or list `number`. Its rows have the places from number * kCodeBlock on; in a block these are
  /// the numbers of the rows.
  [[nodiscard]] CodeRun run(size_t number) const {
    return rows.blocks != nullptr ? rows.blocks->run(number) : rows.lists->run(number);
  }
  /// How many parts of the queries the pass uses, see cpu::ScoreCodesArgs.
  [[nodiscard]] uint32_t query_parts() const { return shape().key_bits == 4 ? 2 : 1; }
  [[nodiscard]] uint32_t row_at(uint32_t place) const {
    return rows.blocks != nullptr ? place : rows.lists->id_of(place);
  }
};

/// What settle() has found out about the codes of a search.
struct CodeDoubt {
  bool any = false;   ///< the codes could not tell which rows weigh
  bool all = false;   ///< nor which rows might weigh: all rows were read exactly
  uint32_t more = 0;  ///< rows that were read exactly beside the chosen ones
};

/// Runs passes, with the memory that one thread needs for them.
class CodeScan {
 public:
  /// Takes memory, or keeps what it has where that is enough. Afterwards searches of this size in codes of this shape
  /// allocate nothing.
  void reserve(const CodeShape& shape, uint32_t group, uint32_t wanted);
  [[nodiscard]] bool fits(const CodeShape& shape, uint32_t group, uint32_t wanted) const;
  /// Takes the memory that settle() needs for `wanted` rows.
  void reserve_doubt(uint32_t wanted) {
    places_.reserve(kMostDoubtedRows + wanted);
    read_rows_.reserve(kMostDoubtedRows + wanted);
  }

  /// Scans part `part` of code_cut(), or of ListChoice::scan_parts(): all rows except those at the places `skipped`
  /// (rising). Lists that were not chosen count by their mean values.
  void scan(const CodeSearch& search, uint32_t part, std::span<const uint32_t> skipped,
            CodeParts& out) {
    const CodeAsker alone{search.queries, search.group, &out};
    scan(search, part, skipped, {&alone, 1});
  }
  /// scan() for several searches that read each block together. search.queries is not read, search.group is the sum
  /// of theirs, at most kMaxGroup, and `wanted` is that of each; each gets what it would get alone. Only blocks of
  /// the part are read: the codes of the searches may differ behind it, except that they are cut alike.
  void scan(const CodeSearch& search, uint32_t part, std::span<const uint32_t> skipped,
            std::span<const CodeAsker> askers);

  /// For searches: begin() prepares the queries and score() scores one block or list by its codes: `[group,
  /// kCodeBlock]`, valid until the next call.
  void begin(const CodeSearch& search);
  [[nodiscard]] const float* score(const CodeSearch& search, size_t block);

  /// Chooses the `wanted` rows that weigh most, once all parts have been scanned: heaviest first, of equally heavy
  /// ones the smaller first. Of lists, only those that were read count. Valid until the next call.
  [[nodiscard]] std::span<const uint32_t> choose(const CodeSearch& search, const CodeParts& parts);

  /// Gives, after choose(), the state of all other rows by their codes: o `[group, dim]`, lse `[group]`; (0, -inf)
  /// where none is left. exact_lse `[group]`: the exact lse of the chosen rows. Where these weighed so much by their
  /// codes that rounding would show in the remainder, the others are summed up once more without them.
  void finish(const CodeSearch& search, const float* exact_lse, CodeParts& parts, StateView out);

  /// Settles doubt after finish(), whose state is `coded`; `exact` is the state of the chosen rows. Where the errors
  /// of codes may hide rows that weigh, reads these exactly as well, or all rows of kv, and changes both states
  /// (index/scan/code_scan_doubt.cpp). Mostly it does nothing, and where search.wanted is 0, only what codes cannot do
  /// at all: of a query beyond kLongestQuery it reads all rows. Afterwards the lists of the search are those that were
  /// read.
  CodeDoubt settle(const CodeSearch& search, const KvView& kv, CodeParts& parts, StateView exact,
                   StateView coded);
  /// The rows that settle() read exactly, where it returned `any` and not `all`. Valid until the next call.
  [[nodiscard]] std::span<const uint32_t> read_rows() const { return read_rows_; }

  [[nodiscard]] size_t bytes() const;

 private:
  /// How many lists' mean values are added at once: those of a head of 128 are 64 KiB.
  static constexpr size_t kListsAtOnce = 256;
  /// The place of the first row of block or list `number`, see CodeSearch::run().
  [[nodiscard]] static uint32_t first_place(size_t number) {
    return static_cast<uint32_t>(number * kCodeBlock);
  }
  /// The state of doubt: for each head of a group the weight of all rows, as far as it is known, and logits.
  struct Doubt;
  void begin(const CodeSearch& search, std::span<const CodeAsker> askers);
  /// Writes the log weights of n tiles of a run from `tile` on to scores_, from that tile's place on, by so many
  /// parts of the queries. offsets: the queries' products with the run's mean key. floors: null, or as in
  /// cpu::ScoreCodesArgs with `wanted`.
  void weigh_tiles(const CodeSearch& search, const CodeRun& run, const float* offsets,
                   uint32_t tile, uint32_t n, uint32_t parts, uint32_t wanted, float* maxima,
                   float* floors);
  /// Weighs all tiles of a run. Rows that the last tile does not have get -inf.
  void weigh_run(const CodeSearch& search, const CodeRun& run, const float* offsets, uint32_t parts,
                 float* maxima, float* floors);
  void score_mean(const CodeSearch& search, const CodeRun& run, float* offsets) const;
  /// Whether a row of run `number` of a pass over `runs` runs is heavy for one of the heads [head, head + heads).
  /// maxima: the largest log weights.
  [[nodiscard]] bool is_heavy(const CodeShape& shape, uint32_t head, uint32_t heads, size_t number,
                              size_t runs, const float* maxima);
  /// Offers the rows that above_ names to best_. The first row has place `first`.
  void offer_run(uint32_t group, uint32_t tiles, uint32_t first);
  /// Adds a run, the `done`-th of `runs` of this part, whose rows have the places from `first` on. next: the run that
  /// follows it; null: none.
  void scan_run(const CodeSearch& search, const CodeRun& run, uint32_t first, const float* offsets,
                size_t done, size_t runs, const CodeRun* next, std::span<const uint32_t> skipped,
                std::span<const CodeAsker> askers);
  /// Adds the values of a run to the sums of heads [head, head + heads), by so many parts of the weights.
  void sum_run(const CodeShape& shape, const cpu::Kernels& kernels, const CodeRun& run,
               const CodeRun* next, uint32_t head, uint32_t heads, uint32_t parts,
               const float* rescales);
  void scan_blocks(const CodeSearch& search, uint32_t part, std::span<const uint32_t> skipped,
                   std::span<const CodeAsker> askers);
  void scan_lists(const CodeSearch& search, uint32_t part, std::span<const uint32_t> skipped,
                  std::span<const CodeAsker> askers);
  /// Begins the sums with the mean values of those of the lists [begin, end) that are not read.
  void add_means(const CodeSearch& search, size_t begin, size_t end);
  /// Raises tops_ to at least `tops` `[group]` and writes rescales `[group]`, by which the sums so far are to be
  /// multiplied.
  void raise_tops(uint32_t group, const float* tops, float* rescales);
  void merge(const CodeSearch& search, const CodeParts& parts);
  /// Takes the weights of the chosen rows out of sums_ and o_; false where rounding would show.
  [[nodiscard]] bool take_out(const CodeSearch& search, const float* exact_lse);
  /// Sums up all rows except those at `places` (rising) once more.
  void scan_others(const CodeSearch& search, std::span<const uint32_t> places, CodeParts& parts);
  void put_state(const CodeSearch& search, bool none, StateView out) const;

  [[nodiscard]] Doubt doubt(const CodeSearch& search, const CodeParts& parts,
                            const StateView& exact, const StateView& coded) const;
  /// The mean of f^2 noise over rows that were read by their codes, from a sample of their blocks or lists.
  [[nodiscard]] static float mean_noise(const CodeSearch& search);
  /// Computes the bounds for rows that are up to lights[h] nats below the log-sum-exp.
  static void set_bounds(const CodeSearch& search, const float* lights, Doubt& doubt);
  /// Writes the logits `[group]` that a list with such a row is to reach.
  static void least_logits(const CodeSearch& search, const Doubt& doubt, const float* lights,
                           float* least);
  /// As ListChoice::may_widen(); false where there are no lists.
  [[nodiscard]] static bool may_widen(const CodeSearch& search, const Doubt& doubt,
                                      const float* lights, float wide);
  [[nodiscard]] bool find_doubted(const CodeSearch& search, const Doubt& doubt, bool all_runs);
  void read_doubted(const CodeSearch& search, const KvView& kv, CodeParts& parts, StateView exact,
                    StateView coded);
  /// Attends every row exactly.
  CodeDoubt read_all(const CodeSearch& search, const KvView& kv, StateView exact,
                     StateView coded) const;
  /// Whether a row is beyond what its code can hold.
  [[nodiscard]] static bool has_unknown(const CodeSearch& search, const CodeParts& parts);

  uint32_t group_ = 0, wanted_ = 0;  // sizes that memory is reserved for
  std::vector<float> rows_;          // `[group, dim]` queries in the space of the codes
  cpu::LineVector<int8_t> parts_;    // `[group, code_query_bytes()]` the same in the codes' order
  cpu::CodeQueryScales scales_[kMaxGroup] = {};
  float norms_[kMaxGroup] = {};    // of rows_, squared
  bool has_beyond_ = false;        // one of rows_ is beyond kLongestQuery
  cpu::LineVector<float> scores_;  // `[group, kCodeBlock]`
  uint16_t above_[kMaxGroup *
                  kCodeTiles];  // of a block's rows, those that may be among the best of a head
  cpu::LineVector<float> value_sums_;  // `[group, code_sum_size()]`
  std::vector<float> means_;           // `[group, dim]` weighted sum of mean values
  std::vector<float> o_;               // `[group, dim]`
  float tops_[kMaxGroup] = {}, sums_[kMaxGroup] = {};
  float widest_ =
      0.0F;  // the largest f^2 noise of the rows weighed since begin(); infinite: not known
  float coded_lses_[kMaxGroup] = {};  // lse of all rows by their codes
  float cut_ = kMinusInf;  // log weight less these that no row is above but the chosen ones
  TopK best_;
  std::vector<uint64_t> candidates_, spare_;
  std::vector<uint32_t> chosen_, sorted_;  // places
  std::vector<uint32_t> chosen_rows_;
  std::vector<uint32_t> places_, read_rows_;  // of settle()
  std::vector<float> value_;                  // `[dim]`
};

}  // namespace keyhole::index

// Attention by codes at the speed of memory: one pass over the codes of a KV head leaves the state of all its rows by
// their codes and the rows that weigh most; these leave the state again, to be attended exactly. Every row is in the
// result once, by its code or exactly.
//
// The pass is cut into ranges of whole blocks whose number depends on the count alone; any thread may do any of them,
// and they are merged in their order, so that the bits of the result do not depend on threads.
//
// Rounding (cpu/code_kernels.h): queries of 4-bit keys have 16 bits, those of 1 and 2 bits 8. Weights are rounded as finely
// as rows weigh: to 16 bits of the largest in blocks where a row is heavy, that is, weighs a share of the rows seen so
// far; to 8 bits in other blocks. There, what a block adds up to is off by 0.02 of its largest weight, where the code of
// that one row is off by 0.6, 0.3 or 0.1 of it (1, 2, 4 bits). Searches take 16 bits.
//
// The rows to be read exactly are those of largest weight over the heads of the group: max over heads of
// log weight - lse, where lse is that of all rows by code. A row that is among the N of a group is among the N of the
// head where it weighs most: each range keeps the N best of each head.
#pragma once

#include <span>
#include <vector>

#include "index/scan/code_parts.h"
#include "index/scan/kv_codes.h"
#include "index/scan/list_choice.h"
#include "index/scan/topk.h"

namespace keyhole::index {

/// Rows that settle() reads exactly before it reads all, at most; and no more than an eighth of them: rows at random cost some
/// five times what they cost one after the other.
inline constexpr uint32_t kMostDoubtedRows = 16384;

/// The codes of an index, in blocks or in lists; neither: it has none.
struct CodedRows {
  const KvCodes* blocks = nullptr;
  const CodeLists* lists = nullptr;
  ListGoal goal{};  ///< of lists

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
  /// Rows [0, count()) have codes.
  [[nodiscard]] size_t count() const {
    return blocks != nullptr ? blocks->count() : lists->count();
  }
  /// Parts of a pass: by the number of rows or lists alone, as sums of floats depend on where they are cut.
  [[nodiscard]] uint32_t parts() const {
    return blocks != nullptr ? code_cut(blocks->blocks()).parts
                             : ListChoice::scan_parts(lists->lists());
  }
};

/// What one KV head asks of its codes.
struct CodeSearch {
  const cpu::Kernels* kernels = nullptr;
  CodedRows rows;
  const float* queries = nullptr;  ///< `[group, dim]` fp32
  uint32_t group = 0;
  LogitParams logits;
  uint32_t wanted =
      0;  ///< rows to be read exactly, at most kMostExactRows; more than there are: all
  ListChoice* choice = nullptr;  ///< of its lists, where these are scanned

  [[nodiscard]] const CodeShape& shape() const { return rows.shape(); }
  /// What a pass reads: blocks, or the chosen lists; and the number of the r-th of them.
  [[nodiscard]] size_t runs() const {
    return choice != nullptr ? choice->chosen().size() : rows.blocks->blocks();
  }
  [[nodiscard]] size_t run_number(size_t r) const {
    return choice != nullptr ? choice->chosen()[r] : r;
  }
  /// Block or list `number`. Its rows have the places number * kCodeBlock on; in a block these are the rows' numbers.
  [[nodiscard]] CodeRun run(size_t number) const {
    return rows.blocks != nullptr ? rows.blocks->run(number) : rows.lists->run(number);
  }
  /// Parts of the queries that the pass takes, see cpu::ScoreCodesArgs.
  [[nodiscard]] uint32_t query_parts() const { return shape().key_bits == 4 ? 2 : 1; }
  [[nodiscard]] uint32_t row_at(uint32_t place) const {
    return rows.blocks != nullptr ? place : rows.lists->id_of(place);
  }
};

/// What the end of a pass has found out about its codes.
struct CodeDoubt {
  bool any = false;   ///< they could not tell which rows weigh
  bool all = false;   ///< nor which might: all rows were read exactly
  uint32_t more = 0;  ///< rows that were read exactly beside the chosen ones
};

/// One thread's memory for passes.
class CodeScan {
 public:
  /// Takes memory; keeps what it has where that is enough. After it nothing allocates for searches of this size in
  /// codes of this shape.
  void reserve(const CodeShape& shape, uint32_t group, uint32_t wanted);
  [[nodiscard]] bool fits(const CodeShape& shape, uint32_t group, uint32_t wanted) const;
  /// The same for settle().
  void reserve_doubt(uint32_t wanted) {
    places_.reserve(kMostDoubtedRows + wanted);
    read_rows_.reserve(kMostDoubtedRows + wanted);
  }

  /// Part `part` of code_cut(), or of ListChoice::scan_parts(): all rows but those at the places `skipped` (rising). Of lists
  /// that were not chosen, their mean values.
  void scan(const CodeSearch& search, uint32_t part, std::span<const uint32_t> skipped,
            CodeParts& out) {
    const CodeAsker alone{search.queries, search.group, &out};
    scan(search, part, skipped, {&alone, 1});
  }
  /// The same for several at once, of blocks: they read each block together. search.queries is not read, search.group is the
  /// sum of theirs, at most kMaxGroup, and `wanted` that of each. Each gets what it gets alone. Only blocks of the part are
  /// read: the askers' codes may differ behind it, but for the cut.
  void scan(const CodeSearch& search, uint32_t part, std::span<const uint32_t> skipped,
            std::span<const CodeAsker> askers);

  /// For searches: prepares the queries, and scores a block or list by its codes: `[group, kCodeBlock]`, valid until the
  /// next call.
  void begin(const CodeSearch& search);
  [[nodiscard]] const float* score(const CodeSearch& search, size_t block);

  /// When all parts have been scanned: the `wanted` rows (of those in lists that were read) that weigh most, heaviest first; of equal ones the smaller
  /// first. Valid until the next call.
  [[nodiscard]] std::span<const uint32_t> choose(const CodeSearch& search, const CodeParts& parts);

  /// After choose(): the state of all other rows by their codes, o `[group, dim]`, lse `[group]`; (0, -inf) where
  /// none is left. exact_lse `[group]`: of the chosen rows. Where these weighed so much by their codes that rounding
  /// would show in what is left, the others are summed up once more, without them.
  void finish(const CodeSearch& search, const float* exact_lse, CodeParts& parts, StateView out);

  /// After finish(), whose state is `coded`; `exact` is that of the chosen rows. Where the codes' errors may hide rows that
  /// weigh, reads these exactly as well, or all rows of kv, and changes both states (index/scan/code_scan_doubt.cpp). For the
  /// most part it does nothing. After it the search's lists are those that were read.
  CodeDoubt settle(const CodeSearch& search, const KvView& kv, CodeParts& parts, StateView exact,
                   StateView coded);
  /// After settle() that says `any` and not `all`: what was read exactly. Valid until the next call.
  [[nodiscard]] std::span<const uint32_t> read_rows() const { return read_rows_; }

  [[nodiscard]] size_t bytes() const;

 private:
  /// Mean values of lists that are added in one go: weights of a group of 4 are 4 KiB.
  static constexpr size_t kListsAtOnce = 256;
  /// Of the rows of block or list `number`, see CodeSearch::run().
  [[nodiscard]] static uint32_t first_place(size_t number) {
    return static_cast<uint32_t>(number * kCodeBlock);
  }
  /// What doubt is about: of each head of a group, the weight of all rows as far as it is known, and logits.
  struct Doubt;
  void begin(const CodeSearch& search, std::span<const CodeAsker> askers);
  /// Log weights of n tiles of a run from `tile` on, in scores_ from that tile's place on, by so many parts of the queries.
  /// offsets: the queries' products with the run's mean key. floors: null, or with wanted see cpu::ScoreCodesArgs.
  void weigh_tiles(const CodeSearch& search, const CodeRun& run, const float* offsets,
                   uint32_t tile, uint32_t n, uint32_t parts, uint32_t wanted, float* maxima,
                   float* floors);
  /// All tiles of a run, rows that a last tile does not have with -inf.
  void weigh_run(const CodeSearch& search, const CodeRun& run, const float* offsets, uint32_t parts,
                 float* maxima, float* floors);
  void score_mean(const CodeSearch& search, const CodeRun& run, float* offsets) const;
  /// Whether a row of run `number` of a pass over `runs` is heavy for one of heads [head, head + heads). maxima: the largest
  /// log weights.
  [[nodiscard]] bool is_heavy(const CodeShape& shape, uint32_t head, uint32_t heads, size_t number,
                              size_t runs, const float* maxima);
  /// Offers the rows of above_ to best_, the first of which has place `first`.
  void offer_run(uint32_t group, uint32_t tiles, uint32_t first);
  /// Adds a run, the `done`-th of `runs` of this part, whose rows have the places from `first` on. next: the run that comes
  /// after it, null: none.
  void scan_run(const CodeSearch& search, const CodeRun& run, uint32_t first, const float* offsets,
                size_t done, size_t runs, const CodeRun* next, std::span<const uint32_t> skipped,
                std::span<const CodeAsker> askers);
  /// Adds the run's values to the sums of heads [head, head + heads), by so many parts of the weights.
  void sum_run(const CodeShape& shape, const cpu::Kernels& kernels, const CodeRun& run,
               const CodeRun* next, uint32_t head, uint32_t heads, uint32_t parts,
               const float* rescales);
  void scan_blocks(const CodeSearch& search, uint32_t part, std::span<const uint32_t> skipped,
                   std::span<const CodeAsker> askers);
  void scan_lists(const CodeSearch& search, uint32_t part, std::span<const uint32_t> skipped,
                  std::span<const CodeAsker> askers);
  /// Begins the sums with the mean values of lists [begin, end) that are not read.
  void add_means(const CodeSearch& search, size_t begin, size_t end);
  /// Of list_weights_ of a head, from list `first` on, those of lists whose logits vary too much for what second order says.
  void bound_means(const CodeSearch& search, uint32_t head, size_t first,
                   std::span<const float> spreads, const float* log_sizes);
  /// Makes tops_ at least `tops` `[group]`; rescales `[group]`: what sums so far are to be multiplied by.
  void raise_tops(uint32_t group, const float* tops, float* rescales);
  void merge(const CodeSearch& search, const CodeParts& parts);
  /// Takes the chosen rows' weights out of sums_ and o_; false where rounding would show.
  [[nodiscard]] bool take_out(const CodeSearch& search, const float* exact_lse);
  /// Sums up all rows but those at `places` (rising) once more.
  void scan_others(const CodeSearch& search, std::span<const uint32_t> places, CodeParts& parts);
  void put_state(const CodeSearch& search, bool none, StateView out) const;

  [[nodiscard]] Doubt doubt(const CodeSearch& search, const CodeParts& parts,
                            const float* exact_lse, const float* coded_lse) const;
  /// The mean of f^2 noise over rows that were read by their codes, by a sample of their blocks or lists.
  [[nodiscard]] static float mean_noise(const CodeSearch& search);
  [[nodiscard]] bool find_doubted(const CodeSearch& search, const Doubt& doubt, bool all_runs);
  void read_doubted(const CodeSearch& search, const KvView& kv, CodeParts& parts, StateView exact,
                    StateView coded);
  /// Attends every row exactly.
  CodeDoubt read_all(const CodeSearch& search, const KvView& kv, StateView exact,
                     StateView coded) const;
  /// Whether a row is beyond what its code can hold, or a query beyond fp32 in the space of the codes.
  [[nodiscard]] bool has_unknown(const CodeSearch& search, const CodeParts& parts) const;

  uint32_t group_ = 0, wanted_ = 0;  // that it is reserved for
  std::vector<float> rows_;          // `[group, dim]` queries in the space of the codes
  cpu::LineVector<int8_t> parts_;    // `[group, code_query_bytes()]` the same in the codes' order
  cpu::CodeQueryScales scales_[kMaxGroup] = {};
  float norms_[kMaxGroup] = {};    // of rows_, squared
  cpu::LineVector<float> scores_;  // `[group, kCodeBlock]`
  uint16_t above_[kMaxGroup *
                  kCodeTiles];  // of a block's rows, those that may be among the best of a head
  cpu::LineVector<float> value_sums_;  // `[group, code_sum_size()]`
  std::vector<float> means_;           // `[group, dim]` weighted sum of mean values
  std::vector<float> list_weights_;    // `[group, kListsAtOnce]`
  std::vector<float> o_;               // `[group, dim]`
  float tops_[kMaxGroup] = {}, sums_[kMaxGroup] = {};
  float widest_ =
      0.0F;  // the largest f^2 noise of the rows weighed since begin(); infinite: not known
  float coded_lses_[kMaxGroup] = {};  // of all rows by their codes
  float cut_ = kMinusInf;  // log weight less these that no row is above but the chosen ones
  TopK best_;
  std::vector<uint64_t> candidates_, spare_;
  std::vector<uint32_t> chosen_, sorted_;  // places
  std::vector<uint32_t> chosen_rows_;
  std::vector<uint32_t> places_, read_rows_;  // of settle()
  std::vector<float> value_;                  // `[dim]`
};

}  // namespace keyhole::index

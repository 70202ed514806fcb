// From the findings of a group search to what is attended: the union of the heads' best keys, every key that was
// scored, or those of them that weigh something; each key once.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "index/index.h"
#include "keyhole/keyhole.h"
#include "runtime/step/cost.h"
#include "runtime/step/query.h"
#include "runtime/step/row_union.h"
#include "runtime/step/search_params.h"
#include "runtime/step/tail_reader.h"

namespace keyhole::runtime {

/// The search of the query in params.codes. choice: the lists that have been chosen; null where codes are in blocks.
[[nodiscard]] index::CodeSearch code_search(const GroupQuery& query, const SearchParams& params,
                                            index::ListChoice* choice);

/// Scans one of params.codes.parts() of a pass over them, with a thread's memory.
StepCost scan_codes(index::CodeScan& scan, const GroupQuery& query, const SearchParams& params,
                    uint32_t part, index::ListChoice* choice, index::CodeParts& parts);

/// One worker's memory for searching and attending one KV head. It is sized once; steps allocate nothing.
class Selection {
 public:
  /// What memory is reserved for: an index that will be searched, how it will be attended, and its tail's partitions.
  struct Use {
    const index::Index* index;
    keyhole_attend_mode attend;
    const index::TailTree* tail = nullptr;
    index::CodedRows codes{};  ///< that all rows are attended by, if there are some
  };
  /// Reserves memory for searches of `group` heads and `k` results in indexes of these types, up to these sizes, and
  /// drops what others needed. Strong guarantee: an allocation that fails leaves it unchanged.
  void reserve(std::span<const Use> uses, uint32_t group, uint32_t k);
  void reserve(const index::Index& index, uint32_t group, uint32_t k, keyhole_attend_mode attend) {
    const Use use{&index, attend};
    reserve({&use, 1}, group, k);
  }
  /// Whether searches in indexes of this type, and steps with this tail, need no reserve().
  [[nodiscard]] bool fits(const Use& use) const;

  /// Only searches, for the best k. The result is valid until the next call.
  const index::Hits& search(const index::Index& index, const GroupQuery& query,
                            const SearchParams& params, SearchPart part = {});

  /// Searches, and attends with all heads of the group over one set of rows: a key that one head found costs the
  /// others only arithmetic, because its row has been loaded for the group. Where scores of the keys as they are
  /// stored are at hand, only values are read.
  StepCost search_and_attend(const index::Index& index, const GroupQuery& query,
                             const SearchParams& params, SearchPart part, SearchStates out);

  /// Ends a search in parts, each of which has called search(): merges hits[p] of each part p into the best k, and
  /// attends them. The result does not depend on which thread had which part.
  StepCost attend_parts(std::span<const index::Hits> hits, const GroupQuery& query,
                        const SearchParams& params, SearchStates out);

  /// Scans one of params.codes.parts() of a pass over them. choice: the lists that have been chosen; null where codes
  /// are in blocks.
  StepCost scan_codes(const GroupQuery& query, const SearchParams& params, uint32_t part,
                      index::ListChoice* choice, index::CodeParts& parts) {
    return runtime::scan_codes(code_scan_, query, params, part, choice, parts);
  }
  /// Ends the pass when all parts have been scanned: attends the heaviest rows exactly, and writes the state of all
  /// others by their codes to out.tail.
  StepCost attend_codes(const GroupQuery& query, const SearchParams& params,
                        index::ListChoice* choice, index::CodeParts& parts, SearchStates out);

  /// The hits of the last search(), or of search_and_attend() in mode TOPK: `[group, k]`, `[group]`.
  [[nodiscard]] const index::Hits& hits() const { return hits_; }
  /// The distinct rows that were attended last; valid until the next call.
  [[nodiscard]] std::span<const uint32_t> attended() const { return attended_; }
  /// Whether attend_codes() attended all rows that have codes exactly, beside what attended() says.
  [[nodiscard]] bool attended_all() const { return attended_all_; }
  /// The estimates for what was attended last, if it had a tail.
  [[nodiscard]] const TailFigures& tail_figures() const { return tail_reader_.figures(); }

  [[nodiscard]] size_t bytes() const;
  /// The part of bytes() in which explore() logs. Searches in larger indexes than were reserved for make it grow.
  [[nodiscard]] size_t log_bytes() const { return log_bytes_; }

 private:
  /// The memory that searches of one index type need, for keys of as many components.
  struct TypeScratch {
    const index::TypeDecl* type = nullptr;
    uint32_t dim = 0;
    std::unique_ptr<index::Scratch> scratch;
    size_t log_bytes = 0;  ///< of the scratch, for what explore() logs; 0: it has not been reserved

    [[nodiscard]] bool is_of(const index::Index& index) const {
      return type == &index.type() && dim == index.dim();
    }
  };
  [[nodiscard]] TypeScratch& scratch_of(const index::Index& index);
  void clear_hits() { hits_ = {ids_.data(), scores_.data(), counts_.data(), 0, 0}; }
  void explore(const index::Index& index, const GroupQuery& query, const SearchParams& params,
               SearchPart part, index::Scored& scored);
  /// Attends to attended_, and adds what stands for the rest. `scored`: the inner products, or null.
  void attend(const GroupQuery& query, const SearchParams& params, const index::Scored* scored,
              SearchStates out, StepCost& cost);
  void attend_with_tail(const GroupQuery& query, const SearchParams& params,
                        const index::Scored* scored, SearchStates out, StepCost& cost);

  std::vector<TypeScratch> scratches_;
  size_t log_bytes_ = 0;  // of all of them
  TailReader tail_reader_;
  std::vector<uint32_t> ids_, counts_;  // hits_: `[group, k]`, `[group]`
  std::vector<float> scores_;
  index::Hits hits_;
  /// The coverage of hits_, where a mean value stands for the rest; negative: not told.
  float coverage_[kMaxGroup] = {};
  RowUnion union_;
  index::CodeScan code_scan_;
  // Used by search_and_attend(), which does all parts itself.
  index::CodeParts code_parts_;
  index::ListChoice list_choice_;
  std::span<const uint32_t> attended_;  // in union_, in a scratch or in tail_reader_
  bool attended_all_ = false;
  uint32_t group_ = 0;  // that it is reserved for
};

}  // namespace keyhole::runtime

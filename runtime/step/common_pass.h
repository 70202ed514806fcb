// Work that the steps of copies of one sequence have in common, done once for all of them (the cascade of prefixes).
// Parts of the pass over codes, and chunks of rows attended exactly, that are the same memory in several sessions are
// read once, for the query heads of all. Lists of codes, of which every session reads others, are read for one
// session after the other while they are in a thread's cache (step/common_lists.h).
//
// It runs before the steps start. Each step is planned, with parts and chunks cut by its own counts as always; those
// that several steps have in common are done here, whole, and leave every step the states that it would have computed
// itself. So an answer depends neither on the threads nor on who else is in the batch, except for rounding in kernels
// that take heads side by side. The common parts and chunks of a step are its first ones (HeadWork::common); the
// others are its own tasks.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "cpu/pool.h"
#include "index/scan/code_scan.h"
#include "runtime/step/common_lists.h"
#include "runtime/step/decode_step.h"

namespace keyhole::runtime {

class CommonPass {
 public:
  explicit CommonPass(const Engine& engine) : engine_(&engine), lists_(engine) {}

  /// Gives the number of the layer's first offloaded rows that lie in the same memory for steps i and j.
  using CommonRows = std::function<uint32_t(size_t i, size_t j)>;
  /// Finds and does what the steps of the layer have in common, on the engine's threads. The steps are all different
  /// and planned (DecodeStep::plan()). Throws what a task throws, and Error(out_of_memory); then the steps do
  /// everything by themselves.
  void run(uint32_t layer, std::span<DecodeStep* const> steps, const CommonRows& common_rows);

  /// Bytes of memory that it holds.
  [[nodiscard]] size_t bytes() const;

 private:
  enum class Kind : uint8_t { codes, exact };
  /// A part or chunk of a KV head, for the steps who_[first] to who_[first + count].
  struct Unit {
    Kind kind;
    uint32_t kv_head, number;
    size_t first;
    uint32_t count;
    double seconds;
  };
  /// The memory of one thread.
  struct alignas(64) Worker {
    index::CodeScan scan;
    std::vector<float> queries, o,
        lse;  ///< of query heads side by side: `[heads, dim]`, without dim
  };

  /// Adds the units of a head that some of `members`, numbers of steps, have in common, from `number` on. same(i, j,
  /// number): whether i and j have it in common; if so, they have all before it in common, too.
  template <class Same>
  void divide(Kind kind, uint32_t kv_head, std::span<uint32_t> members, uint32_t number,
              const Same& same);
  void add(Kind kind, uint32_t kv_head, uint32_t number, std::span<const uint32_t> members);
  void find(uint32_t kv_heads, const CommonRows& common_rows);
  void reserve(uint32_t dim);
  void do_unit(Unit& unit, Worker& worker);
  void scan_codes(const Unit& unit, Worker& worker);
  void attend(const Unit& unit, Worker& worker);
  /// Tells the steps which states are there, and what these have cost.
  void tell();
  [[nodiscard]] std::span<const uint32_t> members(const Unit& unit) const {
    return std::span(who_).subspan(unit.first, unit.count);
  }
  /// One of the unit's steps; what is in common is the same in all of them.
  [[nodiscard]] DecodeStep& first(const Unit& unit) const { return *steps_[who_[unit.first]]; }
  [[nodiscard]] uint32_t heads(const Unit& unit) const;

  const Engine* engine_;
  CommonLists lists_;
  std::vector<Worker> workers_;
  // Members of the pass under way:
  std::span<DecodeStep* const> steps_;
  std::vector<Unit> units_;
  std::vector<uint32_t> who_;
};

}  // namespace keyhole::runtime

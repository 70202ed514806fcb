// What the steps of copies of one sequence have in common, done once for all of them (the cascade of prefixes): parts of the
// pass over codes, and chunks of rows attended exactly, that are the same memory in several sessions are read once, for the
// query heads of all. Codes in lists, of which every session reads others, are read by one after the other while they are in
// a thread's cache (step/common_lists.h).
//
// It runs before the steps start. Each step is planned, with parts and chunks cut by its own counts as always; those that
// several steps have in common are done here, whole, and leave every step the states that it would have made itself. So an
// answer depends neither on the threads nor on who else is in the batch, but for rounding in kernels that take heads
// side by side. What a step has in common with others are the first of its parts and chunks (HeadWork::common); the
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

  /// How many of the layer's first offloaded rows lie in the same memory for steps i and j.
  using CommonRows = std::function<uint32_t(size_t i, size_t j)>;
  /// Finds and does what the steps of the layer, all different and planned (DecodeStep::plan()), have in common, on the
  /// engine's threads. Throws what a task throws, and Error(out_of_memory); then the steps do all by themselves.
  void run(uint32_t layer, std::span<DecodeStep* const> steps, const CommonRows& common_rows);

  /// Held by it.
  [[nodiscard]] size_t bytes() const;

 private:
  enum class Kind : uint8_t { codes, exact };
  /// A part or chunk of a KV head, for steps who_[first] to who_[first + count].
  struct Unit {
    Kind kind;
    uint32_t kv_head, number;
    size_t first;
    uint32_t count;
    double seconds;
  };
  /// A thread's memory.
  struct alignas(64) Worker {
    index::CodeScan scan;
    std::vector<float> queries, o,
        lse;  ///< of query heads side by side: `[heads, dim]`, without dim
  };

  /// The units of a head that some of `members`, numbers of steps, have in common from `number` on. same(i, j, number):
  /// whether i and j do; where they do, they have all before it in common.
  template <class Same>
  void divide(Kind kind, uint32_t kv_head, std::span<uint32_t> members, uint32_t number,
              const Same& same);
  void add(Kind kind, uint32_t kv_head, uint32_t number, std::span<const uint32_t> members);
  void find(uint32_t kv_heads, const CommonRows& common_rows);
  void reserve(uint32_t dim);
  void do_unit(Unit& unit, Worker& worker);
  void scan_codes(const Unit& unit, Worker& worker);
  void attend(const Unit& unit, Worker& worker);
  /// Tells the steps what is there, and what it has cost.
  void tell();
  [[nodiscard]] std::span<const uint32_t> members(const Unit& unit) const {
    return std::span(who_).subspan(unit.first, unit.count);
  }
  /// One of its steps: what is in common is the same in all of them.
  [[nodiscard]] DecodeStep& first(const Unit& unit) const { return *steps_[who_[unit.first]]; }
  [[nodiscard]] uint32_t heads(const Unit& unit) const;

  const Engine* engine_;
  CommonLists lists_;
  std::vector<Worker> workers_;
  // The pass under way.
  std::span<DecodeStep* const> steps_;
  std::vector<Unit> units_;
  std::vector<uint32_t> who_;
};

}  // namespace keyhole::runtime

// Codes in lists of copies of one sequence, read by all of them part after part. Every copy chooses its own lists; but what
// they choose from, the mean keys and values of all lists, is the same memory, and so is much of what they choose. A thread
// that does the same part of the lists for one copy after the other finds it in its cache: 16 copies of 128k take 0.77 of the
// time that they take one after the other on one thread, of 32k 0.85. (To multiply by the queries of several copies side by
// side saves an eighth of the ranking, and nothing where they choose different lists.)
//
// Each step gets what it would have made itself, bit for bit, as its parts are done by the same calls.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index/scan/code_scan.h"
#include "runtime/step/decode_step.h"

namespace keyhole::runtime {

/// Whether so much of what both choose from is the same memory that they are read together.
[[nodiscard]] bool read_together(const index::CodeLists& a, const index::CodeLists& b);

class CommonLists {
 public:
  explicit CommonLists(const Engine& engine) : engine_(&engine) {}

  /// Chooses and reads the lists of those of the steps of a layer, all different and planned (DecodeStep::plan()), that
  /// have enough in common, on the engine's threads, and tells the steps. Throws as CommonPass::run().
  void run(uint32_t kv_heads, std::span<DecodeStep* const> steps);

  /// Held by it.
  [[nodiscard]] size_t bytes() const;

 private:
  /// Of a KV head, steps who_[first] to who_[first + count].
  struct Group {
    uint32_t kv_head;
    size_t first;
    uint32_t count;
    uint32_t slots;  ///< the most parts that one of them has
  };
  /// What a thread does for some of the steps of a group, one after the other: their choices, or the slot-th of `slots` shares
  /// of their parts.
  struct Unit {
    uint32_t group;
    size_t first;
    uint32_t count, slot;
  };
  struct alignas(64) Worker {
    index::CodeScan scan;
  };

  void find(uint32_t kv_heads);
  void add(uint32_t kv_head, std::span<const uint32_t> members);
  void reserve();
  /// Makes units of all groups, by `slots` of each, as large as the number of threads allows.
  template <class Slots>
  void cut(const Slots& slots);
  /// body(unit, worker), on all threads.
  template <class Body>
  void for_all_units(const Body& body);
  void choose(const Unit& unit);
  void scan(const Unit& unit, Worker& worker);
  void tell();

  const Engine* engine_;
  std::vector<Worker> workers_;
  // The pass under way.
  std::span<DecodeStep* const> steps_;
  std::vector<Group> groups_;
  std::vector<uint32_t> who_;
  std::vector<StepCost> costs_;  ///< of each of who_ and slot, `[who, most slots]`
  std::vector<Unit> units_;
};

}  // namespace keyhole::runtime

// Lists of codes of several copies of one sequence, read together part after part. Every copy chooses its own lists;
// but the mean keys and values that they choose by are the same memory, and so is much of what they choose. A thread
// that does the same part of the lists for one copy after the other finds it in its cache: 16 copies of 128k take
// 0.77 of the time that they take one after the other on one thread, of 32k 0.85. (Multiplying by the queries of
// several copies side by side would save an eighth of the ranking, and nothing where they choose different lists.)
//
// Each step gets, bit for bit, the result that it would compute alone, because the same calls do its parts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index/scan/code_scan.h"
#include "runtime/step/decode_step.h"

namespace keyhole::runtime {

/// Whether a and b share so much of their memory that they are read together.
[[nodiscard]] bool read_together(const index::CodeLists& a, const index::CodeLists& b);

class CommonLists {
 public:
  explicit CommonLists(const Engine& engine) : engine_(&engine) {}

  /// Chooses and reads the lists of those steps of a layer that have enough in common, on the engine's threads, and
  /// tells the steps. The steps are all different and planned (DecodeStep::plan()). Throws as CommonPass::run() does.
  void run(uint32_t kv_heads, std::span<DecodeStep* const> steps);

  /// Bytes of memory that it holds.
  [[nodiscard]] size_t bytes() const;

 private:
  /// Of a KV head, the steps who_[first] to who_[first + count].
  struct Group {
    uint32_t kv_head;
    size_t first;
    uint32_t count;
    uint32_t slots;  ///< the most parts that one of them has
  };
  /// A thread's work for some steps of a group, one after the other: their choices, or the slot-th of `slots` shares
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
  /// Makes units of all groups, by the `slots` of each, as large as the number of threads allows.
  template <class Slots>
  void cut(const Slots& slots);
  /// Calls body(unit, worker) for all units, on all threads.
  template <class Body>
  void for_all_units(const Body& body);
  void choose(const Unit& unit);
  void scan(const Unit& unit, Worker& worker);
  void tell();

  const Engine* engine_;
  std::vector<Worker> workers_;
  // Members of the pass under way:
  std::span<DecodeStep* const> steps_;
  std::vector<Group> groups_;
  std::vector<uint32_t> who_;
  std::vector<StepCost> costs_;  ///< of each of who_ and slot, `[who, most slots]`
  std::vector<Unit> units_;
};

}  // namespace keyhole::runtime

// A file of budgets: which index, and how much of it, each (layer, KV head) of a model shall use, and by which
// pattern prompts of each (layer, query head) are attended. It is JSON:
//
//   {"keyhole_budgets": 1,                                          the format's version
//    "model": {"layers": 32, "q_heads": 32, "kv_heads": 8, "head_dim": 128},
//    "tail_partition": 16,                                          optional
//    "target": {"error": 0.05},                                     what it was made for; optional, not used
//    "machine": "...", "made_by": "...",                            likewise
//    "heads": [
//      {"layer": "all", "kv_head": "all", "index": "ivf:probe=32", "top_k": 100},
//      {"layer": 4, "kv_head": 1, "attend": "weight", "min_weight": 1e-4, "tail": "second",
//       "error_target": 0.05, "mass_target": 0, "min_keys": 0, "max_keys": 0},
//      {"layer": 0, "kv_head": "all", "dense": true},
//      {"layer": 3, "q_head": 7, "pattern": "a-shape:first=64,near=1024"}]}
//
// Entries are taken in order. Each sets the fields that it names for the heads that it names; fields that no entry
// names stay as the session's config has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/files/settings.h"

namespace keyhole {

/// Some fields of a keyhole_budget: those that an entry names.
class BudgetFields {
 public:
  template <class Field>
  void set(Field keyhole_budget::*member, Field value) {
    values_.*member = value;
    named_ |= bit_of(&(values_.*member));
  }
  /// The value of a field; nothing where the entry does not name it.
  template <class Field>
  [[nodiscard]] std::optional<Field> get(Field keyhole_budget::*member) const {
    if ((named_ & bit_of(&(values_.*member))) == 0) return std::nullopt;
    return values_.*member;
  }
  [[nodiscard]] bool empty() const { return named_ == 0; }

  /// Whether the field of this row of kBudgetSettings is named.
  [[nodiscard]] bool has(const Setting& s) const { return (named_ & bit_of(s)) != 0; }
  [[nodiscard]] const keyhole_budget& values() const { return values_; }
  /// Names the row's field and returns the values, in which the caller is about to write it.
  [[nodiscard]] keyhole_budget& name(const Setting& s) {
    named_ |= bit_of(s);
    return values_;
  }
  /// Overwrites the named fields of `budget`.
  void apply_to(keyhole_budget& budget) const;

 private:
  static uint64_t bit_of(const Setting& s) { return uint64_t{1} << (&s - kBudgetSettings.data()); }
  [[nodiscard]] uint64_t bit_of(const void* member) const {
    const auto at = static_cast<size_t>(static_cast<const std::byte*>(member) -
                                        reinterpret_cast<const std::byte*>(&values_));
    for (const Setting& s : kBudgetSettings) {
      if (s.offset == at) return bit_of(s);
    }
    throw std::logic_error("no field of a budget");
  }

  keyhole_budget values_{};
  uint64_t named_ = 0;  ///< bit i: row i of kBudgetSettings
};

struct BudgetsFile {
  /// One entry of the file. What is absent in it, it does not say.
  struct Entry {
    std::optional<uint32_t> layer, kv_head;  ///< absent: all
    /// The pattern of prompts, as keyhole_prompt_create() takes it. An entry with a pattern has nothing else but
    /// q_head and `measured`.
    std::optional<std::string> pattern;
    std::optional<uint32_t> q_head;  ///< absent: all
    std::optional<std::string> index;
    BudgetFields budget;
    std::optional<bool> dense;
    std::map<std::string, double> measured;  ///< figures for people, e.g. {"us": 12.5}
  };

  uint32_t layers = 0, q_heads = 0, kv_heads = 0, head_dim = 0;
  std::optional<uint32_t> tail_partition;
  std::map<std::string, double> target;
  std::string machine, made_by;
  std::vector<Entry> heads;
};

/// Thrown for a file of a format that this version does not know.
class AnotherFormat : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The most bytes that are read; 4096 heads take less than two MiB.
inline constexpr size_t kMaxBudgetsBytes = size_t{64} << 20;

/// Reads and checks the form: types, words, unknown and repeated keys, layers and KV heads within
/// the model, heads that are named twice. Values (a spec, a target) are for the library to judge.
/// Throws std::runtime_error whose text names the path of what is wrong ("heads[3].tail") and what
/// is allowed; AnotherFormat.
[[nodiscard]] BudgetsFile parse_budgets(std::span<const std::byte> bytes);

/// parse_budgets() of a file; texts begin with its name. Throws CannotRead (runtime/files/mapped_file.h) as well.
[[nodiscard]] BudgetsFile read_budgets(const std::filesystem::path& path);

/// The text of a file, from which parse_budgets() gives the same again.
[[nodiscard]] std::string budgets_text(const BudgetsFile& budgets);

}  // namespace keyhole

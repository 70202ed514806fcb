// Budgets, checked keyhole_budget: how much of one KV head's indexed keys a step reads, and what stands for the rest.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "keyhole/keyhole.h"
#include "runtime/files/settings.h"

namespace keyhole::runtime {

/// A keyhole_budget with the values in effect: checked, and no KEYHOLE_AUTO stands for another value.
struct Budget : keyhole_budget {
  Budget();

  [[nodiscard]] bool has_target() const { return error_target != 0.0F || mass_target != 0.0F; }
  /// Whether the head's keys must be partitioned.
  [[nodiscard]] bool needs_partitions() const {
    return (tail != KEYHOLE_TAIL_NONE && !reads_codes()) || has_target();
  }
  /// Whether every row except the heaviest is attended by its code; top_k then counts rows of the KV head.
  [[nodiscard]] bool reads_codes() const { return tail == KEYHOLE_TAIL_CODES; }
  /// Whether every field of the table is the same.
  bool operator==(const Budget& other) const;
};

/// The settings of one (layer, KV head) of a session.
struct HeadParams {
  std::string index;  ///< spec
  Budget budget;
  bool dense = false;  ///< attended exactly, like a dense layer
  bool operator==(const HeadParams&) const = default;
};

/// Throws Error(invalid_argument) "FIELD is VALUE, allowed: ..." where the field of `config`, a
/// struct of the setting's table, holds a value that is not allowed.
void check_setting(const Setting& setting, const void* config);

/// Returns the checked budget. Throws Error(invalid_argument) that names the field, the value and what is allowed,
/// and Error(version) where reserved bytes are used.
[[nodiscard]] Budget check_budget(const keyhole_budget& budget);
/// check_budget() for a budget inside another struct, whose struct_size its init function has set.
[[nodiscard]] Budget check_embedded_budget(const keyhole_budget& budget);

/// The meaning of `budget` with an index of `spec`. If it is as keyhole_budget_init() leaves it, an index with codes
/// attends all rows by their codes and the 16 heaviest exactly (58 of 64 kv questions at 128k with 2 bits, 59 with 4,
/// as exact attention), and any other index reads 100 keys without a tail.
[[nodiscard]] Budget completed(const Budget& budget, std::string_view spec);
/// Throws Error(invalid_argument) where the tail is codes and an index of `spec` has none.
void check_codes(const Budget& budget, std::string_view spec);

void check_attend(keyhole_attend_mode attend);
/// Checks min_weight and returns the weight in effect: `fallback` for 0.
[[nodiscard]] float check_min_weight(float min_weight, float fallback);
/// Checks `keys` and returns the size in effect.
[[nodiscard]] uint32_t check_tail_partition(uint32_t keys);

}  // namespace keyhole::runtime

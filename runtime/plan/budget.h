// How much of one KV head's indexed keys a step reads, and what stands in for the rest:
// keyhole_budget, checked.
#pragma once

#include <cstdint>
#include <string>

#include "keyhole/keyhole.h"
#include "runtime/files/settings.h"

namespace keyhole::runtime {

/// A keyhole_budget whose values are those in effect: checked, and none of them KEYHOLE_AUTO that
/// stands for another.
struct Budget : keyhole_budget {
  Budget();

  [[nodiscard]] bool has_target() const { return error_target != 0.0F || mass_target != 0.0F; }
  /// Whether the head's keys must be partitioned.
  [[nodiscard]] bool needs_partitions() const { return tail != KEYHOLE_TAIL_NONE || has_target(); }
  /// Whether a device can choose the partitions that are read: nothing but partitions, and so many
  /// of them.
  [[nodiscard]] bool can_choose_on_device() const {
    return attend == KEYHOLE_ATTEND_NONE && min_keys != 0 && !has_target() &&
           (tail == KEYHOLE_TAIL_CENTROID || tail == KEYHOLE_TAIL_SECOND);
  }
  /// Every field of the table is the same.
  bool operator==(const Budget& other) const;
};

/// One (layer, KV head) of a session.
struct HeadParams {
  std::string index;  ///< spec
  Budget budget;
  bool dense = false;  ///< attended exactly, like a dense layer
  bool operator==(const HeadParams&) const = default;
};

/// Throws Error(invalid_argument) "FIELD is VALUE, allowed: ..." where the field of `config`, a
/// struct of the setting's table, holds a value that is not allowed.
void check_setting(const Setting& setting, const void* config);

/// Throws Error(invalid_argument) that names the field, the value and what is allowed, and
/// Error(version) where reserved bytes are used.
[[nodiscard]] Budget check_budget(const keyhole_budget& budget);
/// The same of a budget inside another struct, whose struct_size its init function has set.
[[nodiscard]] Budget check_embedded_budget(const keyhole_budget& budget);

void check_attend(keyhole_attend_mode attend);
/// The weight in effect: `fallback` for 0.
[[nodiscard]] float check_min_weight(float min_weight, float fallback);
/// The size in effect.
[[nodiscard]] uint32_t check_tail_partition(uint32_t keys);

}  // namespace keyhole::runtime

#include "runtime/budget.h"

#include <algorithm>

#include "runtime/config.h"

namespace keyhole::runtime {
namespace {

[[noreturn]] void bad(const std::string& text) { throw Error(Status::invalid_argument, text); }

void check_tail(keyhole_tail_mode tail) {
  if (tail < KEYHOLE_TAIL_NONE || tail > KEYHOLE_TAIL_SECOND) {
    bad("tail is " + std::to_string(tail) +
        ", allowed: KEYHOLE_TAIL_NONE (0), KEYHOLE_TAIL_MEAN (1), KEYHOLE_TAIL_CENTROID (2), "
        "KEYHOLE_TAIL_SECOND (3)");
  }
}

void check_target(const char* field, float target) {
  // Written so that NaN is refused.
  if (target == 0.0F || (target > 0.0F && target < 1.0F)) return;
  bad(std::string(field) + " is " + std::to_string(target) +
      ", allowed: above 0 and below 1, or 0 for none");
}

}  // namespace

void check_attend(keyhole_attend_mode attend) {
  if (attend < KEYHOLE_ATTEND_TOPK || attend > KEYHOLE_ATTEND_NONE) {
    bad("attend is " + std::to_string(attend) +
        ", allowed: KEYHOLE_ATTEND_TOPK (0), KEYHOLE_ATTEND_SCORED (1), KEYHOLE_ATTEND_WEIGHT (2), "
        "KEYHOLE_ATTEND_NONE (3)");
  }
}

float check_min_weight(float min_weight, float fallback) {
  if (min_weight == 0.0F) return fallback;
  if (!(min_weight > 0.0F && min_weight < 1.0F)) {
    bad("min_weight is " + std::to_string(min_weight) + ", allowed: above 0 and below 1");
  }
  return min_weight;
}

uint32_t check_tail_partition(uint32_t keys) {
  if (keys == KEYHOLE_AUTO) return kDefaultTailPartition;
  if (keys < 4 || keys > 1024) {
    bad("tail_partition is " + std::to_string(keys) +
        ", allowed: 4..1024, or KEYHOLE_AUTO (0) for " + std::to_string(kDefaultTailPartition));
  }
  return keys;
}

Budget check_budget(const keyhole_budget& b) {
  if (b.top_k < 1 || b.top_k > kMaxTokens) {
    bad("top_k is " + std::to_string(b.top_k) + ", allowed: 1.." + std::to_string(kMaxTokens));
  }
  check_attend(b.attend);
  check_tail(b.tail);
  check_target("error_target", b.error_target);
  check_target("mass_target", b.mass_target);
  if (b.max_keys != 0 && b.min_keys > b.max_keys) {
    bad("min_keys is " + std::to_string(b.min_keys) + ", allowed: up to max_keys, which is " +
        std::to_string(b.max_keys));
  }
  if (b.attend == KEYHOLE_ATTEND_NONE && b.tail == KEYHOLE_TAIL_NONE && b.error_target == 0.0F &&
      b.mass_target == 0.0F) {
    bad("attend is KEYHOLE_ATTEND_NONE, which needs a tail or a target: nothing would be read");
  }
  if (std::any_of(std::begin(b.reserved), std::end(b.reserved), [](uint8_t x) { return x != 0; })) {
    throw Error(Status::version, std::string("budget has fields that version ") +
                                     keyhole_version() +
                                     " does not know: its reserved bytes are not 0");
  }
  Budget budget;
  budget.top_k = b.top_k;
  budget.attend = b.attend;
  budget.min_weight = check_min_weight(b.min_weight, kDefaultMinWeight);
  budget.tail = b.tail;
  budget.error_target = b.error_target;
  budget.mass_target = b.mass_target;
  budget.min_keys = b.min_keys;
  budget.max_keys = b.max_keys;
  return budget;
}

Budget check_embedded_budget(const keyhole_budget& b) {
  if (b.struct_size != sizeof(keyhole_budget)) {
    bad("budget.struct_size is " + std::to_string(b.struct_size) +
        ", needed: " + std::to_string(sizeof(keyhole_budget)) +
        ", as the init function of the struct around it sets");
  }
  return check_budget(b);
}

keyhole_budget public_budget(const Budget& budget) {
  keyhole_budget b;
  keyhole_budget_init(&b);
  b.top_k = budget.top_k;
  b.attend = budget.attend;
  b.min_weight = budget.min_weight;
  b.tail = budget.tail;
  b.error_target = budget.error_target;
  b.mass_target = budget.mass_target;
  b.min_keys = budget.min_keys;
  b.max_keys = budget.max_keys;
  return b;
}

}  // namespace keyhole::runtime

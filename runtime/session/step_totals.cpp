#include "runtime/session/step_totals.h"

namespace keyhole::runtime {

void StepTotals::add(const StepCost& cost, uint32_t tokens) {
  totals_.attends += tokens;
  totals_.keys_scored += cost.keys_scored;
  totals_.keys_offered += cost.keys_offered;
  totals_.keys_attended += cost.keys_attended;
  totals_.bytes_read += cost.bytes_read;
  totals_.search_seconds += cost.search_seconds;
  totals_.offload_seconds += cost.offload_seconds;
  totals_.resident_seconds += cost.resident_seconds;
  totals_.tail_seconds += cost.tail_seconds;
  totals_.keys_opened += cost.keys_opened;
  totals_.targets_missed += cost.targets_missed;
  totals_.codes_doubted += cost.codes_doubted;
  totals_.codes_given_up += cost.codes_given_up;
}

void StepTotals::add_search(const StepCost& cost) {
  totals_.keys_scored += cost.keys_scored;
  totals_.keys_offered += cost.keys_offered;
  totals_.bytes_read += cost.bytes_read;
  totals_.search_seconds += cost.search_seconds;
}

void StepTotals::add_on_device(uint64_t tokens, uint64_t keys_attended) {
  totals_.attends += tokens;
  totals_.keys_attended += keys_attended;
}

void StepTotals::add_doubts(uint64_t doubted, uint64_t given_up) {
  totals_.codes_doubted += doubted;
  totals_.codes_given_up += given_up;
}

void StepTotals::add_seconds(double append, double attend) {
  totals_.append_seconds += append;
  totals_.attend_seconds += attend;
}

}  // namespace keyhole::runtime

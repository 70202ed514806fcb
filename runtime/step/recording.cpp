#include "runtime/step/recording.h"

#include <algorithm>
#include <cmath>

#include "cpu/attention_state.h"

namespace keyhole::runtime {

void begin_record(HeadRecord& record, const GroupQuery& query, uint32_t exact_begin) {
  record.kv = query.kv;
  record.exact_begin = exact_begin;
  record.attended.clear(exact_begin);
  std::fill(record.unread_lse.begin(), record.unread_lse.end(), kMinusInf);
  std::copy_n(query.queries, record.queries.size(), record.queries.data());
}

void record_unread(HeadRecord& record, const float* read_lse, StateView other,
                   const float* missing) {
  for (uint32_t h = 0; h < record.group; ++h) {
    const double beside = other.lse == nullptr ? kMinusInf : other.lse[h];
    const double seen = cpu::add_logs<double>(beside, read_lse[h]);
    if (seen == kMinusInf) continue;
    const double share = missing[h];
    record.unread_lse[h] = static_cast<float>(seen + std::log(share / (1.0 - share)));
  }
}

void add_sinks(HeadRecord& record, const float* sinks) {
  if (sinks == nullptr) return;
  const auto dim = static_cast<uint32_t>(record.queries.size() / record.group);
  cpu::add_sinks(sinks, record.group, dim, {record.resident_o.data(), record.resident_lse.data()});
}

void end_record(HeadRecord& record, const HeadStates& states, StateView out) {
  if (states.resident.o != nullptr) record.set_resident(states.resident);
  std::copy_n(out.o, record.o.size(), record.o.data());
  for (uint32_t h = 0; h < record.group; ++h) {
    cpu::LogSum<double> read;
    for (const StateView& s : states.read()) read.cover(s.lse[h]);
    for (const StateView& s : states.read()) read.add(s.lse[h]);
    record.read_lse[h] = static_cast<float>(read.value());
    // A tail that is in the output stands for what was not read.
    if (states.tail.lse != nullptr && states.tail.lse[h] != kMinusInf) {
      record.unread_lse[h] = states.tail.lse[h];
    }
  }
}

}  // namespace keyhole::runtime

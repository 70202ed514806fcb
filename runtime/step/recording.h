// Fills in the record of a KV head that is to be audited.
#pragma once

#include <span>

#include "runtime/step/audit_record.h"
#include "runtime/step/head_states.h"
#include "runtime/step/query.h"

namespace keyhole::runtime {

/// Records, before the step, the queries and the rows that will be attended without a search.
void begin_record(HeadRecord& record, const GroupQuery& query, uint32_t exact_begin);

/// Records the estimate of what is missing, `[group]` shares of the mass, where no tail is in the output. read_lse:
/// that of the rows read; other: what the estimate counts beside them (null: nothing).
void record_unread(HeadRecord& record, const float* read_lse, StateView other,
                   const float* missing);

/// Adds the learned sinks `[group]`, which are part of the truth, to the record's resident state; null: there are
/// none.
void add_sinks(HeadRecord& record, const float* sinks);

/// Records, after the merge, the output and the states that it was merged from, without the resident state where the
/// step has none.
void end_record(HeadRecord& record, const HeadStates& states, StateView out);

}  // namespace keyhole::runtime

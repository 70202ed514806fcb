// How a step fills in the record of a KV head that is to be audited.
#pragma once

#include <span>

#include "runtime/step/audit_record.h"
#include "runtime/step/head_states.h"
#include "runtime/step/query.h"

namespace keyhole::runtime {

/// Before the step: the queries, and which rows will be attended without a search.
void begin_record(HeadRecord& record, const GroupQuery& query, uint32_t exact_begin);

/// What the estimate says is missing, `[group]` shares of the mass, where no tail is in the output. read_lse: of the
/// rows read; other: of what the estimate counts beside them (null: nothing).
void record_unread(HeadRecord& record, const float* read_lse, StateView other,
                   const float* missing);

/// The record's resident state gets the learned sinks `[group]`, which are part of the truth; null: there are none.
void add_sinks(HeadRecord& record, const float* sinks);

/// After the merge: the output and what it was merged from; without the resident state where the step has none.
void end_record(HeadRecord& record, const HeadStates& states, StateView out);

}  // namespace keyhole::runtime

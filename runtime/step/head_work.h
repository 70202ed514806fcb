// The work of one KV head in a step, beside its resident tokens.
#pragma once

#include "index/index.h"
#include "runtime/step/audit_record.h"
#include "runtime/step/search_params.h"

namespace keyhole::runtime {

struct HeadWork {
  const index::Index* index = nullptr;          ///< null: no search
  KvView kv;                                    ///< all offloaded rows
  uint32_t exact_begin = 0;                     ///< rows [exact_begin, kv.keys.tokens) exactly
  uint32_t position = index::kUnknownPosition;  ///< token position of the queries
  SearchParams search;           ///< its k is at most DecodeStep::capacity_k() in effect
  HeadRecord* record = nullptr;  ///< not null: to be filled in for an audit
  /// The number of first parts and chunks (step/step_plan.h) whose states are there before the step starts, see
  /// CommonPass.
  struct Common {
    uint32_t codes = 0, chunks = 0;
    bool has_chosen = false;  ///< among its lists
    [[nodiscard]] bool none() const { return codes == 0 && chunks == 0; }
  } common;
};

}  // namespace keyhole::runtime

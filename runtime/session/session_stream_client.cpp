#include "runtime/session/session_stream_client.h"

namespace keyhole::runtime {

void SessionStreamClient::flush(uint32_t layer) {
  const ModelShape& m = parts_.engine.model();
  parts_.memory.check(parts_.params.offload_bytes(m, layer, row_block()), "appending tokens");
  parts_.sequence.flush(layer);
}

void SessionStreamClient::append_published(uint32_t layer, const gpu::Published& published,
                                           uint32_t tokens) {
  const ModelShape& m = parts_.engine.model();
  const size_t token_bytes = m.of(layer).token_bytes(m.kv_dtype);
  Sequence& sequence = parts_.sequence;
  gpu::Published one = published;
  for (uint32_t i = 0; i < tokens; ++i) {
    sequence.prepare_append(layer, 1);  // before rows leave the host's copy
    const uint32_t left =
        steps_->update_host_copy(layer, one, sequence.staging_k(), sequence.staging_v());
    if (left != 0) sequence.store_staged(layer, left);
    one.k += token_bytes;
    one.v += token_bytes;
  }
}

void SessionStreamClient::begin_audit(const StreamStep& step, const gpu::Published& published) {
  const LayerShape m = parts_.engine.model().of(step.layer);
  audits_.open(step);
  for (uint32_t h = 0; h < m.kv_heads; ++h) {
    HeadRecord* record = audits_.add(h, parts_.keeper.head(step.layer, h).params.budget);
    if (record == nullptr) continue;
    if (step.coded) {
      audits_.take_coded(h, published.q + size_t{h} * m.group() * m.head_dim,
                         parts_.sequence.view(step.layer, h));
      continue;
    }
    parts_.steps.one().work(h).record = record;
  }
}

}  // namespace keyhole::runtime

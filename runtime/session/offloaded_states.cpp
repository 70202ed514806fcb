#include "runtime/session/offloaded_states.h"

#include <algorithm>
#include <string>
#include <vector>

namespace keyhole::runtime {

void OffloadedStates::take_queries(uint32_t layer, const TensorView& q) {
  const LayerShape m = parts_.engine.model().of(layer);
  if (!parts_.sequence.layer(layer).offloads()) {
    throw Error(Status::unsupported, "layer " + std::to_string(layer) +
                                         " has a sliding window: its tokens are the session's to "
                                         "attend, and none of them is offloaded");
  }
  check_finite(parts_.engine.kernels(), q, "q", 0, 1, DType::f32);
  for (uint32_t h = 0; h < m.q_heads; ++h) {
    parts_.engine.kernels().to_f32[static_cast<int>(q.dtype)](
        q.row(0, h), parts_.steps.one().queries() + size_t{h} * m.head_dim, m.head_dim);
  }
}

void OffloadedStates::give_state(uint32_t layer, const float* o, const float* lse,
                                 const TensorOut& out, float* out_lse) const {
  const LayerShape m = parts_.engine.model().of(layer);
  check_answer(parts_.engine.kernels(), reinterpret_cast<const std::byte*>(o), DType::f32,
               size_t{m.q_heads} * m.head_dim);
  for (uint32_t h = 0; h < m.q_heads; ++h) {
    parts_.engine.kernels().from_f32[static_cast<int>(out.dtype)](o + size_t{h} * m.head_dim,
                                                                  out.row(0, h), m.value_dim);
  }
  if (out_lse != nullptr) std::copy_n(lse, m.q_heads, out_lse);
}

template <class Call>
void OffloadedStates::by_way_of_host(uint32_t layer, const TensorView& q, const TensorOut& out,
                                     float* lse, const Call& call) {
  if (!q.on_device()) return call(q, out, lse);
  const LayerShape m = parts_.engine.model().of(layer);
  const gpu::Stream stream = parts_.stream.runner("tensors in device memory").stream();
  DeviceRowsReader& copies = parts_.stream.copies();
  RowBuffer queries;
  const TensorView host_q = copies.read(q, "q", stream, queries);
  std::vector<std::byte> o(m.q_heads * out.row_bytes());
  std::vector<float> sums(m.q_heads);
  call(host_q, dense_tensor(o.data(), 1, m.q_heads, m.value_dim, out.dtype), sums.data());
  copies.write(o.data(), out, stream);
  if (lse != nullptr) copies.write(sums.data(), sums.size(), lse, stream);
}

void OffloadedStates::attend_offloaded(uint32_t layer, const TensorView& q, const TensorOut& out,
                                       float* lse) {
  by_way_of_host(layer, q, out, lse, [&](const TensorView& hq, const TensorOut& ho, float* sums) {
    attend_offloaded_on_host(layer, hq, ho, sums);
  });
}

void OffloadedStates::attend_tokens(uint32_t layer, const TensorView& q, const TokenChoice& choice,
                                    const TensorOut& out, float* lse) {
  by_way_of_host(layer, q, out, lse, [&](const TensorView& hq, const TensorOut& ho, float* sums) {
    attend_tokens_on_host(layer, hq, choice, ho, sums);
  });
}

void OffloadedStates::attend_offloaded_on_host(uint32_t layer, const TensorView& q,
                                               const TensorOut& out, float* lse) {
  const Stopwatch watch;
  take_queries(layer, q);
  if (parts_.codes.of_step(layer) != nullptr) {
    throw Error(Status::unsupported,
                "the device attends the offloaded tokens of layer " + std::to_string(layer) +
                    " by codes, together with sink and window; offload_placement "
                    "KEYHOLE_PLACE_HOST keeps the codes on the host");
  }
  parts_.prompts.release();
  parts_.indexing.advance_append(layer);
  const double append_seconds = watch.seconds();
  parts_.work.prepare(parts_.steps.one(), layer, parts_.sequence.tokens(layer) - 1, 1);
  parts_.steps.one().start_offloaded(layer);
  StepCost cost;
  try {
    cost = parts_.steps.one().finish();
  } catch (...) {
    parts_.steps.count_bytes();
    throw;
  }
  give_state(layer, parts_.steps.one().o(), parts_.steps.one().lse(), out, lse);
  parts_.totals.add(cost);
  parts_.steps.count_bytes();
  parts_.totals.add_seconds(append_seconds, watch.seconds());
}

void OffloadedStates::attend_tokens_on_host(uint32_t layer, const TensorView& q,
                                            const TokenChoice& choice, const TensorOut& out,
                                            float* lse) {
  const Stopwatch watch;
  take_queries(layer, q);
  const uint32_t kv_heads = parts_.engine.model().of(layer).kv_heads;
  const KvView offloaded = parts_.sequence.view(layer);
  const KvPieces resident = parts_.sequence.resident().host_rows(layer);
  std::vector<HeadTokens> heads(kv_heads);
  for (uint32_t h = 0; h < kv_heads; ++h) {
    heads[h] = {offloaded.head(h), resident.head(h)};
  }
  if (chosen_ == nullptr) chosen_ = std::make_unique<ChosenTokens>(parts_.engine);
  ChosenTokens& chosen = *chosen_;
  const StepCost cost = chosen.attend(layer, heads, parts_.sequence.sink(layer), choice,
                                      parts_.steps.one().queries());
  give_state(layer, chosen.results().o(), chosen.results().lse(), out, lse);
  parts_.totals.add(cost);
  parts_.steps.count_bytes();
  parts_.totals.add_seconds(0.0, watch.seconds());
}

void OffloadedStates::search_tokens(uint32_t layer, const TensorView& q, TokenSearch::Found found) {
  take_queries(layer, q);
  parts_.indexing.advance_append(layer);
  const uint32_t kv_heads = parts_.engine.model().of(layer).kv_heads;
  const uint32_t k = std::min(found.top_k, parts_.sequence.rows(layer));
  found.first_token = parts_.sequence.sink(layer);
  std::vector<TokenSearch::Head> heads(kv_heads);
  for (uint32_t h = 0; h < kv_heads; ++h) {
    heads[h] = {nullptr, parts_.sequence.view(layer, h), parts_.sequence.tokens(layer) - 1,
                parts_.engine.model().logits_of(layer)};
    if (params_->mode == KEYHOLE_MODE_EXACT || keeper_->is_dense(layer, h)) continue;
    const HeadIndex& head = keeper_->head(layer, h);
    if (head.indexed() != 0) heads[h].index = head.index.get();
  }
  if (search_ == nullptr) search_ = std::make_unique<TokenSearch>(parts_.engine);
  TokenSearch& search = *search_;
  if (!search.fits(heads, k)) {
    std::vector<Selection::Use> uses;
    for (const HeadIndex& head : keeper_->heads()) {
      if (head.indexed() != 0) uses.push_back({head.index.get(), KEYHOLE_ATTEND_TOPK});
    }
    search.reserve(uses, k);
  }
  const StepCost cost = search.search(layer, heads, k, parts_.steps.one().queries(), found);
  parts_.totals.add_search(cost);
}

}  // namespace keyhole::runtime

// What engines with attention of their own ask for: the state of the offloaded tokens alone, of tokens that they have
// chosen, and the tokens that a search chooses. Nothing is appended, sink and window stay as they are.
#include <algorithm>
#include <string>

#include "runtime/session/session.h"

namespace keyhole::runtime {

void Session::take_queries(uint32_t layer, const RowsIn& q) {
  const LayerShape m = engine_->model().of(layer);
  if (engine_->model().slides(layer)) {
    throw Error(Status::unsupported, "layer " + std::to_string(layer) +
                                         " has a sliding window: its tokens are the session's to "
                                         "attend, and none of them is offloaded");
  }
  check_finite(engine_->kernels(), q, "q", 0, 1, DType::f32);
  for (uint32_t h = 0; h < m.q_heads; ++h) {
    engine_->kernels().to_f32[static_cast<int>(q.dtype)](
        q.row(0, h), step_.queries() + size_t{h} * m.head_dim, m.head_dim);
  }
}

void Session::give_state(uint32_t layer, const float* o, const float* lse, const RowsOut& out,
                         float* out_lse) const {
  const LayerShape m = engine_->model().of(layer);
  check_answer(engine_->kernels(), reinterpret_cast<const std::byte*>(o), DType::f32,
               size_t{m.q_heads} * m.head_dim);
  for (uint32_t h = 0; h < m.q_heads; ++h) {
    engine_->kernels().from_f32[static_cast<int>(out.dtype)](
        o + size_t{h} * m.head_dim, out.data + h * out.head_stride, m.value_dim);
  }
  if (out_lse != nullptr) std::copy_n(lse, m.q_heads, out_lse);
}

template <class Call>
void Session::by_way_of_host(uint32_t layer, const RowsIn& q, const RowsOut& out, float* lse,
                             const Call& call) {
  if (!q.on_device) return call(q, out, lse);
  const LayerShape m = engine_->model().of(layer);
  const gpu::Stream stream = runner("tensors in device memory").stream();
  DeviceRowsReader& copies = device_rows_reader();
  RowBuffer queries;
  const RowsIn host_q = copies.read(q, "q", stream, queries);
  const size_t row = m.value_dim * dtype_size(out.dtype);
  std::vector<std::byte> o(m.q_heads * row);
  std::vector<float> sums(m.q_heads);
  call(host_q, RowsOut{o.data(), row, out.dtype}, sums.data());
  copies.write(o.data(), row, m.q_heads, out, stream);
  if (lse == nullptr) return;
  copies.write(reinterpret_cast<const std::byte*>(sums.data()), sums.size() * sizeof(float), 1,
               RowsOut{reinterpret_cast<std::byte*>(lse)}, stream);
}

void Session::attend_offloaded(uint32_t layer, const RowsIn& q, const RowsOut& out, float* lse) {
  by_way_of_host(layer, q, out, lse, [&](const RowsIn& hq, const RowsOut& ho, float* sums) {
    attend_offloaded_on_host(layer, hq, ho, sums);
  });
}

void Session::attend_tokens(uint32_t layer, const RowsIn& q, const TokenChoice& choice,
                            const RowsOut& out, float* lse) {
  by_way_of_host(layer, q, out, lse, [&](const RowsIn& hq, const RowsOut& ho, float* sums) {
    attend_tokens_on_host(layer, hq, choice, ho, sums);
  });
}

void Session::attend_offloaded_on_host(uint32_t layer, const RowsIn& q, const RowsOut& out,
                                       float* lse) {
  const Stopwatch watch;
  take_queries(layer, q);
  if (codes_of_step(layer) != nullptr) {
    throw Error(Status::unsupported,
                "the device attends the offloaded tokens of layer " + std::to_string(layer) +
                    " by codes, together with sink and window; offload_placement "
                    "KEYHOLE_PLACE_HOST keeps the codes on the host");
  }
  release_prompt();
  advance_append(layer);
  const double append_seconds = watch.seconds();
  prepare_work(layer, tokens(layer) - 1);
  step_.start_offloaded(layer);
  StepCost cost;
  try {
    cost = step_.finish();
  } catch (...) {
    step_bytes_ = step_.bytes();
    throw;
  }
  give_state(layer, step_.o(), step_.lse(), out, lse);
  add_cost(cost);
  totals_.append_seconds += append_seconds;
  totals_.attend_seconds += watch.seconds();
}

void Session::attend_tokens_on_host(uint32_t layer, const RowsIn& q, const TokenChoice& choice,
                                    const RowsOut& out, float* lse) {
  const Stopwatch watch;
  take_queries(layer, q);
  const uint32_t kv_heads = engine_->model().of(layer).kv_heads;
  std::vector<HeadTokens> heads(kv_heads);
  for (uint32_t h = 0; h < kv_heads; ++h) {
    heads[h] = {sequence_.view(layer, h), sequence_.resident().host_rows(layer, h)};
  }
  if (chosen_tokens_ == nullptr) chosen_tokens_ = std::make_unique<ChosenTokens>(*engine_);
  ChosenTokens& chosen = *chosen_tokens_;
  const StepCost cost = chosen.attend(layer, heads, sequence_.sink(layer), choice, step_.queries());
  give_state(layer, chosen.results().o(), chosen.results().lse(), out, lse);
  add_cost(cost);
  totals_.attend_seconds += watch.seconds();
}

void Session::search_tokens(uint32_t layer, const RowsIn& q, TokenSearch::Found found) {
  take_queries(layer, q);
  advance_append(layer);
  const uint32_t kv_heads = engine_->model().of(layer).kv_heads;
  const uint32_t k = std::min(found.top_k, sequence_.rows(layer));
  found.first_token = sequence_.sink(layer);
  std::vector<TokenSearch::Head> heads(kv_heads);
  for (uint32_t h = 0; h < kv_heads; ++h) {
    heads[h] = {nullptr, sequence_.view(layer, h), tokens(layer) - 1,
                engine_->model().logits_of(layer)};
    if (params_.mode == KEYHOLE_MODE_EXACT || keeper_.is_dense(layer, h)) continue;
    const HeadIndex& head = keeper_.head(layer, h);
    if (head.indexed() != 0) heads[h].index = head.index.get();
  }
  if (token_search_ == nullptr) token_search_ = std::make_unique<TokenSearch>(*engine_);
  TokenSearch& search = *token_search_;
  if (!search.fits(heads, k)) {
    std::vector<Selection::Use> uses;
    for (const HeadIndex& head : keeper_.heads()) {
      if (head.indexed() != 0) uses.push_back({head.index.get(), KEYHOLE_ATTEND_TOPK});
    }
    search.reserve(uses, k);
  }
  const StepCost cost = search.search(layer, heads, k, step_.queries(), found);
  totals_.keys_scored += cost.keys_scored;
  totals_.keys_offered += cost.keys_offered;
  totals_.bytes_read += cost.bytes_read;
  totals_.search_seconds += cost.search_seconds;
}

size_t Session::token_call_bytes() const {
  return (chosen_tokens_ == nullptr ? 0 : chosen_tokens_->bytes()) +
         (token_search_ == nullptr ? 0 : token_search_->bytes());
}

}  // namespace keyhole::runtime

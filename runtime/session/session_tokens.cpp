#include "runtime/session/session_tokens.h"

#include <algorithm>
#include <string>

namespace keyhole::runtime {
namespace {

// Tokens per task when rows are checked: tens of microseconds of work.
constexpr uint32_t kTokensPerCheck = 64;

/// check(begin, end) of all tokens, on the engine's threads where they are many.
template <class Check>
void check_tokens(const Engine& engine, uint32_t tokens, const Check& check) {
  if (tokens == 0) return;
  const auto piece = [&](uint32_t task, uint32_t) {
    const uint32_t begin = task * kTokensPerCheck;
    check(begin, std::min(tokens, begin + kTokensPerCheck));
  };
  if (tokens <= kTokensPerCheck) return piece(0, 0);
  engine.pool().run((tokens + kTokensPerCheck - 1) / kTokensPerCheck, piece);
}

}  // namespace

void check_as_many(const TensorView& q, const TensorView& k) {
  if (q.tokens == k.tokens) return;
  throw Error(Status::invalid_argument, "tensor q has " + std::to_string(q.tokens) +
                                            " tokens, needed: as many as k, " +
                                            std::to_string(k.tokens));
}

void SessionTokens::check_append(uint32_t layer, const TensorView& k, const TensorView& v) const {
  const uint32_t n = k.tokens;
  if (v.tokens != n) {
    throw Error(Status::invalid_argument, "tensor v has " + std::to_string(v.tokens) +
                                              " tokens, needed: as many as k, " +
                                              std::to_string(n));
  }
  check_room(layer, n);
  const DType to = engine_->model().kv_dtype;
  check_tokens(*engine_, n, [&](uint32_t begin, uint32_t end) {
    check_finite(engine_->kernels(), k, "k", begin, end, to);
    check_finite(engine_->kernels(), v, "v", begin, end, to);
  });
}

void SessionTokens::check_queries(const TensorView& q, const TokenSample& sample) const {
  check_tokens(*engine_, q.tokens, [&](uint32_t begin, uint32_t end) {
    check_finite(engine_->kernels(), q, "q", begin, end, DType::f32, sample);
  });
}

void SessionTokens::check_room(uint32_t layer, uint32_t n) const {
  const uint64_t total = uint64_t{sequence_->tokens(layer)} + n;
  if (total > params_->max_tokens) {
    throw Error(Status::invalid_argument,
                "layer " + std::to_string(layer) + " would hold " + std::to_string(total) +
                    " tokens, allowed: max_tokens = " + std::to_string(params_->max_tokens));
  }
  const std::optional<uint64_t> more = sequence_->layer(layer).more_bytes(n);
  if (more) memory_->check(*more, "appending tokens");
}

void SessionTokens::prefill(uint32_t layer, const TensorView& k, const TensorView& v,
                            const TensorView* q, const TokenSample& sample) {
  check_append(layer, k, v);
  // The device encodes rows of earlier calls while the host takes these in: behind them it would keep the stream from
  // the next call's copies.
  stream_->encode_pinned(layer);
  if (q != nullptr) {
    if (sample.step == 1) check_as_many(*q, k);
    check_queries(*q, sample);
  }
  append_prompt(layer, k, v, q, sample);
  finish_taking_in(layer);
}

void SessionTokens::take_in(uint32_t layer, const TensorView& k, const TensorView& v) {
  check_append(layer, k, v);
  append_prompt(layer, k, v, nullptr);
}

void SessionTokens::finish_taking_in(uint32_t layer) {
  extended_->note_change(layer);
  stream_->pin_codes(layer);
}

void SessionTokens::append_prompt(uint32_t layer, const TensorView& k, const TensorView& v,
                                  const TensorView* q, const TokenSample& sample) {
  const uint32_t before = sequence_->tokens(layer);
  try {
    if (q != nullptr && sequence_->layer(layer).offloads()) {
      keeper_->sample_queries(layer, *q, sample, before);
    }
    sequence_->append(layer, k, v);
  } catch (...) {
    keeper_->forget_queries(layer, before);
    throw;
  }
}

void SessionTokens::truncate_layer(uint32_t layer, uint32_t n) {
  const uint32_t rows = sequence_->split(layer, n).rows;
  audits_->finish_reading(layer, rows);
  keeper_->truncate(layer, rows, n);
  stream_->truncate_codes(layer, rows);
  sequence_->truncate(layer, n);
  extended_->note_change(layer);
}

void SessionTokens::truncate(std::span<const uint32_t> to) {
  for (uint32_t layer = 0; layer < to.size(); ++layer) {
    sequence_->layer(layer).check_truncation(to[layer]);
  }
  for (uint32_t layer = 0; layer < to.size(); ++layer) {
    if (sequence_->tokens(layer) > to[layer]) truncate_layer(layer, to[layer]);
  }
}

}  // namespace keyhole::runtime

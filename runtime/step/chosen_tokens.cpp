#include "runtime/step/chosen_tokens.h"

#include <algorithm>
#include <string>

#include "cpu/attention.h"

namespace keyhole::runtime {
namespace {

// Rows per task, as in a step: enough to outweigh a hand-off.
constexpr size_t kChunk = 1024;

std::span<const uint32_t> chunk_of(const std::vector<uint32_t>& rows, uint32_t chunk) {
  const auto all = std::span(rows).subspan(chunk * kChunk);
  return all.first(std::min(kChunk, all.size()));
}

}  // namespace

ChosenTokens::ChosenTokens(const Engine& engine)
    : engine_(&engine),
      rows_(engine.model().largest().kv_heads),
      marks_(engine.pool().threads()),
      results_(engine.model().largest().q_heads, engine.model().most([](const LayerShape& s) {
        return size_t{s.q_heads} * s.head_dim;
      })) {}

size_t ChosenTokens::bytes() const {
  size_t bytes = results_.bytes() + (o_.capacity() + lse_.capacity()) * sizeof(float) +
                 tasks_.capacity() * sizeof(Task) + merged_.capacity() * sizeof(StateView);
  for (const auto& m : marks_) bytes += m.capacity() * sizeof(uint64_t);
  for (const Rows& r : rows_) {
    bytes += r.offloaded.capacity() * sizeof(uint32_t);
    for (const auto& piece : r.resident) bytes += piece.capacity() * sizeof(uint32_t);
  }
  return bytes;
}

namespace {

size_t tokens_of(const HeadTokens& tokens) {
  size_t total = tokens.offloaded.keys.tokens;
  for (uint32_t p = 0; p < tokens.resident.count; ++p) {
    total += tokens.resident.pieces[p].keys.tokens;
  }
  return total;
}

/// Ids are distinct: a count of more than there are tokens is not one of ids that a caller has.
void check_counts(std::span<const HeadTokens> heads, const uint32_t* counts) {
  for (size_t h = 0; h < heads.size(); ++h) {
    const size_t total = tokens_of(heads[h]);
    if (counts[h] <= total) continue;
    throw Error(Status::invalid_argument, "counts[" + std::to_string(h) + "] is " +
                                              std::to_string(counts[h]) + ", allowed: 0.." +
                                              std::to_string(total) + ", the layer's tokens");
  }
}

}  // namespace

void ChosenTokens::find_rows(uint32_t kv_head, const HeadTokens& tokens, uint32_t sink,
                             std::span<const uint32_t> ids, std::vector<uint64_t>& marks) {
  Rows& rows = rows_[kv_head];
  rows.offloaded.clear();
  for (auto& piece : rows.resident) piece.clear();
  const size_t offloaded = tokens.offloaded.keys.tokens;
  const size_t total = tokens_of(tokens);
  const auto refuse = [&](size_t done, const std::string& text) {
    for (size_t i = 0; i < done; ++i) marks[ids[i] / 64] = 0;
    throw Error(Status::invalid_argument,
                "ids of KV head " + std::to_string(kv_head) + ": " + text);
  };
  if (marks.size() < total / 64 + 1) marks.resize(total / 64 + 1);
  for (size_t i = 0; i < ids.size(); ++i) {
    const uint32_t id = ids[i];
    if (id >= total) {
      refuse(i, "number " + std::to_string(i) + " is " + std::to_string(id) +
                    (total == 0 ? ", and the layer holds no token"
                                : ", allowed: 0.." + std::to_string(total - 1)));
    }
    const uint64_t bit = uint64_t{1} << (id % 64);
    if ((marks[id / 64] & bit) != 0) {
      refuse(i, std::to_string(id) + " comes twice, allowed: distinct ids");
    }
    marks[id / 64] |= bit;
    if (id >= sink && id - sink < offloaded) {
      rows.offloaded.push_back(id - sink);
      continue;
    }
    size_t row = id < sink ? id : id - offloaded;
    uint32_t piece = 0;
    while (row >= tokens.resident.pieces[piece].keys.tokens) {
      row -= tokens.resident.pieces[piece++].keys.tokens;
    }
    rows.resident[piece].push_back(static_cast<uint32_t>(row));
  }
  for (const uint32_t id : ids) marks[id / 64] = 0;
}

StepCost ChosenTokens::attend(uint32_t layer, std::span<const HeadTokens> heads, uint32_t sink,
                              const TokenChoice& choice, const float* queries) {
  check_counts(heads, choice.counts);
  const LayerShape shape = engine_->model().of(layer);
  group_ = shape.group();
  dim_ = shape.head_dim;
  logits_ = engine_->model().logits_of(layer);
  results_.set_shape(group_, dim_);
  const Stopwatch watch;
  const auto kv_heads = static_cast<uint32_t>(heads.size());
  std::vector<size_t> first(kv_heads + 1, 0);
  for (uint32_t h = 0; h < kv_heads; ++h) first[h + 1] = first[h] + choice.counts[h];
  engine_->pool().run(kv_heads, [&](uint32_t h, uint32_t worker) {
    find_rows(h, heads[h], sink, {choice.ids + first[h], choice.counts[h]}, marks_[worker]);
  });

  tasks_.clear();
  size_t states = 0;
  for (uint32_t h = 0; h < kv_heads; ++h) {
    Rows& rows = rows_[h];
    rows.first_state = states;
    rows.chunks = static_cast<uint32_t>((rows.offloaded.size() + kChunk - 1) / kChunk);
    states += kPieces + rows.chunks;
    for (uint32_t c = 0; c < rows.chunks; ++c) tasks_.push_back({h, c});
  }
  o_.resize(states * group_ * dim_);
  lse_.resize(states * group_);
  const auto chunks = static_cast<uint32_t>(tasks_.size());
  const auto queries_of = [&](uint32_t h) { return queries + size_t{h} * group_ * dim_; };
  engine_->pool().run(chunks + kv_heads, [&](uint32_t i, uint32_t) {
    if (i < chunks) {
      const Task& task = tasks_[i];
      return attend_chunk(task, heads[task.kv_head], queries_of(task.kv_head));
    }
    attend_resident(i - chunks, heads[i - chunks], choice.with_resident, queries_of(i - chunks));
  });

  StepCost cost;
  for (uint32_t h = 0; h < kv_heads; ++h) {
    const Rows& rows = rows_[h];
    merged_.clear();
    for (uint32_t i = 0; i < kPieces + rows.chunks; ++i) {
      merged_.push_back(state(rows.first_state + i));
    }
    cpu::merge_states(merged_, group_, dim_, results_.slot(h));
    cost.keys_attended += uint64_t{group_} * rows.offloaded.size();
    cost.bytes_read += 2 * rows.offloaded.size() * heads[h].offloaded.keys.row_bytes();
  }
  cost.offload_seconds = watch.seconds();
  return cost;
}

void ChosenTokens::attend_chunk(const Task& task, const HeadTokens& tokens, const float* q) {
  const Rows& rows = rows_[task.kv_head];
  cpu::attend_ids(engine_->kernels(), tokens.offloaded, chunk_of(rows.offloaded, task.chunk), q,
                  group_, logits_, state(rows.first_state + kPieces + task.chunk));
}

void ChosenTokens::attend_resident(uint32_t kv_head, const HeadTokens& tokens, bool all,
                                   const float* q) {
  const Rows& rows = rows_[kv_head];
  for (uint32_t p = 0; p < kPieces; ++p) {
    const StateView out = state(rows.first_state + p);
    if (p >= tokens.resident.count) {
      cpu::clear_state(out, group_, dim_);
    } else if (all) {
      cpu::attend_range(engine_->kernels(), tokens.resident.pieces[p], q, group_, logits_, out);
    } else {
      cpu::attend_ids(engine_->kernels(), tokens.resident.pieces[p], rows.resident[p], q, group_,
                      logits_, out);
    }
  }
}

}  // namespace keyhole::runtime

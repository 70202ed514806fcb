#include "runtime/indexing/index_keeper.h"

#include <algorithm>
#include <chrono>

#include "index/types/factory.h"

namespace keyhole::runtime {
namespace {

// From so many queries on that come at once, the heads of a layer take theirs in parallel: a prompt's first thousands,
// of which all are kept until the sample is full, else held its chunks up by 1.3 ms each (8 KV heads of 128, 16
// threads).
constexpr uint32_t kTokensInParallel = 128;

}  // namespace

IndexKeeper::IndexKeeper(const Engine& engine, const SessionParams& params,
                         const Sequence& sequence, MemoryCheck check_memory)
    : engine_(&engine),
      sequence_(&sequence),
      check_memory_(std::move(check_memory)),
      heads_(engine, params),
      blocks_(engine, params, sequence, heads_, check_memory_) {}

std::vector<const HeadParams*> IndexKeeper::head_params() const {
  std::vector<const HeadParams*> params;
  for (const HeadIndex& head : heads()) params.push_back(&head.params);
  return params;
}

uint32_t IndexKeeper::indexed(uint32_t layer) const {
  if (heads_.is_on_device(layer)) return sequence_->rows(layer);
  // Heads differ only after a build that was cancelled half-way.
  bool dense = true;
  uint32_t indexed = sequence_->rows(layer);
  for (uint32_t h = 0; h < heads_.kv_heads(layer); ++h) {
    if (is_dense(layer, h)) continue;
    dense = false;
    indexed = std::min(indexed, head(layer, h).indexed());
  }
  return dense ? 0 : indexed;
}

void IndexKeeper::sample_queries(uint32_t layer, const TensorView& q, const TokenSample& of,
                                 uint32_t position) {
  const LayerShape m = engine_->model().of(layer);
  const auto grows = [&](uint32_t h) {
    for (uint32_t t = 0; t < q.tokens; ++t) {
      if (head(layer, h).queries.wanted_head(position + of.token(t)) >= 0) return true;
    }
    return false;
  };
  for (uint32_t h = 0; h < m.kv_heads; ++h) {
    if (grows(h)) blocks_.cancel_first(layer);  // it reads the sample
  }
  const auto sample_head = [&](uint32_t h, uint32_t) {
    float row[kMaxHeadDim];
    QuerySample& sample = head(layer, h).queries;
    for (uint32_t t = 0; t < q.tokens; ++t) {
      const uint32_t at = position + of.token(t);
      const int wanted = sample.wanted_head(at);
      if (wanted < 0) continue;
      const std::byte* src = q.row(t, size_t{h} * m.group() + static_cast<size_t>(wanted));
      engine_->kernels().to_f32[static_cast<int>(q.dtype)](src, row, m.head_dim);
      sample.add(at, row);
    }
  };
  if (q.tokens >= kTokensInParallel) return engine_->pool().run(m.kv_heads, sample_head);
  for (uint32_t h = 0; h < m.kv_heads; ++h) sample_head(h, 0);
}

uint32_t IndexKeeper::query_stride(uint32_t layer) const {
  uint32_t stride = head(layer, 0).queries.stride();
  for (uint32_t h = 1; h < heads_.kv_heads(layer); ++h)
    stride = std::min(stride, head(layer, h).queries.stride());
  return stride;
}

void IndexKeeper::forget_queries(uint32_t layer, uint32_t position) {
  for (uint32_t h = 0; h < heads_.kv_heads(layer); ++h) head(layer, h).queries.truncate(position);
}

void IndexKeeper::build(const BuildProgress& progress,
                        const std::function<void(bool has_first)>& after) {
  const auto start = std::chrono::steady_clock::now();
  const AcceleratedBuild accelerated(*engine_);
  for (uint32_t layer = 0; layer < heads_.layers(); ++layer) blocks_.cancel(layer);
  FullBuild all(*engine_, *sequence_, heads_);
  check_memory_(all.bytes(), "building the indexes");
  all.run(progress);
  after(all.has_first());
  build_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  all.finish(progress);
}

void IndexKeeper::truncate(uint32_t layer, uint32_t rows, uint32_t tokens) {
  // A block whose rows all remain goes on: they are not touched, nor are the indexes, which end before them. A first
  // index is cancelled, because it reads the query sample, which may shrink.
  if (blocks_.block_end(layer) > rows) blocks_.cancel(layer);
  const auto shrinks = [&](uint32_t h) {
    const std::span<const uint32_t> positions = head(layer, h).queries.positions();
    return !positions.empty() && positions.back() >= tokens;
  };
  for (uint32_t h = 0; h < heads_.kv_heads(layer); ++h) {
    if (shrinks(h)) blocks_.cancel_first(layer);
  }
  forget_queries(layer, tokens);
  if (rows == 0) {
    for (uint32_t h = 0; h < heads_.kv_heads(layer); ++h) head(layer, h).balance.reset();
  }
  try {
    cut(layer, rows);
  } catch (const std::exception& e) {
    // An index that is half cut finds rows that do not exist; and a layer of which only some heads have an index is
    // not indexed again by itself.
    heads_.drop(layer);
    engine_->log().try_to(KEYHOLE_LOG_WARNING, [&] {
      return "layer " + std::to_string(layer) + ": its indexes could not be cut to " +
             std::to_string(rows) + " rows, and are built anew: " + e.what();
    });
  }
  heads_.count_bytes();
}

void IndexKeeper::cut(uint32_t layer, uint32_t rows) {
  for (uint32_t h = 0; h < heads_.kv_heads(layer); ++h) {
    HeadIndex& hd = head(layer, h);
    if (hd.tail && hd.tail->count() > rows) {
      hd.tail.own().truncate(rows, sequence_->view(layer, h));
    }
    if (hd.index == nullptr || hd.indexed() <= rows) continue;
    if (rows == 0) {
      hd.index.reset();
    } else {
      hd.index->truncate(rows);
    }
  }
}

void IndexKeeper::set_on_device(uint32_t layer, bool on_device) {
  // A session that was loaded or copied brings indexes of layers that were the host's.
  const bool has_other = on_device && heads_.has_index(layer);
  if (heads_.is_on_device(layer) == on_device && !has_other) return;
  blocks_.cancel(layer);
  heads_.set_on_device(layer, on_device);
}

void IndexKeeper::set_index(const std::string& spec) {
  std::vector<std::string> specs(heads_.all().size(), spec);
  const uint32_t first_rows = index::first_rows(spec);
  for (uint32_t layer = 0; layer < heads_.layers(); ++layer) blocks_.cancel(layer);
  for (HeadIndex& h : heads_.all()) {
    h.index.reset();
    h.tail = {};
    h.params.index = std::move(specs.back());
    specs.pop_back();
    h.params.dense = false;
    h.first_rows = first_rows;
  }
  heads_.count_bytes();
}

bool IndexKeeper::set_budget(size_t i, const Budget& budget) {
  HeadIndex& hd = heads_.all()[i];
  if (hd.params.budget == budget) return false;
  // A first index under way is being built with partitions, or without.
  if (hd.params.budget.needs_partitions() != budget.needs_partitions()) {
    blocks_.cancel_first(heads_.numbers().layer_of(i));
  }
  hd.params.budget = budget;
  return true;
}

uint64_t IndexKeeper::tail_bytes() const {
  uint64_t bytes = 0;
  for (const HeadIndex& h : heads()) bytes += h.tail ? h.tail->bytes() : 0;
  return bytes;
}

uint64_t IndexKeeper::sample_bytes() const {
  uint64_t bytes = 0;
  for (const HeadIndex& h : heads()) bytes += h.queries.bytes();
  return bytes;
}

uint64_t IndexKeeper::bytes_of_others() const {
  uint64_t bytes = 0;
  for (const HeadIndex& h : heads()) bytes += h.bytes_of_others();
  return bytes;
}

void IndexKeeper::reset_figures() {
  build_seconds_ = 0.0;
  blocks_.reset_figures();
}

void IndexKeeper::save(ChecksumWriter& out) const {
  for (uint32_t l = 0; l < heads_.layers(); ++l) {
    heads_.save(l, out);
    blocks_.save(l, out);
  }
}

void IndexKeeper::load(ChecksumReader& in) {
  for (uint32_t l = 0; l < heads_.layers(); ++l) {
    std::vector<KvView> kv;
    for (uint32_t h = 0; h < heads_.kv_heads(l); ++h) kv.push_back(sequence_->view(l, h));
    heads_.load(l, kv, sequence_->tokens(l), in);
    blocks_.load(l, in);
  }
  heads_.count_bytes();
}

void IndexKeeper::copy_from(const IndexKeeper& from) {
  for (uint32_t l = 0; l < heads_.layers(); ++l) {
    for (uint32_t h = 0; h < heads_.kv_heads(l); ++h) {
      heads_.copy(l, h, sequence_->view(l, h), from.head(l, h));
    }
  }
  heads_.count_bytes();
  blocks_.begin_same(from.blocks_);
}

}  // namespace keyhole::runtime

#include "runtime/indexing/append_blocks.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <exception>
#include <string>

namespace keyhole::runtime {

AppendBlocks::AppendBlocks(const Engine& engine, const SessionParams& params,
                           const Sequence& sequence, HeadIndexes& heads, MemoryCheck check_memory)
    : engine_(&engine),
      params_(&params),
      sequence_(&sequence),
      heads_(&heads),
      check_memory_(std::move(check_memory)),
      jobs_(heads.layers()),
      refused_(heads.layers()),
      builder_(engine.pool()) {}

// ---- When ---------------------------------------------------------------------------------------

uint32_t AppendBlocks::round_of(uint32_t layer, uint32_t rows) const {
  // All layers have equally many tokens: without the shift their blocks would all end in the same
  // step.
  const uint64_t shift = uint64_t{params_->append_block} * layer / heads_->layers();
  return static_cast<uint32_t>((rows + shift) / params_->append_block);
}

uint32_t AppendBlocks::first_rows(uint32_t layer) const {
  const uint64_t block = params_->append_block;
  const uint64_t first_cut = block - block * layer / heads_->layers();
  // Layers whose first cut comes early begin half a block later, and have half a block of steps for
  // the work: at most append_block rows are pending when they begin, like those of all others.
  return static_cast<uint32_t>(2 * first_cut < block ? first_cut + block / 2 : first_cut);
}

bool AppendBlocks::wants_first(uint32_t layer, uint32_t kv_head) const {
  if (params_->mode != KEYHOLE_MODE_INDEXED || !heads_->is_indexed_here(layer, kv_head))
    return false;
  const uint32_t rows = sequence_->rows(layer);
  const HeadIndex& hd = heads_->at(layer, kv_head);
  return hd.index == nullptr && rows >= std::max(first_rows(layer), hd.first_rows) &&
         !is_refused(layer);
}

bool AppendBlocks::wants_block(uint32_t layer) const {
  if (is_refused(layer)) return false;
  const uint32_t round = round_of(layer, sequence_->rows(layer));
  for (uint32_t h = 0; h < heads_->kv_heads(layer); ++h) {
    const HeadIndex& hd = heads_->at(layer, h);
    if (hd.index == nullptr ? wants_first(layer, h) : round_of(layer, hd.indexed()) != round) {
      return true;
    }
  }
  return false;
}

bool AppendBlocks::is_due(uint32_t layer) const {
  if (params_->is_dense(layer) || heads_->is_on_device(layer)) return false;
  if (jobs_[layer] == nullptr) return wants_block(layer);
  return jobs_[layer]->round != round_of(layer, sequence_->rows(layer));
}

bool AppendBlocks::advance(uint32_t layer) {
  if (!is_due(layer)) return false;
  const bool takes_in = jobs_[layer] != nullptr;
  try {
    if (takes_in) take_in(layer);
    if (!wants_block(layer)) return takes_in;
    const Block block = next_block(layer);
    check_room(layer, block);
    if (has_first(layer, block)) report_unbuilt(layer, block);
    begin(layer, block);
  } catch (const std::exception& e) {
    report_failure(layer, e.what());
  }
  return takes_in;
}

// ---- Beginning a block --------------------------------------------------------------------------

AppendBlocks::Block AppendBlocks::next_block(uint32_t layer) const {
  const uint32_t rows = sequence_->rows(layer);
  Block block;
  block.round = round_of(layer, rows);
  for (uint32_t h = 0; h < heads_->kv_heads(layer); ++h) {
    const HeadIndex& hd = heads_->at(layer, h);
    if (hd.index == nullptr ? !wants_first(layer, h) : hd.indexed() >= rows) continue;
    block.heads.push_back(h);
    block.end = std::max(block.end, end_of(layer, h, rows));
  }
  return block;
}

uint32_t AppendBlocks::end_of(uint32_t layer, uint32_t kv_head, uint32_t block_end) const {
  const uint64_t most =
      heads_->at(layer, kv_head).indexed() + uint64_t{kRoundsPerBlock} * params_->append_block;
  return static_cast<uint32_t>(std::min<uint64_t>(block_end, most));
}

bool AppendBlocks::has_first(uint32_t layer, const Block& block) const {
  return std::any_of(block.heads.begin(), block.heads.end(),
                     [&](uint32_t h) { return heads_->at(layer, h).index == nullptr; });
}

uint64_t AppendBlocks::estimate(uint32_t layer, const Block& block) const {
  uint64_t bytes = 0;
  for (const uint32_t h : block.heads) {
    const HeadIndex& hd = heads_->at(layer, h);
    const uint32_t end = end_of(layer, h, block.end);
    const uint32_t before = hd.index == nullptr ? 0 : hd.indexed();
    bytes += heads_->estimate_index(layer, h, end);
    if (before != 0) bytes -= std::min(bytes, heads_->estimate_index(layer, h, before));
    if (hd.params.budget.needs_partitions()) bytes += heads_->estimate_tail(layer, end - before);
  }
  return bytes;
}

bool AppendBlocks::has_first_under_way() const {
  return std::any_of(jobs_.begin(), jobs_.end(), [](const std::unique_ptr<AppendJob>& job) {
    return job != nullptr && std::any_of(job->parts.begin(), job->parts.end(),
                                         [](const AppendJob::Part& p) { return bool{p.build}; });
  });
}

uint64_t AppendBlocks::promised_bytes() const {
  uint64_t bytes = 0;
  for (const auto& job : jobs_) bytes += job == nullptr ? 0 : job->promised_bytes;
  return bytes;
}

void AppendBlocks::check_room(uint32_t layer, const Block& block) {
  try {
    check_memory_(estimate(layer, block),
                  has_first(layer, block) ? "a first index" : "indexing pending tokens");
  } catch (...) {
    refused_[layer] = block.round + 1;  // not in every step: the next round tries again
    throw;
  }
}

void AppendBlocks::begin(uint32_t layer, const Block& block) {
  if (heads_->is_on_device(layer)) return;
  std::vector<AppendJob::Part> parts;
  for (const uint32_t h : block.heads)
    parts.push_back(part_of(layer, h, end_of(layer, h, block.end)));
  if (parts.empty()) return;
  jobs_[layer] = std::make_unique<AppendJob>(block.end, std::move(parts));
  jobs_[layer]->round = block.round;
  jobs_[layer]->promised_bytes = estimate(layer, block);
  if (params_->append_mode != KEYHOLE_APPEND_BACKGROUND) return;
  try {
    builder_.submit(*jobs_[layer]);
  } catch (const std::exception& e) {
    engine_->log()(
        KEYHOLE_LOG_WARNING,
        std::string("pending tokens will be indexed in a step, not beside them: ") + e.what());
  }
}

AppendJob::Part AppendBlocks::part_of(uint32_t layer, uint32_t kv_head, uint32_t end) const {
  const HeadIndex& hd = heads_->at(layer, kv_head);
  const KvView kv = sequence_->view(layer, kv_head);
  AppendJob::Part part;
  part.kv_head = kv_head;
  part.kv = {kv.keys.slice(0, end), kv.values.slice(0, end)};
  if (hd.index != nullptr) {
    part.index = hd.index.get();
    // A tail that has fallen behind (no memory) is left to the next build.
    part.tail = hd.full_tail();
    return part;
  }
  // A balance is learned beside the steps, too: of eight heads that takes 30 ms.
  part.build = [this, layer, kv_head, balance = hd.balance,
                with_tail = hd.params.budget.needs_partitions()](const KvView& rows,
                                                                 const index::Progress& progress) {
    BuiltHead built = heads_->build(layer, kv_head, rows, balance, with_tail, progress);
    built.warning = built.index->info().warning;
    return built;
  };
  return part;
}

// ---- Taking it in -------------------------------------------------------------------------------

void AppendBlocks::take_in(uint32_t layer) {
  const auto start = std::chrono::steady_clock::now();
  std::unique_ptr<AppendJob> job = std::move(jobs_[layer]);
  const bool waited = builder_.finish(*job);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  figures_.background_seconds += job->background_seconds;

  // In parallel: a block changes the lists of many rows all over a graph.
  std::exception_ptr failure;
  try {
    engine_->pool().run(static_cast<uint32_t>(job->parts.size()),
                        [&](uint32_t i, uint32_t) { take_in_part(layer, job->parts[i]); });
  } catch (...) {
    failure = std::current_exception();
  }
  heads_->count_bytes();
  for (const auto& part : job->parts) {
    if (!part.build || !part.error) continue;
    refused_[layer] = round_of(layer, sequence_->rows(layer)) + 1;  // the next round tries again
  }
  report_poor(layer, *job);
  for (const auto& part : job->parts) {
    if (part.build && !part.error) heads_->tell_unguided(heads_->at(layer, part.kv_head));
  }
  builder_.retire(std::move(job));
  if (waited && params_->append_mode == KEYHOLE_APPEND_BACKGROUND) report_wait(layer, seconds);
  if (failure) std::rethrow_exception(failure);
  figures_.blocks += 1;
}

void AppendBlocks::take_in_part(uint32_t layer, AppendJob::Part& part) {
  if (part.error) std::rethrow_exception(part.error);
  HeadIndex& hd = heads_->at(layer, part.kv_head);
  if (part.first.index != nullptr) {
    hd.take(std::move(part.first));
    return;
  }
  // Index and tree grow together, or neither does: a tree that covers fewer rows is not read.
  if (part.segment != nullptr) hd.tail.own().make_room(*part.segment);
  part.addition = hd.index->commit_append(std::move(part.addition));
  if (part.segment != nullptr) hd.tail.own().commit_append(*part.segment);
}

void AppendBlocks::cancel(uint32_t layer) noexcept {
  if (jobs_[layer] == nullptr) return;
  builder_.cancel(*jobs_[layer]);
  figures_.background_seconds += jobs_[layer]->background_seconds;
  jobs_[layer].reset();
}

void AppendBlocks::cancel_first(uint32_t layer) noexcept {
  if (jobs_[layer] == nullptr) return;
  for (const auto& part : jobs_[layer]->parts) {
    if (part.build) return cancel(layer);
  }
}

// ---- Copies -------------------------------------------------------------------------------------

AppendBlocks::Block AppendBlocks::block_under_way(uint32_t layer) const {
  Block block;
  if (jobs_[layer] == nullptr) return block;
  block.end = jobs_[layer]->rows;
  block.round = jobs_[layer]->round;
  for (const auto& part : jobs_[layer]->parts) block.heads.push_back(part.kv_head);
  return block;
}

void AppendBlocks::save(uint32_t layer, ChecksumWriter& out) const {
  const Block block = block_under_way(layer);
  out.value(block.end);
  out.value(block.round);
  out.value(static_cast<uint32_t>(block.heads.size()));
  for (const uint32_t h : block.heads) out.value(h);
  out.value(refused_[layer]);
}

void AppendBlocks::load(uint32_t layer, ChecksumReader& in) {
  loaded_.resize(heads_->layers());
  Block& block = loaded_[layer];
  block.end = in.value<uint32_t>("a block under way");
  block.round = in.value<uint32_t>("a block under way");
  block.heads = in.array<uint32_t>(in.value<uint32_t>("a block under way"), "a block under way");
  const auto refuse = [&](const std::string& text) {
    throw Error(Status::corrupt,
                "layer " + std::to_string(layer) + " has a block under way " + text);
  };
  if (block.end > sequence_->rows(layer)) {
    refuse("up to row " + std::to_string(block.end) + " of " +
           std::to_string(sequence_->rows(layer)));
  }
  if (block.heads.size() > heads_->kv_heads(layer)) {
    refuse("of " + std::to_string(block.heads.size()) + " heads");
  }
  for (size_t i = 0; i < block.heads.size(); ++i) {
    const uint32_t h = block.heads[i];
    if (h >= heads_->kv_heads(layer) || (i != 0 && h <= block.heads[i - 1]) || block.end == 0 ||
        heads_->is_dense(layer, h) || heads_->at(layer, h).indexed() >= block.end) {
      refuse("that head " + std::to_string(h) + " cannot take part in");
    }
  }
  refused_[layer] = in.value<uint32_t>("a block under way");
}

void AppendBlocks::begin_loaded() {
  for (uint32_t l = 0; l < loaded_.size(); ++l) begin(l, loaded_[l]);
  loaded_.clear();
}

void AppendBlocks::begin_same(const AppendBlocks& from) {
  refused_ = from.refused_;
  for (uint32_t l = 0; l < jobs_.size(); ++l) begin(l, from.block_under_way(l));
}

// ---- Reports ------------------------------------------------------------------------------------

void AppendBlocks::report_wait(uint32_t layer, double seconds) {
  figures_.waits += 1;
  figures_.wait_seconds += seconds;
  if (!std::has_single_bit(figures_.waits)) return;
  char text[160];
  std::snprintf(text, sizeof text,
                "layer %u: a step spent %.1f ms on pending tokens that were not indexed in time: "
                "decoding is faster than the index grows (%llu such steps so far)",
                layer, seconds * 1e3, static_cast<unsigned long long>(figures_.waits));
  engine_->log()(KEYHOLE_LOG_WARNING, text);
}

void AppendBlocks::report_failure(uint32_t layer, const char* what) {
  // The tokens stay pending, so the step is still right, only slower; a later one tries again.
  failures_ += 1;
  if (!std::has_single_bit(failures_)) return;
  engine_->log()(KEYHOLE_LOG_WARNING, "layer " + std::to_string(layer) +
                                          ": pending tokens could not be indexed: " + what + " (" +
                                          std::to_string(failures_) + " such failures so far)");
}

void AppendBlocks::report_unbuilt(uint32_t layer, const Block& block) {
  const uint32_t rows = sequence_->rows(layer);
  // A build that found too few rows for an index has left some to the blocks that follow.
  uint32_t waited = 0;
  for (const uint32_t h : block.heads) waited = std::max(waited, heads_->at(layer, h).first_rows);
  const bool has_grown = waited != 0 && rows < waited + 2 * uint64_t{params_->append_block};
  if (block.end == rows || has_grown || told_unbuilt_) return;
  told_unbuilt_ = true;
  engine_->log()(
      KEYHOLE_LOG_WARNING,
      "layer " + std::to_string(layer) + ": " + std::to_string(rows) +
          " tokens have no index, as keyhole_session_build was not called after the prefill: "
          "steps index them " +
          std::to_string(block.end) + " at a time, and attend to the others exactly");
}

void AppendBlocks::report_poor(uint32_t layer, const AppendJob& job) {
  for (const auto& part : job.parts) {
    if (told_poor_ || part.first.warning.empty()) continue;
    told_poor_ = true;
    engine_->log()(KEYHOLE_LOG_WARNING,
                   "layer " + std::to_string(layer) +
                       ": an index that was built while decoding is poor: " + part.first.warning);
  }
}

}  // namespace keyhole::runtime

// Bringing pending tokens into the indexes block by block while decoding.
#include <bit>
#include <cstdio>
#include <exception>

#include "runtime/session.h"

namespace keyhole::runtime {

uint32_t Session::append_round(uint32_t layer, uint32_t rows) const {
  // All layers have equally many tokens: without the shift their blocks would all end in the same step.
  const uint64_t shift = uint64_t{params_.append_block} * layer / engine_->model().layers;
  return static_cast<uint32_t>((rows + shift) / params_.append_block);
}

void Session::advance_append(uint32_t layer) {
  if (params_.is_dense(layer)) return;
  const uint32_t rows = store_.rows(layer);
  const uint32_t round = append_round(layer, rows);
  try {
    if (appends_[layer] != nullptr) {
      if (append_round(layer, appends_[layer]->rows) == round) return;
      commit_append(layer);
    }
    for (uint32_t h = 0; h < engine_->model().kv_heads; ++h) {
      const Head& hd = head(layer, h);
      if (hd.index == nullptr || append_round(layer, hd.indexed()) == round) continue;
      begin_append(layer, rows);
      break;
    }
  } catch (const std::exception& e) {
    // The tokens stay pending, so the step is still right, only slower; a later one tries again.
    engine_->log()(KEYHOLE_LOG_WARNING, "layer " + std::to_string(layer) +
                                            ": pending tokens could not be indexed: " + e.what());
  }
}

void Session::begin_append(uint32_t layer, uint32_t rows) {
  std::vector<AppendJob::Part> parts;
  for (uint32_t h = 0; h < engine_->model().kv_heads; ++h) {
    const Head& hd = head(layer, h);
    if (hd.index == nullptr || hd.indexed() >= rows) continue;
    AppendJob::Part& part = parts.emplace_back();
    part.kv_head = h;
    part.index = hd.index.get();
    // A tail that has fallen behind (no memory) is left to the next build.
    part.tail = hd.full_tail();
    const KvView kv = store_.view(layer, h);
    part.kv = {kv.keys.slice(0, rows), kv.values.slice(0, rows)};
  }
  if (parts.empty()) return;
  appends_[layer] = std::make_unique<AppendJob>(rows, std::move(parts));
  if (params_.append_mode != KEYHOLE_APPEND_BACKGROUND) return;
  try {
    builder_.submit(*appends_[layer]);
  } catch (const std::exception& e) {
    engine_->log()(
        KEYHOLE_LOG_WARNING,
        std::string("pending tokens will be indexed in a step, not beside them: ") + e.what());
  }
}

void Session::commit_append(uint32_t layer) {
  const auto start = std::chrono::steady_clock::now();
  std::unique_ptr<AppendJob> job = std::move(appends_[layer]);
  const bool waited = builder_.finish(*job);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  totals_.background_seconds += job->background_seconds;

  // In parallel: a block changes the lists of many rows all over a graph.
  std::exception_ptr failure;
  const auto bytes_of = [&](const AppendJob::Part& part) {
    return part.index->bytes() + (part.tail != nullptr ? part.tail->bytes() : 0);
  };
  for (const auto& part : job->parts) index_bytes_ -= bytes_of(part);
  try {
    engine_->pool().run(static_cast<uint32_t>(job->parts.size()), [&](uint32_t i, uint32_t) {
      AppendJob::Part& part = job->parts[i];
      if (part.error) std::rethrow_exception(part.error);
      Head& hd = head(layer, part.kv_head);
      part.addition = hd.index->commit_append(std::move(part.addition));
      if (part.segment != nullptr) hd.tail->commit_append(*part.segment);
    });
  } catch (...) {
    failure = std::current_exception();
  }
  for (const auto& part : job->parts) index_bytes_ += bytes_of(part);
  builder_.retire(std::move(job));
  if (waited && params_.append_mode == KEYHOLE_APPEND_BACKGROUND) report_wait(layer, seconds);
  make_room(false);
  if (failure) std::rethrow_exception(failure);
  totals_.append_blocks += 1;
}

void Session::report_wait(uint32_t layer, double seconds) {
  totals_.append_waits += 1;
  totals_.append_wait_seconds += seconds;
  if (!std::has_single_bit(totals_.append_waits)) return;
  char text[160];
  std::snprintf(text, sizeof text,
                "layer %u: a step spent %.1f ms on pending tokens that were not indexed in time: "
                "decoding is faster than the index grows (%llu such steps so far)",
                layer, seconds * 1e3, static_cast<unsigned long long>(totals_.append_waits));
  engine_->log()(KEYHOLE_LOG_WARNING, text);
}

void Session::cancel_append(uint32_t layer) noexcept {
  if (appends_[layer] == nullptr) return;
  builder_.cancel(*appends_[layer]);
  totals_.background_seconds += appends_[layer]->background_seconds;
  appends_[layer].reset();
}

}  // namespace keyhole::runtime

#include "tools/commands/common/decoding.h"

#include <algorithm>
#include <memory>

#include "runtime/files/json.h"
#include "tools/terminal/clock.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {

namespace {

/// Times `run`, which is given a progress function.
template <class Run>
double prefill_with_progress(size_t tokens, const Run& run) {
  Progress bar("prefill of " + format_count(tokens) + " tokens");
  const Clock::time_point start = Clock::now();
  run([&](double fraction) {
    throw_if_interrupted();
    bar.update(fraction);
  });
  return seconds_since(start);
}

}  // namespace

double prefill_prompt(Decoder& decoder, const std::vector<uint32_t>& tokens,
                      std::vector<float>* logits) {
  return prefill_with_progress(tokens.size(), [&](const PrefillProgress& progress) {
    const std::span<const float> last = decoder.prefill(tokens, progress);
    if (logits != nullptr) logits->assign(last.begin(), last.end());
  });
}

double prefill_prompt(Runner& runner, const std::vector<uint32_t>& tokens, const LayerSink& sink) {
  return prefill_with_progress(tokens.size(), [&](const PrefillProgress& progress) {
    (void)runner.prefill(tokens, sink, progress);
  });
}

std::string turn_text(const TurnCost& turn) {
  if (turn.tokens == 0) return "";
  constexpr double kPercent = 100.0;
  const std::string share =
      turn.share < 1.0 ? " (" + format_number(kPercent * turn.share) + " % of the blocks)" : "";
  return ", a turn of " + format_count(turn.tokens) + " tokens " + format_duration(turn.seconds) +
         share;
}

nlohmann::ordered_json turn_json(const TurnCost& turn) {
  return {{"tokens", turn.tokens}, {"seconds", turn.seconds}, {"share", turn.share}};
}

TurnCost extend_by_turn(Runner& runner, KeyholeCache& cache, std::span<const uint32_t> tokens,
                        uint32_t before, std::vector<float>* logits, TurnWay way) {
  const std::unique_ptr<Decoder> decoder = runner.decoder(cache, before);
  const auto take = [&](std::span<const uint32_t> some) {
    const std::span<const float> last = decoder->extend(some);
    if (logits != nullptr) logits->assign(last.begin(), last.end());
  };
  return extend_by_turn(runner, cache, *decoder, tokens, take, way);
}

TurnCost extend_by_turn(Runner& runner, KeyholeCache& cache, Decoder& decoder,
                        std::span<const uint32_t> tokens,
                        const std::function<void(std::span<const uint32_t>)>& take, TurnWay way) {
  // More new tokens at once are not attended by codes on a GPU.
  constexpr size_t kUsualChunk = 4096, kChunkOfSteps = 1024;
  const size_t usual_chunk = way == TurnWay::steps ? kChunkOfSteps : kUsualChunk;
  const size_t chunk = runner.prefill_chunk() == 0 ? usual_chunk : runner.prefill_chunk();
  const size_t usual = decoder.tokens_at_once();
  decoder.take_at_once(std::min(chunk, tokens.size()));
  cache.set_extend_pattern(way == TurnWay::prompt ? runner.prefill_pattern() : "");
  const PromptBlocks blocks_before = cache.extend_blocks();
  TurnCost cost;
  cost.tokens = tokens.size();
  Progress bar("turn of " + format_count(tokens.size()) + " tokens");
  const Clock::time_point start = Clock::now();
  for (size_t i = 0; i < tokens.size();) {
    throw_if_interrupted();
    bar.update(static_cast<double>(i) / static_cast<double>(tokens.size()));
    const size_t count = std::min(decoder.tokens_at_once(), tokens.size() - i);
    take(tokens.subspan(i, count));
    i += count;
  }
  cost.seconds = seconds_since(start);
  const PromptBlocks blocks = cache.extend_blocks();
  cost.share =
      PromptBlocks{blocks.attended - blocks_before.attended, blocks.seen - blocks_before.seen}
          .share();
  cache.set_extend_pattern("");
  decoder.take_at_once(usual);
  return cost;
}

}  // namespace keyhole::tools

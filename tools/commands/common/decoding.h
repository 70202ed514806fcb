// Prompts and later turns that a model takes, with a progress bar and Ctrl-C.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "tools/commands/common/runner.h"

namespace keyhole::tools {

/// Prefills with a progress bar and Ctrl-C. Returns its seconds; the logits go to `logits` unless that is null.
double prefill_prompt(Decoder& decoder, const std::vector<uint32_t>& tokens,
                      std::vector<float>* logits);
/// Prefills without a decoder: `sink` takes every layer's K, V and queries.
double prefill_prompt(Runner& runner, const std::vector<uint32_t>& tokens, const LayerSink& sink);

/// The cost of a later turn.
struct TurnCost {
  size_t tokens = 0;
  double seconds = 0.0;
  double share = 1.0;  ///< of the blocks that its queries saw those that they attended
};
/// The turn as text: ", a turn of 2,048 tokens 1.2 s (12 % of the blocks)", empty without one; below, as JSON.
[[nodiscard]] std::string turn_text(const TurnCost& turn);
[[nodiscard]] nlohmann::ordered_json turn_json(const TurnCost& turn);
/// How several tokens of a turn attend: by the runner's pattern of prompts, or by no pattern, as steps do.
enum class TurnWay : uint8_t { prompt, steps };
/// Takes tokens behind the `before` that the cache has, as a later turn of a chat comes, with a progress bar and
/// Ctrl-C. The runner takes --chunk of them at once (0: 4096), by its pattern of prompts, or as steps do: by no
/// pattern. logits: as in prefill_prompt().
TurnCost extend_by_turn(Runner& runner, KeyholeCache& cache, std::span<const uint32_t> tokens,
                        uint32_t before, std::vector<float>* logits = nullptr,
                        TurnWay way = TurnWay::prompt);
/// extend_by_turn() with the cache's decoder: take() hands it some of the tokens, one piece after the other, each no
/// more than it takes at once.
TurnCost extend_by_turn(Runner& runner, KeyholeCache& cache, Decoder& decoder,
                        std::span<const uint32_t> tokens,
                        const std::function<void(std::span<const uint32_t>)>& take,
                        TurnWay way = TurnWay::prompt);

}  // namespace keyhole::tools

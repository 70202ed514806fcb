// The search for the pattern by which the prompts of a query head shall attend (MInference, section 3.2: the best
// pattern of each head, found offline), judged by dense attention to the same q, k and v.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/api/handles.h"
#include "tools/commands/calibrate/choose.h"
#include "tools/llama/gpu_head.h"
#include "tools/llama/host_prompt.h"

namespace keyhole::tools {

/// A pattern's figures on one prompt, or the worst and the means over some.
struct PatternFigures {
  std::string pattern;
  double ratio =
      0;  ///< of the requirement, by every second tile of 128 queries; met where at most 1
  double check_ratio = 0;                  ///< by the other tiles
  double error_median = 0, error_p95 = 0;  ///< |o - o*| / |o*| by query, of the other tiles
  double mass =
      1;  ///< recovered attention: share of the softmax's weight that was attended, mean over queries
  double share = 1;  ///< of the blocks that queries see those that they attend
  double seconds = 0;

  [[nodiscard]] bool met() const { return ratio <= 1; }
  [[nodiscard]] bool held() const { return check_ratio <= 1; }
};

class PatternSearch {
 public:
  /// Tries patterns on heads of `dim` elements. scale 0: 1 / sqrt(dim); softcap 0: none. patterns: the first is
  /// "dense". Throws UsageError for a pattern that the library refuses. on_gpu: a GPU attends, with q, k and v in
  /// fp16, so that errors and seconds are a GPU's.
  PatternSearch(uint32_t dim, float scale, float softcap, const std::vector<std::string>& patterns,
                const Requirement& requirement, uint32_t threads, bool on_gpu = false);

  /// Returns the figures of each pattern, in their order.
  [[nodiscard]] std::vector<PatternFigures> measure(const HeadRows& head);

 private:
  /// Attends with one pattern and returns its seconds.
  double attend(const PromptHandle& prompt, const HeadRows& head, std::vector<float>& out,
                std::vector<float>& lse);

  uint32_t dim_;
  Requirement requirement_;
  Engine engine_;  ///< of one layer with one head
  std::vector<std::string> patterns_;
  std::vector<PromptHandle> prompts_;
  std::unique_ptr<GpuHead> gpu_;  ///< null: on the host
  std::vector<float> exact_, exact_lse_, out_, lse_;
};

/// Merges the figures of several prompts into one of each pattern: the worst ratios and errors, the means of all
/// else.
[[nodiscard]] std::vector<PatternFigures> merge_figures(
    const std::vector<std::vector<PatternFigures>>& prompts);

enum class PatternCost { blocks, us };
/// The cheapest pattern that meets the requirement. Judged by blocks, one that attends more than nine tenths of them
/// is as dear as dense attention, because it has to choose them, too. The first pattern, which is dense, always meets
/// it.
[[nodiscard]] size_t cheapest_pattern(const std::vector<PatternFigures>& figures, PatternCost cost);

}  // namespace keyhole::tools

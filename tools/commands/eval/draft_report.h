// The results of `eval --task drafts` as a table and as JSON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tools/commands/eval/ways.h"
#include "tools/generation/drafts.h"

namespace keyhole::tools {

/// Which of the two attends in the way of a row; the other one attends exactly.
enum class DraftRole : uint8_t {
  both,    ///< the row of exact attention
  draft,   ///< what an index costs a draft: the output is exact attention's
  target,  ///< what a draft by exact attention is worth to a target that attends through the index
};
[[nodiscard]] const char* role_text(DraftRole role);

/// The rounds of all prompts with one way in one role, prompt by prompt.
struct DraftRow {
  DraftRole role = DraftRole::both;
  std::vector<EvalWay>
      runs;  ///< the way, with the cost of the draft's steps where the draft attends in it
  std::vector<DraftedTokens> texts;
  std::vector<PlainPart> as_plain;  ///< of each text, beside plain decoding of the same target

  [[nodiscard]] EvalWay way() const;
  [[nodiscard]] DraftSums sums() const;
  [[nodiscard]] size_t tokens() const;
  /// Of these, the first ones of each text that plain decoding chooses, too.
  [[nodiscard]] size_t tokens_as_plain() const;
  /// Mean accepted tokens of a round of each prompt.
  [[nodiscard]] std::vector<double> accepted_by_prompt() const;
  /// The mean's standard error over all rounds.
  [[nodiscard]] double standard_error() const;
};

/// The mean accepted tokens of a round above those of exact attention, paired by prompt; nothing for exact attention
/// itself.
[[nodiscard]] std::optional<Difference> accepted_above(const DraftRow& row, const DraftRow& exact);

/// `rows` begin with that of exact attention.
[[nodiscard]] std::string draft_text(const std::vector<DraftRow>& rows);
[[nodiscard]] nlohmann::ordered_json draft_json(const std::vector<DraftRow>& rows);

}  // namespace keyhole::tools

// The tasks of `keyhole eval`: each runs the model, prints a table, and writes JSON and a page where these are asked.
#pragma once

#include "tools/commands/eval/options.h"

namespace keyhole::tools {

/// `--task kv`, `passkey`, `needles`, `variables`, `words`: right answers to questions about the context.
void eval_questions(const EvalOptions& options);
/// `--task text`: bits per byte of a real text, decoded after `length` tokens of it.
void eval_text(const EvalOptions& options);
/// `--task kld`: divergence of the predictions of such a text from those by exact attention, token by token.
void eval_kld(const EvalOptions& options);
/// `--task drafts`: how many tokens of a draft the model accepts.
void eval_drafts(const EvalOptions& options);
/// `--task copy`: bytes right and bits per byte of passages of the prompt that are to be continued.
void eval_copy(const EvalOptions& options);
/// `--task ruler`: the benchmarks RULER and InfiniteBench, a score for each task and length.
void eval_ruler(const EvalOptions& options);

}  // namespace keyhole::tools

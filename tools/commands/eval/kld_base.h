// The options of `eval --task kld` beside a file of llama.cpp's log-probabilities, and the work itself.
#pragma once

#include <cstdint>
#include <string>

#include "tools/commands/common/cli_fwd.h"

namespace keyhole::tools {

struct EvalOptions;

struct KldBaseOptions {
  std::string file;     ///< empty: none, and exact attention is what ways are held against
  uint32_t chunks = 0;  ///< of the file, the first ones; 0: all

  [[nodiscard]] bool given() const { return !file.empty() || chunks != 0; }
};

/// Adds `--base` and `--chunks`.
void add_kld_base_options(CLI::App& command, KldBaseOptions& options);

/// Throws UsageError where --chunks has no --base, and where the command line has --base and an option that says which
/// tokens are to be read, or asks for parts of a text or audits.
void check_kld_base(const CLI::App& command, const KldBaseOptions& options);

/// `--task kld --base`: the divergence of every way, exact attention among them, from the file's predictions. The first
/// half of each chunk is a prompt, the rest is decoded.
void eval_kld_base(const EvalOptions& options);

}  // namespace keyhole::tools

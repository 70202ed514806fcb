#include "tools/llama/cuda/rope_tables.h"

#include "tools/llama/cuda/prefill_kernels.h"

namespace keyhole::tools::cuda {

RopeTables::Table::Table(const Rope& rope, double attention_factor, size_t tokens)
    : factor(attention_factor),
      end(rope.end()),
      pairs(static_cast<uint32_t>(rope.pairs())),
      frequencies(tokens == 0 ? 0 : rope.pairs()),
      turns(tokens * rope.pairs()) {
  copy_now(frequencies.get(), rope.frequencies().data(), frequencies.size());
}

RopeTables::RopeTables(const LlamaConfig& config, size_t rope_tokens, size_t tokens)
    : config_(config),
      full_(Rope(config.head_dim, config.rope, rope_tokens), config.rope.scaling.attention_factor,
            tokens),
      sliding_(Rope(config.head_dim, config.sliding_rope, rope_tokens),
               config.sliding_rope.scaling.attention_factor,
               config.full_layers() < config.layers ? tokens : 0) {}

void RopeTables::fill(size_t first, size_t n, cudaStream_t stream) {
  for (const Table* table : {&full_, &sliding_}) {
    if (!table->turns) continue;
    check_rope_end(first + n, table->end);
    rope_table(table->frequencies.get(), table->pairs, table->factor, static_cast<uint32_t>(first),
               static_cast<uint32_t>(n), table->turns.get(), stream);
  }
}

}  // namespace keyhole::tools::cuda

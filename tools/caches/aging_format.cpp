#include "tools/caches/aging_format.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "tools/caches/kivi.h"
#include "tools/caches/kvarn.h"
#include "tools/caches/oscar.h"

namespace keyhole::tools {

TokenRange AgingLayout::in_few_bits(KvRows rows, uint32_t tokens) const {
  const Ages& ages = of(rows);
  const uint32_t young = sink + ages.recent;
  if (tokens <= young) return {sink, sink};
  return {sink, sink + (tokens - young) / ages.granule * ages.granule};
}

uint32_t AgingLayout::settled(uint32_t tokens) const {
  return std::min(
      {tokens, in_few_bits(KvRows::keys, tokens).end, in_few_bits(KvRows::values, tokens).end});
}

uint64_t AgingLayout::bytes(uint32_t tokens, uint32_t head_dim) const {
  double sum = 0.0;
  for (const KvRows rows : {KvRows::keys, KvRows::values}) {
    const TokenRange few = in_few_bits(rows, tokens);
    const double old = few.end - few.begin;
    sum += (old * of(rows).bits + (tokens - old) * 16.0) * head_dim / 8.0;
  }
  return static_cast<uint64_t>(sum + 0.5);
}

AgingLayout aging_layout(KvFormat format, uint32_t head_dim) {
  switch (format) {
    case KvFormat::kivi2: return kivi_layout(2, head_dim);
    case KvFormat::kivi4: return kivi_layout(4, head_dim);
    case KvFormat::kvarn2: return kvarn_layout({2, 2}, head_dim);
    case KvFormat::kvarn_k4v2: return kvarn_layout({4, 2}, head_dim);
    case KvFormat::oscar2: return oscar_layout(head_dim);
    default: throw std::invalid_argument("the format rounds every row when it comes");
  }
}

std::shared_ptr<const AgingFormat> make_aging_format(KvFormat format, uint32_t head_dim) {
  (void)aging_layout(format, head_dim);
  switch (format) {
    case KvFormat::kivi2: return make_kivi(2, head_dim);
    case KvFormat::kivi4: return make_kivi(4, head_dim);
    case KvFormat::kvarn2: return make_kvarn({2, 2}, head_dim);
    case KvFormat::kvarn_k4v2: return make_kvarn({4, 2}, head_dim);
    default: return nullptr;
  }
}

double cache_bits(KvFormat format, uint32_t head_dim) {
  return ages(format) ? aging_layout(format, head_dim).bits() : kv_format_bits(format);
}

uint64_t cache_bytes(KvFormat format, uint32_t head_dim, uint64_t heads, uint32_t tokens) {
  if (ages(format)) return heads * aging_layout(format, head_dim).bytes(tokens, head_dim);
  return kv_format_bytes(format, 2 * heads * tokens * head_dim);
}

}  // namespace keyhole::tools

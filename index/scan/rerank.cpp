#include "index/scan/rerank.h"

namespace keyhole::index {

void Rerank::finish(const cpu::Kernels& kernels, const RowsView& keys, const SearchArgs& args,
                    SearchCost& cost) {
  cost.exact = false;
  if (collector_->logging()) return;
  const auto rows = shortlist_.unite(keys.tokens, keys.tokens);
  for (size_t first = 0; first < rows.size(); first += kRowsAtOnce) {
    const size_t n = std::min(kRowsAtOnce, rows.size() - first);
    score_ids(kernels, keys, args, rows.data() + first, n, scores_.data(), n);
    collector_->offer(scores_.data(), n, rows.data() + first, n);
  }
  cost.exact_rows += rows.size();
  cost.bytes_read += rows.size() * keys.dim * dtype_size(keys.dtype);
}

}  // namespace keyhole::index

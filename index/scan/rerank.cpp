#include "index/scan/rerank.h"

namespace keyhole::index {

void Rerank::finish(const cpu::Kernels& kernels, const RowsView& keys, const SearchArgs& args,
                    SearchCost& cost) {
  cost.exact = false;
  if (collector_->logging()) return;
  const auto rows = shortlist_.unite(keys.count, keys.count);
  score_ids(kernels, keys, args, rows.data(), rows.size(), scores_.data(), rows.size());
  collector_->offer(scores_.data(), rows.size(), rows.data(), rows.size());
  cost.bytes_read += rows.size() * keys.dim * dtype_size(keys.dtype);
}

}  // namespace keyhole::index

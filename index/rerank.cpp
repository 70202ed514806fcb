#include "index/rerank.h"

namespace keyhole::index {

void Rerank::finish(const cpu::Kernels& kernels, const RowsView& keys, const SearchArgs& args,
                    SearchCost& cost) {
  cost.exact = false;
  if (collector_->logging()) return;
  marks_.begin(keys.count);
  size_t n = 0;
  for (uint32_t h = 0; h < group_; ++h) {
    for (const uint64_t rank : top_.selected(h)) {
      united_[n] = rank_row(rank);
      n += static_cast<size_t>(marks_.insert(rank_row(rank)));
    }
  }
  score_ids(kernels, keys, args, united_.data(), n, scores_.data(), n);
  collector_->offer(scores_.data(), n, united_.data(), n);
  cost.bytes_read += n * keys.dim * dtype_size(keys.dtype);
}

}  // namespace keyhole::index

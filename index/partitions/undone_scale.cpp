#include "index/partitions/undone_scale.h"

#include <algorithm>

#include "cpu/code_layout.h"
#include "index/partitions/ivf_train.h"
#include "index/scan/balance.h"

namespace keyhole::index {
namespace {

RowsView view_of(const std::vector<float>& rows, uint32_t dim) {
  return {reinterpret_cast<const std::byte*>(rows.data()), dim * sizeof(float), rows.size() / dim,
          dim, DType::f32};
}

}  // namespace

std::vector<float> undone_scale(const cpu::Kernels& kernels, const BuildInput& input,
                                const RopeUndo& rope) {
  const uint32_t dim = input.keys.dim;
  // The blocks that learn_balance() would look at, and no copy of the others.
  const size_t size = std::min<size_t>(kCodeBlock, input.keys.count);
  const size_t blocks = size == 0 ? 0 : input.keys.count / size;
  const size_t used = std::min(blocks, kBalanceBlocks);
  std::vector<float> keys;
  keys.reserve(used * size * dim);
  for (size_t b = 0; b < used; ++b) {
    const size_t first = b * blocks / used * size;
    const std::vector<float> rows = rows_as_f32(kernels, input.keys, first, first + size, rope);
    keys.insert(keys.end(), rows.begin(), rows.end());
  }
  const TrainingQueries& given = input.queries;
  std::vector<float> queries;
  for (size_t i = 0; given.positions != nullptr && i < given.rows.count; ++i) {
    float row[kMaxHeadDim];
    float turned[kMaxHeadDim];
    kernels.to_f32[static_cast<size_t>(given.rows.dtype)](given.rows.row(i), row, dim);
    const SearchArgs query = {.queries = row, .group = 1, .position = given.positions[i]};
    const float* undone = rope.queries(query, 0, turned);
    queries.insert(queries.end(), undone, undone + dim);
  }
  return learn_balance(kernels, {.keys = view_of(keys, dim), .values = {}}, view_of(queries, dim))
      .key_scale;
}

}  // namespace keyhole::index

#include "index/graph/training_neighbours.h"

#include <algorithm>
#include <cmath>

#include "cpu/row_access.h"
#include "index/accelerator.h"

namespace keyhole::index {
namespace {

// Keys that a query at `position` sees among the `count` rows from `first_position` on.
size_t visible(uint32_t position, uint32_t first_position, size_t count) {
  return position < first_position ? 0 : std::min<size_t>(count, position - first_position + 1);
}

// Queries that are scored together, so that keys are read once for all of them.
constexpr uint32_t kQueriesAtOnce = 16;

// Working memory of one thread.
struct Block {
  TopK top;
  std::vector<float> queries = std::vector<float>(size_t{kQueriesAtOnce} * kMaxHeadDim);
  std::vector<float> scores = std::vector<float>(size_t{kQueriesAtOnce} * kScanBlock);
  std::vector<uint32_t> ids;
  std::vector<float> best;
};

/// `rows` of the keys (empty: all), one after the other, in a dtype that accelerators know: where some are left out, or
/// keys are int8, they are copied to `memory`, int8 ones in fp16, or in fp32 where that is too narrow.
RowsView for_accelerator(const cpu::Kernels& kernels, const RowsView& keys,
                         std::span<const uint32_t> rows, std::vector<std::byte>& memory) {
  if (keys.dtype != DType::i8 && rows.empty()) return keys;
  const size_t count = rows.empty() ? keys.tokens : rows.size();
  const auto copied = [&](DType dtype) {
    const size_t row_bytes = keys.dim * dtype_size(dtype);
    memory.resize(count * row_bytes);
    for (size_t i = 0; i < count; ++i) {
      const size_t row = rows.empty() ? i : rows[i];
      cpu::copy_row(kernels, keys, row, dtype, memory.data() + i * row_bytes);
    }
    return dense_rows(memory.data(), count, keys.dim, dtype);
  };
  if (keys.dtype != DType::i8) return copied(keys.dtype);
  const RowsView narrow = copied(DType::f16);
  const bool fits =
      kernels.all_finite[static_cast<size_t>(DType::f16)](narrow.data, count * keys.dim);
  return fits ? narrow : copied(DType::f32);
}

/// Lets the accelerator find the neighbours of the chosen queries; false: it does not.
template <class Sees>
bool accelerated(const Context& context, const RowsView& keys, std::span<const uint32_t> rows,
                 const TrainingQueries& queries, std::span<const uint32_t> chosen, const Sees& sees,
                 Neighbours& found) {
  if (context.accelerator == nullptr || chosen.empty() || found.per_query == 0) return false;
  const size_t row_bytes = queries.rows.row_bytes();
  std::vector<std::byte> asked(chosen.size() * row_bytes);
  std::vector<uint32_t> limits(chosen.size());
  for (size_t i = 0; i < chosen.size(); ++i) {
    std::copy_n(queries.rows.row(chosen[i]), row_bytes, asked.data() + i * row_bytes);
    limits[i] = static_cast<uint32_t>(sees(chosen[i]));
  }
  std::vector<std::byte> copied;
  NearestTask task;
  task.keys = for_accelerator(*context.kernels, keys, rows, copied);
  task.queries = dense_rows(asked.data(), chosen.size(), queries.rows.dim, queries.rows.dtype);
  task.limits = limits.data();
  task.most = found.per_query;
  return context.accelerator->nearest_keys(task, {found.rows.data(), found.counts.data()});
}

}  // namespace

std::vector<uint32_t> choose_queries(const TrainingQueries& queries, size_t most) {
  const size_t n = queries.rows.tokens;
  const size_t count = std::min(n, most);
  std::vector<uint32_t> chosen(count);
  for (size_t i = 0; i < count; ++i) {
    // The square root makes the density at the end of the prompt twice the mean, and nothing at its start.
    const double share = (static_cast<double>(i) + 0.5) / static_cast<double>(count);
    const double at =
        count == n ? static_cast<double>(i) : std::sqrt(share) * static_cast<double>(n);
    chosen[i] = static_cast<uint32_t>(at);
  }
  // Where most are taken, rounding names some twice: shift those down, from the end, where they are dense.
  for (size_t i = count; i-- > 0;) {
    const auto limit = static_cast<uint32_t>(n - (count - i));
    chosen[i] = std::min(chosen[i], i + 1 < count ? std::min(limit, chosen[i + 1] - 1) : limit);
  }
  return chosen;
}

Neighbours nearest_keys(const Context& context, const RowsView& keys, uint32_t first_position,
                        const TrainingQueries& queries, std::span<const uint32_t> chosen,
                        uint32_t per_query, ProgressMeter& meter, std::span<const uint32_t> rows) {
  const cpu::Kernels& kernels = *context.kernels;
  const uint32_t dim = keys.dim;
  const size_t count = rows.empty() ? keys.tokens : rows.size();
  Neighbours found;
  found.per_query = static_cast<uint32_t>(std::min<size_t>(per_query, count));
  found.counts.resize(chosen.size());
  found.rows.resize(chosen.size() * found.per_query);
  // Keys are searched, and found, by their places among `rows`; of those a query sees a beginning, too.
  const auto sees = [&](uint32_t query) {
    if (queries.positions == nullptr) return count;
    const size_t seen = visible(queries.positions[query], first_position, keys.tokens);
    if (rows.empty()) return seen;
    return static_cast<size_t>(std::lower_bound(rows.begin(), rows.end(), seen) - rows.begin());
  };
  const auto as_rows = [&] {
    for (size_t q = 0; q < chosen.size() && !rows.empty(); ++q) {
      uint32_t* near = found.rows.data() + q * found.per_query;
      for (uint32_t i = 0; i < found.counts[q]; ++i) near[i] = rows[near[i]];
    }
  };

  if (accelerated(context, keys, rows, queries, chosen, sees, found)) {
    as_rows();
    meter.advance(static_cast<double>(chosen.size()));
    return found;
  }

  const auto search_block = [&](size_t first, Block& block) {
    const auto group =
        static_cast<uint32_t>(std::min<size_t>(kQueriesAtOnce, chosen.size() - first));
    size_t furthest = 0;
    for (uint32_t h = 0; h < group; ++h) {
      const uint32_t query = chosen[first + h];
      cpu::read_row(kernels, queries.rows, query, block.queries.data() + size_t{h} * dim);
      furthest = std::max(furthest, sees(query));
    }
    block.top.begin(group, found.per_query, count);
    for (size_t at = 0; at < furthest; at += kScanBlock) {
      const size_t n = std::min(kScanBlock, furthest - at);
      cpu::score_rows(kernels, rows.empty() ? keys.slice(at, n) : keys, block.queries.data(), group,
                      rows.empty() ? nullptr : rows.data() + at, n, block.scores.data(),
                      kScanBlock);
      for (uint32_t h = 0; h < group; ++h) {
        const size_t end = sees(chosen[first + h]);
        if (at >= end) continue;
        block.top.offer(h, block.scores.data() + h * kScanBlock, static_cast<uint32_t>(at),
                        std::min(n, end - at));
      }
    }
    block.ids.resize(size_t{group} * found.per_query);
    block.best.resize(block.ids.size());
    Hits hits{block.ids.data(), block.best.data(), found.counts.data() + first};
    block.top.finish(hits);
    std::copy(block.ids.begin(), block.ids.end(),
              found.rows.begin() + static_cast<std::ptrdiff_t>(first * found.per_query));
    meter.advance(group);
  };

  const size_t blocks = (chosen.size() + kQueriesAtOnce - 1) / kQueriesAtOnce;
  std::vector<Block> memory(context.pool != nullptr ? context.pool->threads() : 1);
  const auto task = [&](uint32_t block, uint32_t worker) {
    search_block(size_t{block} * kQueriesAtOnce, memory[worker]);
  };
  cpu::run_on(context.pool, blocks, task);
  as_rows();
  return found;
}

}  // namespace keyhole::index

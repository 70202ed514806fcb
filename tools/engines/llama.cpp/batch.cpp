#include "tools/engines/llama.cpp/batch.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <future>
#include <numeric>
#include <span>
#include <thread>
#include <vector>

namespace keyhole::llama_cpp {
namespace {

constexpr uint16_t kMinusInfinity = 0xFC00;

/// seen[j] = 1 where the mask is 0. False where it has other numbers than 0 and -infinity.
bool read_row(const uint16_t* mask, std::vector<uint8_t>& seen) {
  uint8_t other = 0;
  for (size_t j = 0; j < seen.size(); ++j) {
    const auto zero = static_cast<uint8_t>((mask[j] & 0x7FFFU) == 0);
    seen[j] = zero;
    other |= static_cast<uint8_t>((zero | static_cast<uint8_t>(mask[j] == kMinusInfinity)) ^ 1U);
  }
  return other == 0;
}

/// Whether `last` holds the last elements of `all`, not none and not all of them.
bool is_proper_end(const std::vector<uint32_t>& last, const std::vector<uint32_t>& all) {
  return !last.empty() && last.size() < all.size() &&
         std::equal(last.rbegin(), last.rend(), all.rbegin());
}

/// Whether `past` has no cell that `all` has not.
bool is_part(const std::vector<uint8_t>& past, const std::vector<uint8_t>& all) {
  for (size_t j = 0; j < past.size(); ++j) {
    if (past[j] > all[j]) return false;
  }
  return true;
}

}  // namespace

Batch read_batch(const uint16_t* mask, int64_t row_stride, uint32_t cells,
                 std::span<const uint32_t> new_cells) {
  Batch batch;
  std::vector<uint8_t> seen(cells);
  std::vector<uint32_t> before;  // rows of the batch that this row sees, without itself
  for (uint32_t row = 0; row < new_cells.size(); ++row) {
    bool understood = read_row(mask + row * row_stride, seen) && seen[new_cells[row]] != 0;
    before.clear();
    for (uint32_t other = 0; other < new_cells.size(); ++other) {
      if (seen[new_cells[other]] != 0 && other != row) before.push_back(other);
      seen[new_cells[other]] = 0;
    }
    understood = understood && (before.empty() || before.back() < row);
    if (!understood) return {BatchKind::kOther, {}};

    const auto same_past =
        std::find_if(batch.runs.rbegin(), batch.runs.rend(),
                     [&](const Run& run) { return run.rows == before && run.past == seen; });
    if (same_past != batch.runs.rend()) {
      same_past->rows.push_back(row);
    } else if (before.empty()) {
      const uint32_t count = std::accumulate(seen.begin(), seen.end(), 0U);
      batch.runs.push_back({{row}, seen, count});
    } else {
      // The row sees some of the batch, and this is no run with its past. Under a window the past, the new tokens or
      // both lack their beginning.
      const bool slid = std::any_of(batch.runs.begin(), batch.runs.end(), [&](const Run& run) {
        return (before == run.rows || is_proper_end(before, run.rows)) && is_part(seen, run.past);
      });
      return {slid ? BatchKind::kSliding : BatchKind::kOther, {}};
    }
  }
  return batch;
}

std::vector<uint16_t> blind_row(uint32_t cells) {
  return std::vector<uint16_t>(cells, kMinusInfinity);
}

bool goes_on(const uint16_t* mask, int64_t row_stride, uint32_t cells,
             std::span<const uint32_t> new_cells, std::span<const uint16_t> past) {
  const auto equal = [&](size_t begin, size_t end) {
    std::vector<uint32_t> own;  // of rows up to the one that is looked at, rising
    for (size_t row = 0; row < end; ++row) {
      const uint32_t cell = new_cells[row];
      if (cell >= cells) return false;
      own.insert(std::upper_bound(own.begin(), own.end(), cell), cell);
      if (row < begin) continue;
      const uint16_t* seen = mask + static_cast<int64_t>(row) * row_stride;
      uint32_t at = 0;
      for (const uint32_t next : own) {
        if (std::memcmp(seen + at, past.data() + at, (next - at) * sizeof(uint16_t)) != 0 ||
            seen[next] != 0) {
          return false;
        }
        at = next + 1;
      }
      if (std::memcmp(seen + at, past.data() + at, (cells - at) * sizeof(uint16_t)) != 0) {
        return false;
      }
    }
    return true;
  };
  constexpr size_t kWorthThreads = size_t{1} << 22U;  // some milliseconds of one thread
  const size_t rows = new_cells.size();
  const size_t threads = rows * cells < kWorthThreads
                             ? 1
                             : std::clamp<size_t>(std::thread::hardware_concurrency() / 2, 1,
                                                  std::min(rows, size_t{16}));
  if (threads == 1) return equal(0, rows);
  // The last row says most: a batch that does not go on is seldom found out by a later part alone.
  if (!equal(rows - 1, rows)) return false;
  std::vector<std::future<bool>> parts;
  for (size_t i = 0; i < threads; ++i) {
    parts.push_back(
        std::async(std::launch::async, equal, rows * i / threads, rows * (i + 1) / threads));
  }
  bool all = true;
  for (std::future<bool>& part : parts) all = part.get() && all;
  return all;
}

}  // namespace keyhole::llama_cpp

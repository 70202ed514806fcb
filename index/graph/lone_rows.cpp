#include "index/graph/lone_rows.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <utility>

namespace keyhole::index {
namespace {

constexpr size_t kSample = 256;
// Beams of usual width see all of so few rows.
constexpr size_t kLeastRows = 2 * kSample;
constexpr size_t kMostLeaders = 64;
// Rows this many times as far from a leader as rows of the sample are from their nearest ones are lone. Rows that are
// drawn from one normal distribution are at most twice as far.
constexpr double kFar = 4.0;
// Leaders have at least this share of the sample about them.
constexpr double kLeastCrowd = 0.5;
// Beside these a search of `hnsw` scores some thousand rows.
constexpr size_t kMostStarts = 256;
constexpr size_t kRowsAtOnce = 256;

// Squared distances, apart from the lift.
class Distances {
 public:
  explicit Distances(const LiftedKeys& keys) : keys_(keys) {}

  /// Of `row` to rows ids[0..n), whose squared lengths are given.
  void of(uint32_t row, const uint32_t* ids, const double* squares, size_t n, double* out) {
    keys_.load(row, query_);
    query_.extra = 0.0F;
    keys_.similarity(query_, ids, n, products_);
    const double square = keys_.square(row);
    for (size_t i = 0; i < n; ++i) {
      out[i] = std::max(square + squares[i] - 2.0 * double{products_[i]}, 0.0);
    }
  }

 private:
  const LiftedKeys& keys_;
  LiftedKeys::Query query_;
  float products_[kRowsAtOnce];
};

// The i-th row of a sample of `rows` rows (splitmix64 as the hash): even steps would meet keys that repeat.
uint32_t sampled_row(uint64_t i, size_t rows) {
  uint64_t x = (i + 1) * 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return static_cast<uint32_t>((x ^ (x >> 31)) % rows);
}

}  // namespace

LoneRows::Found LoneRows::leaders_of(const LiftedKeys& keys,
                                     const std::vector<uint32_t>& representative, size_t sampled) {
  Found found;
  std::vector<uint32_t> sample(kSample);
  for (size_t i = 0; i < kSample; ++i) sample[i] = representative[sampled_row(i, sampled)];
  std::sort(sample.begin(), sample.end());
  sample.erase(std::unique(sample.begin(), sample.end()), sample.end());
  const size_t n = sample.size();
  std::vector<double> squares(n), distances(n * n), nearest;
  for (size_t i = 0; i < n; ++i) squares[i] = keys.square(sample[i]);
  Distances of(keys);
  for (size_t i = 0; i < n; ++i) {
    double* row = distances.data() + i * n;
    of.of(sample[i], sample.data(), squares.data(), n, row);
    double least = std::numeric_limits<double>::infinity();
    for (size_t j = 0; j < n; ++j) {
      if (j != i) least = std::min(least, row[j]);
    }
    nearest.push_back(least);
  }
  const auto median = nearest.begin() + static_cast<std::ptrdiff_t>(n / 2);
  std::nth_element(nearest.begin(), median, nearest.end());
  // Where rows are nearer than fp32 can tell in products of their size, that is the distance.
  const double rounding = 1e-4 * std::accumulate(squares.begin(), squares.end(), 0.0) / double(n);
  found.reach = kFar * kFar * std::max(*median, rounding);
  std::vector<uint8_t> is_near(n, 0);
  size_t crowd = 0;
  while (found.leaders.size() < kMostLeaders) {
    size_t best = 0, most = 1;  // a row that has none about it but itself leads none
    for (size_t i = 0; i < n; ++i) {
      size_t about = 0;
      for (size_t j = 0; j < n; ++j) {
        about += is_near[j] == 0 && distances[i * n + j] <= found.reach ? 1 : 0;
      }
      if (about > most) {
        best = i;
        most = about;
      }
    }
    if (most == 1) break;
    for (size_t j = 0; j < n; ++j) {
      if (distances[best * n + j] <= found.reach) is_near[j] = 1;
    }
    found.leaders.push_back(sample[best]);
    crowd += most;
  }
  if (static_cast<double>(crowd) < kLeastCrowd * static_cast<double>(n)) found.leaders.clear();
  return found;
}

LoneRows LoneRows::of(const LiftedKeys& keys, const Twins& twins) const {
  const size_t count = keys.rows().tokens;
  // Without a lift rows are loaded as they lie, while squares are those of the lift's space: they make no distances.
  if (count < kLeastRows || !keys.is_lifted()) return {};
  LoneRows out = *this;
  out.count_ = count;
  if (std::bit_floor(count) == sampled_ && !found_) return out;
  const std::vector<uint32_t> representative = twins.representatives(count);
  size_t first = count_;
  Found found;
  if (std::bit_floor(count) != sampled_) {
    out.sampled_ = std::bit_floor(count);
    found = leaders_of(keys, representative, out.sampled_);
    first = 0;
  } else {
    found = *found_;
  }
  if (found.leaders.empty()) {
    out.found_ = {};
    return out;
  }
  std::erase_if(found.rows, [&](uint32_t row) { return row >= count; });
  std::vector<uint32_t> ids(kRowsAtOnce);
  std::vector<double> squares(kRowsAtOnce), nearest(kRowsAtOnce), distances(kRowsAtOnce);
  Distances of(keys);
  for (; first < count; first += kRowsAtOnce) {
    const size_t n = std::min(kRowsAtOnce, count - first);
    std::iota(ids.begin(), ids.end(), static_cast<uint32_t>(first));
    for (size_t i = 0; i < n; ++i) squares[i] = keys.square(first + i);
    std::fill(nearest.begin(), nearest.end(), std::numeric_limits<double>::infinity());
    for (const uint32_t leader : found.leaders) {
      of.of(leader, ids.data(), squares.data(), n, distances.data());
      for (size_t i = 0; i < n; ++i) nearest[i] = std::min(nearest[i], distances[i]);
    }
    for (size_t i = 0; i < n; ++i) {
      const uint32_t row = ids[i];
      if (nearest[i] > found.reach && representative[row] == row) found.rows.push_back(row);
    }
  }
  const size_t many = found.rows.size(), starts = std::min(many, kMostStarts);
  found.starts.resize(starts);
  for (size_t i = 0; i < starts; ++i) found.starts[i] = found.rows[i * many / starts];
  out.found_ = cpu::Shared(std::move(found));
  return out;
}

}  // namespace keyhole::index

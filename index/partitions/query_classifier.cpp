#include "index/partitions/query_classifier.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu/row_access.h"
#include "index/grow.h"

namespace keyhole::index {
namespace {

constexpr uint32_t kMaxHidden = 8192;
// The score kernels take rows of these widths: w2 is kept in pieces of so many hidden units.
constexpr uint32_t kWidest = 256;

uint32_t width_of_piece(uint32_t left) { return left >= 256 ? 256 : left >= 128 ? 128 : 64; }

void require(bool ok, const std::string& what) {
  if (!ok) throw Error(Status::corrupt, "the classifier " + what);
}

const std::byte* bytes_of(const std::vector<uint16_t>& halves) {
  return reinterpret_cast<const std::byte*>(halves.data());
}

bool finite(const std::vector<float>& x) {
  return std::all_of(x.begin(), x.end(), [](float v) { return std::isfinite(v); });
}

// e^x for x <= 0, to 4 digits, 0 below e^-87; operations that the baseline instruction set vectorises.
inline float quick_exp(float x) {
  const float t = (x > -87.0F ? x : -87.0F) * 1.44269504F;
  const auto whole = static_cast<int32_t>(t);
  const float f = t - static_cast<float>(whole);  // (-1, 0]
  // Minimax of 2^f.
  const float power = 1.0F + f * (0.69314F + f * (0.24013F + f * (0.0549F + f * 0.0088F)));
  return power * std::bit_cast<float>((whole + 127) << 23);
}

}  // namespace

QueryClassifier::QueryClassifier(const cpu::Kernels& kernels, ClassifierWeights weights)
    : kernels_(&kernels), weights_(std::move(weights)) {
  const ClassifierWeights& w = weights_;
  const size_t count = w.partitions.count();
  require(is_supported_head_dim(w.dim),
          "has head dimension " + std::to_string(w.dim) + "; allowed: " + kHeadDims);
  require(w.hidden % 64 == 0 && w.hidden >= 64 && w.hidden <= kMaxHidden,
          "has " + std::to_string(w.hidden) + " hidden units; allowed: multiples of 64 up to " +
              std::to_string(kMaxHidden));
  require(count >= 1 && count <= kMaxPartitions, "has " + std::to_string(count) +
                                                     " partitions; allowed: 1.." +
                                                     std::to_string(kMaxPartitions));
  require(w.partitions.centroids.size() == count * w.dim &&
              w.w1.size() == size_t{w.hidden} * w.dim && w.b1.size() == w.hidden &&
              w.w2.size() == count * w.hidden && w.b2.size() == count &&
              w.w3.size() == count * w.dim,
          "has tensors that do not fit each other");
  const auto all_finite = [&](const std::vector<uint16_t>& halves) {
    return kernels.all_finite[static_cast<size_t>(DType::f16)](bytes_of(halves), halves.size());
  };
  require(finite(w.partitions.centroids) && finite(w.partitions.bonuses) && finite(w.b1) &&
              finite(w.b2) && all_finite(w.w1) && all_finite(w.w2) && all_finite(w.w3),
          "holds a number that is not finite");
  Checksum sum;
  const auto add = [&](const auto& x) { sum.update(x.data(), x.size() * sizeof x[0]); };
  add(w.partitions.centroids), add(w.partitions.bonuses), add(w.w1), add(w.b1), add(w.w2),
      add(w.b2), add(w.w3);
  digest_ = sum.value();

  std::vector<uint16_t> pieces;
  pieces.reserve(w.w2.size());
  for (uint32_t first = 0; first < w.hidden;) {
    const uint32_t width = width_of_piece(w.hidden - first);
    for (size_t c = 0; c < count; ++c) {
      const auto begin = w.w2.begin() + static_cast<std::ptrdiff_t>(c * w.hidden + first);
      pieces.insert(pieces.end(), begin, begin + width);
    }
    first += width;
  }
  weights_.w2 = std::move(pieces);
}

size_t QueryClassifier::network_bytes() const {
  return (weights_.w1.size() + weights_.w2.size() + weights_.w3.size()) * sizeof(uint16_t);
}

void QueryClassifier::Scratch::reserve(uint32_t max_group, size_t partitions) {
  const size_t size = max_group * partitions;
  grow(hidden_, size_t{max_group} * kWidest);
  grow(logits_, size);
  grow(partial_, size);
}

void QueryClassifier::add_hidden_logits(const float* queries, uint32_t group,
                                        Scratch& scratch) const {
  const ClassifierWeights& w = weights_;
  const size_t count = w.partitions.count();
  for (uint32_t first = 0; first < w.hidden;) {
    const uint32_t width = width_of_piece(w.hidden - first);
    cpu::score_rows(*kernels_,
                    dense_rows(w.w1.data() + size_t{first} * w.dim, width, w.dim, DType::f16),
                    queries, group, nullptr, width, scratch.hidden_.data(), width);
    for (uint32_t h = 0; h < group; ++h) {
      float* units = scratch.hidden_.data() + size_t{h} * width;
      for (uint32_t i = 0; i < width; ++i) {
        const float x = units[i] + w.b1[first + i];
        units[i] = x > 0.0F ? x : 0.0F;
      }
    }
    cpu::score_rows(*kernels_,
                    dense_rows(w.w2.data() + size_t{first} * count, count, width, DType::f16),
                    scratch.hidden_.data(), group, nullptr, count, scratch.partial_.data(), count);
    for (size_t i = 0; i < group * count; ++i) scratch.logits_[i] += scratch.partial_[i];
    first += width;
  }
}

void QueryClassifier::densities(const float* queries, uint32_t group, const float* log_sizes,
                                Scratch& scratch, float* density) const {
  const ClassifierWeights& w = weights_;
  const size_t count = w.partitions.count();
  cpu::score_rows(*kernels_, dense_rows(w.w3.data(), count, w.dim, DType::f16), queries, group,
                  nullptr, count, scratch.logits_.data(), count);
  add_hidden_logits(queries, group, scratch);
  std::fill_n(density, count, 0.0F);
  for (uint32_t h = 0; h < group; ++h) {
    // e^z / sum n e^z, all times the largest n e^z.
    float* logits = scratch.logits_.data() + h * count;
    float* shares = scratch.partial_.data();
    float top = kMinusInf;
    for (size_t c = 0; c < count; ++c) {
      logits[c] += w.b2[c];
      shares[c] = logits[c] + log_sizes[c];
      top = shares[c] > top ? shares[c] : top;
    }
    // Queries beyond all bounds, or no key at all: this head has no preference.
    if (!std::isfinite(top)) continue;
    float sum = 0.0F;
    for (size_t c = 0; c < count; ++c) sum += quick_exp(shares[c] - top);
    for (size_t c = 0; c < count; ++c) {
      const float x = logits[c] - top;  // at most 0 where the partition has a key
      density[c] += quick_exp(x < 0.0F ? x : 0.0F) / sum;
    }
  }
}

}  // namespace keyhole::index

#include "tools/caches/oscar.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>
#include <string>

#include "tools/caches/affine_codes.h"

namespace keyhole::tools {
namespace {

constexpr unsigned kBits = 2;
constexpr uint32_t kChannelsTogether = 128;
constexpr uint32_t kFirst = 64, kNewest = 512, kRun = 32;

class Oscar : public AgingFormat {
 public:
  Oscar(std::vector<OscarHead> heads, uint32_t kv_heads, uint32_t head_dim)
      : AgingFormat(oscar_layout(head_dim)),
        heads_(std::move(heads)),
        kv_heads_(kv_heads),
        dim_(head_dim) {}

  void pass(uint32_t layer, uint32_t kv_head, KvRows rows, float* numbers,
            size_t count) const override {
    const OscarHead& head = heads_.at(size_t{layer} * kv_heads_ + kv_head);
    pass_oscar(rows == KvRows::keys ? head.keys : head.values, numbers, count, dim_);
  }

 private:
  const std::vector<OscarHead> heads_;
  const uint32_t kv_heads_, dim_;
};

}  // namespace

AgingLayout oscar_layout(uint32_t head_dim) {
  if (head_dim < 32 || !std::has_single_bit(head_dim)) {
    throw std::invalid_argument("head_dim is " + std::to_string(head_dim) +
                                "; allowed: powers of two from 32 on, which a Walsh-Hadamard "
                                "matrix turns as a whole");
  }
  const double number = kBits + kAffineGroupBits / std::min(head_dim, kChannelsTogether);
  const AgingLayout::Ages ages{.recent = kNewest, .granule = kRun, .bits = number};
  return {.sink = kFirst, .keys = ages, .values = ages};
}

std::shared_ptr<const AgingFormat> make_oscar(std::vector<OscarHead> heads, uint32_t kv_heads,
                                              uint32_t head_dim) {
  return std::make_shared<Oscar>(std::move(heads), kv_heads, head_dim);
}

float clip_threshold(const float* row, size_t dim, float quantile) {
  std::vector<float> magnitudes(dim);
  for (size_t c = 0; c < dim; ++c) magnitudes[c] = std::abs(row[c]);
  const auto place = std::min(
      static_cast<size_t>(std::floor(double{quantile} * static_cast<double>(dim))), dim - 1);
  const auto at = magnitudes.begin() + static_cast<ptrdiff_t>(place);
  std::nth_element(magnitudes.begin(), at, magnitudes.end());
  return *at;
}

void pass_oscar(const OscarTurn& turn, float* rows, size_t count, size_t dim) {
  std::vector<float> turned(dim);
  const size_t group = std::min<size_t>(dim, kChannelsTogether);
  for (float* row = rows; row < rows + count * dim; row += dim) {
    std::fill(turned.begin(), turned.end(), 0.0F);
    for (size_t i = 0; i < dim; ++i) {
      const float* r = turn.rotation.data() + i * dim;
      for (size_t j = 0; j < dim; ++j) turned[j] += row[i] * r[j];
    }
    // Without a clip a row that is no number shows; nth_element may not be asked to order one.
    if (turn.quantile < 1.0F &&
        std::all_of(turned.begin(), turned.end(), [](float x) { return std::isfinite(x); })) {
      const float most = clip_threshold(turned.data(), dim, turn.quantile);
      for (float& y : turned) y = std::clamp(y, -most, most);
    }
    for (size_t j = 0; j < dim; j += group) round_affine(turned.data() + j, group, 1, kBits);
    for (size_t i = 0; i < dim; ++i) {
      const float* r = turn.rotation.data() + i * dim;
      float sum = 0.0F;
      for (size_t j = 0; j < dim; ++j) sum += turned[j] * r[j];
      row[i] = sum;
    }
  }
}

}  // namespace keyhole::tools

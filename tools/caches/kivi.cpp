#include "tools/caches/kivi.h"

#include <stdexcept>
#include <string>

#include "tools/caches/affine_codes.h"

namespace keyhole::tools {
namespace {

constexpr uint32_t kGroup = 32;
constexpr uint32_t kResidual = 128;

class Kivi : public AgingFormat {
 public:
  Kivi(unsigned bits, uint32_t head_dim)
      : AgingFormat(kivi_layout(bits, head_dim)), bits_(bits), dim_(head_dim) {}

  void pass(uint32_t /*layer*/, uint32_t /*kv_head*/, KvRows rows, float* numbers,
            size_t count) const override {
    if (rows == KvRows::keys) {
      for (size_t first = 0; first < count; first += kGroup) {
        for (size_t c = 0; c < dim_; ++c) {
          round_affine(numbers + first * dim_ + c, kGroup, dim_, bits_);
        }
      }
      return;
    }
    for (size_t i = 0; i < count * dim_; i += kGroup) {
      round_affine(numbers + i, kGroup, 1, bits_);
    }
  }

 private:
  const unsigned bits_;
  const size_t dim_;
};

}  // namespace

AgingLayout kivi_layout(unsigned bits, uint32_t head_dim) {
  if (head_dim == 0 || head_dim % kGroup != 0) {
    throw std::invalid_argument("head_dim is " + std::to_string(head_dim) +
                                "; allowed: multiples of 32, the channels that share a step");
  }
  const double number = bits + kAffineGroupBits / kGroup;
  return {.keys = {.recent = 0, .granule = kResidual, .bits = number},
          .values = {.recent = kResidual, .granule = kGroup, .bits = number}};
}

std::shared_ptr<const AgingFormat> make_kivi(unsigned bits, uint32_t head_dim) {
  return std::make_shared<Kivi>(bits, head_dim);
}

}  // namespace keyhole::tools

#include "index/scan/code_parts.h"

#include <algorithm>

#include "index/grow.h"

namespace keyhole::index {
namespace {

// Enough work (60 us for 2 bits and a group of 4) that a query's preparation, some 3 us, does not count.
constexpr uint32_t kLeastCutBlocks = 24;

}  // namespace

CodeCut code_cut(size_t blocks) {
  CodeCut cut;
  cut.blocks = kLeastCutBlocks;
  while (size_t{cut.blocks} * kMostCodeParts < blocks) cut.blocks *= 2;
  cut.parts = static_cast<uint32_t>((blocks + cut.blocks - 1) / cut.blocks);
  return cut;
}

void CodeParts::reserve(const CodeShape& shape, uint32_t group, uint32_t wanted) {
  wanted = std::max(wanted_, std::min(wanted, kMostExactRows));
  const size_t o_stride = std::max(o_stride_, size_t{group} * shape.dim);
  group = std::max(group_, group);
  grow(o_, kMostCodeParts * o_stride);
  grow(tops_, size_t{kMostCodeParts} * group);
  grow(sums_, size_t{kMostCodeParts} * group);
  grow(counts_, size_t{kMostCodeParts} * group);
  grow(widest_, kMostCodeParts);
  grow(best_, size_t{kMostCodeParts} * group * wanted);
  if (floors_ == nullptr) floors_ = std::make_unique<std::atomic<float>[]>(kMaxGroup);
  // Last: nothing claims to have grown that has not.
  wanted_ = wanted;
  o_stride_ = o_stride;
  group_ = group;
  begin();
}

void CodeParts::begin() {
  for (uint32_t h = 0; h < group_; ++h) floors_[h].store(kMinusInf, std::memory_order_relaxed);
}

}  // namespace keyhole::index

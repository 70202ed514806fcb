#include "runtime/session/host_extends.h"

#include <algorithm>

namespace keyhole::runtime {
namespace {

// What less rows take is less than what it takes to do them together.
constexpr uint32_t kLeastCommonRows = 1024;

}  // namespace

void HostExtends::answer(uint32_t layer, const TensorView& q, const TensorOut& out, float* lse) {
  ExtendArgs args;
  args.q = q;
  args.out = out;
  args.lse = lse;
  HostExtension extension(parts_, layer, args, HostExtension::Tokens::somebody_elses);
  while (extension.start()) extension.finish();
}

bool HostExtends::is_copy(uint32_t layer, const HostExtends& other) const {
  if (has_codes_of(layer, other)) return true;
  const uint32_t rows = common_rows(layer, other);
  if (rows < kLeastCommonRows) return false;
  for (uint32_t h = 0; h < parts_.host.engine.model().of(layer).kv_heads; ++h) {
    const size_t first = std::max(parts_.host.work.exact_from(layer, h),
                                  other.parts_.host.work.exact_from(layer, h));
    if (first + kLeastCommonRows <= rows) return true;
  }
  return false;
}

bool HostExtends::has_codes_of(uint32_t layer, const HostExtends& other) const {
  const index::Index *mine = keeper_->head(layer, 0).index.get(),
                     *theirs = other.keeper_->head(layer, 0).index.get();
  if (mine == nullptr || theirs == nullptr) return false;
  const auto a = index::CodedRows::of(*mine), b = index::CodedRows::of(*theirs);
  if (a.lists != nullptr && b.lists != nullptr) return read_together(*a.lists, *b.lists);
  return a.blocks != nullptr && b.blocks != nullptr &&
         a.blocks->common_blocks(*b.blocks) * kCodeBlock >= kLeastCommonRows;
}

}  // namespace keyhole::runtime

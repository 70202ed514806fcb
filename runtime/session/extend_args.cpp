#include "runtime/session/extend_args.h"

#include <string>

namespace keyhole::runtime {
namespace {

void check_mask(const uint64_t* mask, uint32_t n) {
  if (mask == nullptr) return;
  if (n > 64) {
    throw Error(Status::invalid_argument,
                "a mask for " + std::to_string(n) + " tokens, allowed: up to 64 with a mask");
  }
  for (uint32_t i = 0; i < n; ++i) {
    if (mask[i] >> i == 1) continue;
    throw Error(Status::invalid_argument, "word " + std::to_string(i) + " of the mask is " +
                                              std::to_string(mask[i]) + ", needed: bit " +
                                              std::to_string(i) + " set and none above it");
  }
}

}  // namespace

ExtendArgs slice(const ExtendArgs& args, uint32_t begin, uint32_t n) {
  ExtendArgs part = args;
  part.q = args.q.slice(begin, n);
  part.k = args.k.slice(begin, n);
  part.v = args.v.slice(begin, n);
  part.out = args.out.slice(begin, n);
  if (args.lse != nullptr) part.lse = args.lse + size_t{begin} * args.q.heads;
  return part;
}

void check_counts(const ExtendArgs& args) {
  const uint32_t n = args.k.tokens;
  if (n == 0) {
    throw Error(Status::invalid_argument, "tensor k has 0 tokens, allowed: at least 1");
  }
  if (args.q.tokens != n) {
    throw Error(Status::invalid_argument, "tensor q has " + std::to_string(args.q.tokens) +
                                              " tokens, needed: as many as k, " +
                                              std::to_string(n));
  }
  if (args.v.tokens != n) {
    throw Error(Status::invalid_argument, "tensor v has " + std::to_string(args.v.tokens) +
                                              " tokens, needed: as many as k, " +
                                              std::to_string(n));
  }
  check_mask(args.mask, n);
}

}  // namespace keyhole::runtime

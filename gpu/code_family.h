// Which layers of codes have their first blocks in common: a layer and its copies, until one of them is cut. Steps of
// several of them together read what they share once.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

namespace keyhole::gpu {

/// What a layer has in common with the others of its family: of any two the blocks that the smaller of their numbers
/// says. Used by one thread at a time; its copies may be used by others.
class CodeFamily {
 public:
  /// The same of all members, and of no other family at that time; null: there is none.
  [[nodiscard]] const void* id() const { return mark_.get(); }
  [[nodiscard]] uint32_t shared() const { return shared_; }

  /// The layer keeps its first `blocks` blocks, or gets others behind them. Whether shared() changes.
  bool cut(uint32_t blocks) {
    if (blocks >= shared_) return false;
    shared_ = blocks;
    return true;
  }
  /// The layer, which has `count` blocks, is copied: what its family and the copy's are from now on. The two become
  /// a new family only where nobody else is in the old one: a graph of steps that is to read the blocks which its
  /// members share has the members in it and asks for their numbers when it runs, so that the number of one of them
  /// must not rise by what it shares with somebody new.
  CodeFamily copied(uint32_t count) {
    if (mark_.use_count() <= 1) *this = CodeFamily(std::make_shared<const char>(), count);
    return *this;
  }

  CodeFamily() = default;

 private:
  CodeFamily(std::shared_ptr<const char> mark, uint32_t shared)
      : mark_(std::move(mark)), shared_(shared) {}

  std::shared_ptr<const char> mark_;
  uint32_t shared_ = 0;
};

}  // namespace keyhole::gpu

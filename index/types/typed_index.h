// What all index types do alike with their scratch: make it, make it large enough, refuse that of another type.
#pragma once

#include <memory>
#include <string>

#include "index/base.h"

namespace keyhole::index {

/// An index whose searches work in an `S`: a SearchScratch, or a class derived from it with the same constructor.
template <class S>
class TypedIndex : public BasicIndex {
 public:
  using BasicIndex::BasicIndex;

  [[nodiscard]] std::unique_ptr<Scratch> make_scratch(uint32_t max_group,
                                                      uint32_t max_k) const final {
    auto scratch = std::make_unique<S>(max_group, max_k);
    reserve_search(*scratch);
    return scratch;
  }
  void reserve_search(Scratch& scratch) const final {
    S& own = own_scratch(scratch);
    own.collector.begin_top(own.max_group, own.max_k, count());
    reserve(own);
  }

 protected:
  /// Reserves what a search needs beside the collector's best k.
  virtual void reserve(S& /*scratch*/) const {}
  /// Reserves what a search with a logging collector needs beside the collector's log.
  virtual void reserve_log(S& /*scratch*/) const {}
  /// Searches as BasicIndex::do_search() says.
  virtual void find(const SearchArgs& args, S& scratch, SearchCost& cost) const = 0;

 private:
  void do_search(const SearchArgs& args, SearchScratch& scratch, SearchCost& cost) const final {
    find(args, own_scratch(scratch), cost);
  }
  void do_reserve_log(SearchScratch& scratch) const final { reserve_log(own_scratch(scratch)); }

  [[nodiscard]] S& own_scratch(Scratch& scratch) const {
    auto* own = dynamic_cast<S*>(&scratch);
    if (own == nullptr) {
      throw Error(Status::invalid_argument,
                  std::string(type().name) + " index: the scratch is another index type's");
    }
    return *own;
  }
};

}  // namespace keyhole::index

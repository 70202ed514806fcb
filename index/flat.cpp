#include "index/flat.h"

#include "index/base.h"

namespace keyhole::index {

const TypeDecl kFlatType = {"flat", "exact scan of all keys", {}};

namespace {

class FlatIndex final : public BasicIndex {
 public:
  using BasicIndex::BasicIndex;

  [[nodiscard]] std::unique_ptr<Scratch> make_scratch(uint32_t max_group,
                                                      uint32_t max_k) const override {
    auto scratch = std::make_unique<SearchScratch>(max_group, max_k);
    scratch->collector.begin_top(max_group, max_k, count());
    return scratch;
  }

 protected:
  void do_build(const BuildInput&, const Progress& progress) override {
    ProgressMeter(progress, 1.0).advance(1.0);
  }
  [[nodiscard]] std::unique_ptr<Addition> do_prepare(const RowsView&,
                                                     const Progress& progress) const override {
    ProgressMeter(progress, 1.0).advance(1.0);
    return std::make_unique<Addition>();
  }
  void do_commit(Addition&) override {}
  void do_truncate(size_t) override {}
  void do_search(const SearchArgs& args, SearchScratch& scratch, SearchCost& cost) const override {
    scan_all(args, scratch, cost);
  }
  void describe(IndexInfo&) const override {}
  void save_body(Writer&) const override {}
  void load_body(Reader& in, const RowsView&) override { in.finish(); }
};

}  // namespace

std::unique_ptr<Index> make_flat(const Spec& spec, uint32_t dim, DType dtype,
                                 const Context& context) {
  return std::make_unique<FlatIndex>(spec, dim, dtype, context);
}

size_t estimate_flat(const Spec&, size_t, uint32_t, DType) { return 0; }

}  // namespace keyhole::index

#include "index/types/sparq.h"

#include <algorithm>
#include <cmath>

#include "cpu/shared.h"
#include "index/grow.h"
#include "index/scan/component_blocks.h"
#include "index/scan/component_choice.h"
#include "index/scan/shortlist.h"
#include "index/types/codec.h"
#include "index/types/typed_index.h"

namespace keyhole::index {
namespace {

enum Param : size_t { kR, kLocal, kCodecOfComponents };

constexpr ParamDecl kParams[] = {
    integer("r", Stage::search, 0, 0, kMaxHeadDim,
            "components of every key that a search reads; 0: a quarter of the head dimension"),
    integer("local", Stage::search, 0, 0, 1 << 24,
            "newest indexed keys that are in every answer, within k"),
    choice("codec", Stage::build, kNoCodec, kCodecOptions,
           "what components are read: the keys', or those of an int8 copy"),
};

constexpr uint32_t kAutoComponentShare = 4;  // the paper's r = 32 of 128

/// ln(e^a + e^b); -inf is an empty sum.
double add_logs(double a, double b) {
  if (a < b) std::swap(a, b);
  return b == kMinusInf ? a : a + std::log1p(std::exp(b - a));
}

struct SparqScratch final : SearchScratch {
  using SearchScratch::SearchScratch;

  /// Memory for searches of `count` rows; allocates only where that is more than before.
  void reserve(uint32_t group, size_t k, size_t count, uint32_t dim) {
    grow(queries.elements, size_t{group} * dim);
    grow(masked, size_t{group} * dim);
    const size_t each = std::min(k, count);
    shortlist.begin(group, each, count);
    const size_t most = group * std::min(group * each, count);
    if (exact.size() < most) exact.resize(most + most / 4);
    if (approximate.size() < most) approximate.resize(most + most / 4);
  }

  ComponentBlocks::Queries queries;
  Shortlist shortlist;
  TopK others;                     ///< the best beside the local rows
  std::vector<float> exact;        ///< `[group, rows of the shortlist]` scores of the keys
  std::vector<float> approximate;  ///< likewise, of the chosen components alone
  std::vector<float> masked;       ///< `[group, dim]` queries, 0 but in the chosen components
};

/// The approximate softmax of every head: its logits, and their log-sum-exp over the rows seen so far.
class ApproximateSoftmax {
 public:
  ApproximateSoftmax(const cpu::Kernels& kernels, const LogitParams& logits, const SearchArgs& args,
                     uint32_t dim, std::span<const float> scale,
                     const ComponentBlocks::Queries& queries)
      : kernels_(kernels), group_(args.group) {
    for (uint32_t h = 0; h < group_; ++h) {
      logits_[h] = logits;
      logits_[h].scale *= softmax_sharpening(args.queries + size_t{h} * dim, dim, scale,
                                             {queries.components, queries.chosen});
      shift_[h] = queries.shift[h];
      lse_[h] = kMinusInf;
    }
  }

  /// Adds n rows with scores[h * stride + i], which the shift that codes lack is added to.
  void add(float* scores, size_t stride, size_t n) {
    for (uint32_t h = 0; h < group_; ++h) {
      float* s = scores + h * stride;
      for (size_t i = 0; shift_[h] != 0.0F && i < n; ++i) s[i] += shift_[h];
      lse_[h] = add_logs(lse_[h], kernels_.log_sum_exp(s, n, logits_[h]));
    }
  }

  /// The share of n of the rows in head h. 1 where scores have overflowed: nothing is said to be missing.
  [[nodiscard]] float share(uint32_t h, const float* scores, size_t n) const {
    const double share = std::exp(kernels_.log_sum_exp(scores, n, logits_[h]) - lse_[h]);
    return share < 1.0 ? static_cast<float>(share) : 1.0F;
  }

 private:
  const cpu::Kernels& kernels_;
  uint32_t group_;
  LogitParams logits_[kMaxGroup];
  float shift_[kMaxGroup];
  double lse_[kMaxGroup];
};

class SparqIndex final : public TypedIndex<SparqScratch> {
 public:
  SparqIndex(Spec spec, uint32_t dim, DType dtype, const Context& context)
      : TypedIndex(std::move(spec), dim, dtype, context), blocks_(no_blocks()) {}

  // A search has one part: coverage is about all keys, and each part would read k keys whole.
  [[nodiscard]] Sharing sharing() const override { return Sharing::none; }
  [[nodiscard]] size_t bytes() const override { return blocks_->bytes(); }
  [[nodiscard]] size_t bytes_of_others() const override { return cpu::bytes_of_others(blocks_); }

 protected:
  void do_build(const BuildInput& input, const std::vector<float>&,
                const Progress& progress) override {
    ComponentBlocks blocks = no_blocks();
    if (input.keys.tokens > 0) {
      ComponentBlocks::Growth all = blocks.grow(input.keys, context().pool, progress);
      blocks.take(all);
    }
    blocks_ = cpu::Shared(std::move(blocks));
  }
  [[nodiscard]] std::unique_ptr<Addition> do_prepare(const RowsView& keys,
                                                     const std::vector<float>&,
                                                     const Progress& progress) const override {
    auto rows = std::make_unique<Rows>();
    rows->growth = blocks_->grow(keys, context().pool, progress);
    return rows;
  }
  void do_commit(Addition& addition) override {
    blocks_.own().take(static_cast<Rows&>(addition).growth);
  }
  void do_truncate(size_t count) override { blocks_.own().truncate(count); }
  [[nodiscard]] std::unique_ptr<BasicIndex> do_share() const override {
    return std::make_unique<SparqIndex>(*this);
  }
  void reserve(SparqScratch& scratch) const override {
    scratch.others.begin(scratch.max_group, scratch.max_k, count());
    scratch.reserve(scratch.max_group, scratch.max_k, count(), dim());
  }
  void find(const SearchArgs& args, SparqScratch& scratch, SearchCost& cost) const override;
  void describe(IndexInfo& info) const override {
    Spec effective = spec();
    effective.set(kR, components());
    info.params = effective.text();
  }
  void save_body(Writer& out) const override { blocks_->save(out); }
  void load_body(Reader& in, const RowsView& keys) override {
    ComponentBlocks blocks = no_blocks();
    blocks.load(in, keys, context().pool);
    blocks_ = cpu::Shared(std::move(blocks));
  }

 private:
  struct Rows final : Addition {
    ComponentBlocks::Growth growth;
  };

  [[nodiscard]] ComponentBlocks no_blocks() const {
    return {kernels(), dim(), dtype(), spec()[kCodecOfComponents] == kInt8};
  }
  [[nodiscard]] uint32_t components() const {
    const auto asked = static_cast<uint32_t>(spec()[kR]);
    return asked == 0 ? dim() / kAutoComponentShare : std::min(asked, dim());
  }
  [[nodiscard]] LogitParams logits() const {
    LogitParams p = context().logits;
    if (p.scale == 0.0F) p.scale = 1.0F / std::sqrt(static_cast<float>(dim()));
    return p;
  }

  /// Step 1: offers all rows but the newest `local` by their approximate scores, and adds them all to the
  /// softmax, where there is one.
  void scan(SparqScratch& scratch, size_t local, ApproximateSoftmax* softmax) const;
  /// Offers rows with their exact scores, of which the first `local` must be among each head's k.
  static void collect(const SearchArgs& args, SparqScratch& scratch, std::span<const uint32_t> rows,
                      size_t local);
  void fill_coverage(const SearchArgs& args, SparqScratch& scratch, std::span<const uint32_t> rows,
                     const ApproximateSoftmax& softmax, float* coverage) const;

  cpu::Shared<ComponentBlocks> blocks_;
};

void SparqIndex::scan(SparqScratch& scratch, size_t local, ApproximateSoftmax* softmax) const {
  const size_t offered = count() - local;
  float* scores = scratch.scores.data();
  static_assert(ComponentBlocks::kRows % kScanBlock == 0);
  for (size_t first = 0; first < count(); first += kScanBlock) {
    const size_t n = std::min(kScanBlock, count() - first);
    blocks_->score(scratch.queries, first, n, scores, kScanBlock);
    if (first < offered) {
      scratch.shortlist.offer(scores, kScanBlock, static_cast<uint32_t>(first),
                              std::min(n, offered - first));
    }
    if (softmax != nullptr) softmax->add(scores, kScanBlock, n);
  }
}

void SparqIndex::collect(const SearchArgs& args, SparqScratch& scratch,
                         std::span<const uint32_t> rows, size_t local) {
  const float* exact = scratch.exact.data();
  if (local == 0 || scratch.collector.logging()) {
    return scratch.collector.offer(exact, rows.size(), rows.data(), rows.size());
  }
  TopK& best = scratch.collector.top();
  const size_t others = rows.size() - local;
  const size_t places = std::min(args.k - local, others);
  if (places > 0) scratch.others.begin(args.group, static_cast<uint32_t>(places), others);
  for (uint32_t h = 0; h < args.group; ++h) {
    const float* scores = exact + h * rows.size();
    best.offer(h, scores, rows.data(), local);
    if (places == 0) continue;
    scratch.others.offer(h, scores + local, rows.data() + local, others);
    for (const uint64_t rank : scratch.others.selected(h)) best.offer_rank(h, rank);
  }
}

void SparqIndex::fill_coverage(const SearchArgs& args, SparqScratch& scratch,
                               std::span<const uint32_t> rows, const ApproximateSoftmax& softmax,
                               float* coverage) const {
  // The rows were read just now: scoring them once more by the chosen components costs less than keeping the
  // approximate scores of all rows.
  std::fill_n(scratch.masked.begin(), size_t{args.group} * dim(), 0.0F);
  for (uint32_t c = 0; c < scratch.queries.chosen; ++c) {
    for (uint32_t h = 0; h < args.group; ++h) {
      const size_t at = size_t{h} * dim() + scratch.queries.components[c];
      scratch.masked[at] = args.queries[at];
    }
  }
  SearchArgs masked = args;
  masked.queries = scratch.masked.data();
  score_ids(kernels(), keys(), masked, rows.data(), rows.size(), scratch.approximate.data(),
            rows.size());
  for (uint32_t h = 0; h < args.group; ++h) {
    coverage[h] = softmax.share(h, scratch.approximate.data() + h * rows.size(), rows.size());
  }
}

void SparqIndex::find(const SearchArgs& args, SparqScratch& scratch, SearchCost& cost) const {
  if (args.k == 0) return;
  if (args.k >= count()) {  // all of them: nothing to choose
    if (cost.coverage != nullptr) std::fill_n(cost.coverage, args.group, 1.0F);
    return scan_all(args, scratch, cost);
  }
  const size_t local = std::min<size_t>(static_cast<size_t>(spec()[kLocal]), args.k);
  scratch.reserve(args.group, args.k, count(), dim());
  scratch.shortlist.begin(args.group, args.k - local, count() - local, local);

  ComponentBlocks::Queries& queries = scratch.queries;
  queries.group = args.group;
  queries.chosen = components();
  choose_components(args.queries, args.group, dim(), channel_scale(), queries.chosen,
                    queries.components);
  blocks_->encode_queries(args.queries, queries);
  ApproximateSoftmax softmax(kernels(), logits(), args, dim(), channel_scale(), queries);
  const bool covers = cost.coverage != nullptr;
  if (local < args.k || covers) scan(scratch, local, covers ? &softmax : nullptr);

  const auto rows = scratch.shortlist.unite(count() - local, count());
  score_ids(kernels(), keys(), args, rows.data(), rows.size(), scratch.exact.data(), rows.size());
  if (covers) fill_coverage(args, scratch, rows, softmax, cost.coverage);
  collect(args, scratch, rows, local);
  cost.keys_scored += args.group * rows.size();
  cost.bytes_read +=
      count() * queries.chosen * blocks_->element_bytes() + rows.size() * row_bytes();
}

}  // namespace

const TypeDecl kSparqType = {
    "sparq", "approximate scores from the components in which queries are large, then exact ones",
    kParams};

std::unique_ptr<Index> make_sparq(const Spec& spec, uint32_t dim, DType dtype,
                                  const Context& context) {
  return std::make_unique<SparqIndex>(spec, dim, dtype, context);
}

size_t estimate_sparq(const Spec& spec, size_t count, uint32_t dim, DType dtype) {
  return ComponentBlocks::estimate(count, dim, dtype, spec[kCodecOfComponents] == kInt8);
}

}  // namespace keyhole::index

#include "index/types/flat.h"

#include "cpu/shared.h"
#include "index/scan/rerank.h"
#include "index/types/codec.h"
#include "index/types/typed_index.h"

namespace keyhole::index {
namespace {

enum Param : size_t { kCodec };

constexpr ParamDecl kParams[] = {
    choice("codec", Stage::build, kNoCodec, kCodecOptions, "what is scanned: " KEYHOLE_CODEC_TEXT),
};

struct FlatScratch final : SearchScratch {
  using SearchScratch::SearchScratch;
  Rerank rerank;
};

struct FlatGrowth final : Addition {
  KeyCodes first;            // where there was none
  std::vector<int8_t> more;  // codes to add to those that are there
};

class FlatIndex final : public TypedIndex<FlatScratch> {
 public:
  using TypedIndex::TypedIndex;

  [[nodiscard]] Sharing sharing() const override { return Sharing::rows; }
  // With codes, each part ranks somewhat more than k rows again.
  [[nodiscard]] bool same_in_parts() const override { return !coded(); }
  [[nodiscard]] bool finds_per_head() const override { return true; }
  [[nodiscard]] size_t bytes() const override { return coded() ? codes_->bytes() : 0; }
  [[nodiscard]] size_t bytes_of_others() const override {
    return coded() ? cpu::bytes_of_others(codes_) : 0;
  }

 protected:
  // Codes have a scale per channel, and keys are never compared with each other.
  [[nodiscard]] std::vector<float> learn_scale(const BuildInput&) const override { return {}; }
  void do_build(const BuildInput& input, const std::vector<float>&,
                const Progress& progress) override {
    codes_ = cpu::Shared(encode_all(input.keys, progress));
  }
  [[nodiscard]] std::unique_ptr<Addition> do_prepare(const RowsView& keys,
                                                     const std::vector<float>&,
                                                     const Progress& progress) const override {
    auto growth = std::make_unique<FlatGrowth>();
    if (count() == 0) {
      growth->first = encode_all(keys, progress);
    } else {
      ProgressMeter(progress, 1.0).advance(1.0);
      if (coded()) growth->more = codes_->encode(keys, count());
    }
    return growth;
  }
  void do_commit(Addition& addition) override {
    auto& growth = static_cast<FlatGrowth&>(addition);
    if (count() == 0) {
      codes_ = cpu::Shared(std::move(growth.first));
    } else if (coded()) {
      codes_.own().append(growth.more);
    }
  }
  void do_truncate(size_t count) override {
    if (coded()) codes_.own().truncate(count);
  }
  [[nodiscard]] std::unique_ptr<BasicIndex> do_share() const override {
    return std::make_unique<FlatIndex>(*this);
  }
  void reserve(FlatScratch& scratch) const override {
    if (coded()) scratch.rerank.reserve(scratch.max_group, scratch.max_k, count());
  }
  void find(const SearchArgs& args, FlatScratch& scratch, SearchCost& cost) const override;
  void describe(IndexInfo&) const override {}
  void save_body(Writer& out) const override {
    if (coded() && count() > 0) codes_->save(out);
  }
  void load_body(Reader& in, const RowsView& keys) override {
    KeyCodes codes(kernels(), dim());
    if (coded() && keys.tokens > 0) codes.load(in, keys);
    in.finish();
    codes_ = cpu::Shared(std::move(codes));
  }

 private:
  [[nodiscard]] bool coded() const { return spec()[kCodec] == kInt8; }
  [[nodiscard]] KeyCodes encode_all(const RowsView& keys, const Progress& progress) const {
    ProgressMeter(progress, 1.0).advance(1.0);
    KeyCodes codes(kernels(), dim());
    if (coded()) codes.build(keys, 2 * keys.tokens);
    return codes;
  }

  cpu::Shared<KeyCodes> codes_{KeyCodes()};  // empty without a codec
};

void FlatIndex::find(const SearchArgs& args, FlatScratch& scratch, SearchCost& cost) const {
  if (!coded()) return scan_all(args, scratch, cost);
  scratch.rerank.begin(*codes_, args, count(), scratch.collector);
  const size_t begin = args.begin_of(count());
  const size_t end = args.end_of(count());
  for (size_t first = begin; first < end; first += kScanBlock) {
    const size_t n = std::min(kScanBlock, end - first);
    codes_->score(scratch.rerank.queries(), codes_->row(first), nullptr, n, scratch.scores.data(),
                  kScanBlock);
    scratch.rerank.offer(scratch.scores.data(), kScanBlock, static_cast<uint32_t>(first), n);
  }
  scratch.rerank.finish(kernels(), keys(), args, cost);
  cost.keys_scored += args.group * (end - begin);
  cost.bytes_read += (end - begin) * codes_->stride();
}

}  // namespace

const TypeDecl kFlatType = {"flat", "scan of all keys, exact without a codec", kParams};

std::unique_ptr<Index> make_flat(const Spec& spec, uint32_t dim, DType dtype,
                                 const Context& context) {
  return std::make_unique<FlatIndex>(spec, dim, dtype, context);
}

size_t estimate_flat(const Spec& spec, size_t count, uint32_t dim, DType) {
  return spec[kCodec] == kInt8 && count > 0 ? KeyCodes::estimate(count, dim) : 0;
}

}  // namespace keyhole::index

#include "index/types/codes.h"

#include <algorithm>
#include <cmath>

#include "cpu/row_access.h"
#include "cpu/shared.h"
#include "index/scan/code_scan.h"
#include "index/scan/shortlist.h"
#include "index/types/typed_index.h"

namespace keyhole::index {
namespace {

enum Param : size_t { kKeyBits, kValueBits };

constexpr std::string_view kKeyOptions[] = {"1", "2", "4"};
constexpr std::string_view kValueOptions[] = {"0", "1", "2", "4"};

constexpr ParamDecl kParams[] = {
    choice("k", Stage::build, 1, kKeyOptions, "bits of an element of a key"),
    choice("v", Stage::build, 2, kValueOptions,
           "bits of an element of a value; 0: the mean of its block stands for it"),
};

CodeShape shape_of(const Spec& spec, uint32_t dim, bool has_values) {
  const CodeBits bits = code_bits(spec);
  return {dim, bits.keys, has_values ? bits.values : 0};
}

/// Of a head's k best, how many a search by code has to look at again: so many times k, and some.
size_t kept(uint32_t key_bits, size_t k, size_t count) {
  const size_t times = key_bits == 1 ? 4 : 2;
  return std::min(times * k + 32, count);
}

struct CodesScratch final : SearchScratch {
  using SearchScratch::SearchScratch;
  CodeScan scan;
  Shortlist shortlist;
  std::vector<float> exact;
};

struct CodesGrowth final : Addition {
  cpu::Shared<KvCodes> first;   // where there was none
  std::vector<std::byte> more;  // blocks to add to those that are there
  bool has_values = false;      // of `first`
};

class CodesIndex final : public TypedIndex<CodesScratch> {
 public:
  using TypedIndex::TypedIndex;

  [[nodiscard]] Sharing sharing() const override { return Sharing::rows; }
  [[nodiscard]] bool finds_per_head() const override { return true; }
  [[nodiscard]] size_t bytes() const override { return codes_ ? codes_->bytes() : 0; }
  [[nodiscard]] size_t bytes_of_others() const override {
    if (!codes_) return 0;
    return codes_.is_first() ? codes_->bytes_of_others() : codes_->bytes();
  }
  [[nodiscard]] const KvCodes* codes() const override {
    return has_values_ ? codes_.get() : nullptr;
  }

 protected:
  // Its balance is that of its codes.
  [[nodiscard]] std::vector<float> learn_scale(const BuildInput&) const override { return {}; }
  void do_build(const BuildInput& input, const std::vector<float>&,
                const Progress& progress) override {
    const bool has_values = input.values.count != 0;
    if (has_values) check_values({input.keys, input.values});
    cpu::Shared<KvCodes> codes;
    if (input.keys.count != 0) {
      codes = cpu::Shared(
          encode_all({input.keys, input.values}, input.queries.rows, input.balance, progress));
    }
    codes_ = std::move(codes);
    has_values_ = has_values;
  }
  [[nodiscard]] std::unique_ptr<Addition> do_prepare(const RowsView& keys,
                                                     const std::vector<float>& scale,
                                                     const Progress& progress) const override {
    return do_prepare_kv({keys, {}}, scale, progress);
  }
  [[nodiscard]] std::unique_ptr<Addition> do_prepare_kv(const KvView& kv, const std::vector<float>&,
                                                        const Progress& progress) const override;
  void do_commit(Addition& addition) override {
    auto& growth = static_cast<CodesGrowth&>(addition);
    if (growth.first) {
      has_values_ = growth.has_values;
      codes_ = std::move(growth.first);
    } else {
      codes_.own().append(growth.more);
    }
  }
  void do_truncate(size_t count) override {
    if (codes_) codes_.own().truncate(count);
  }
  [[nodiscard]] std::unique_ptr<BasicIndex> do_share() const override {
    return std::make_unique<CodesIndex>(*this);
  }
  void reserve(CodesScratch& scratch) const override {
    if (!codes_) return;
    scratch.scan.reserve(codes_->shape(), scratch.max_group, 0);
    const size_t each = kept(codes_->shape().key_bits, scratch.max_k, count());
    scratch.shortlist.begin(scratch.max_group, each, count());
    const size_t most = size_t{scratch.max_group} * scratch.max_group * each;
    if (scratch.exact.size() < most) scratch.exact.resize(most);
  }
  void find(const SearchArgs& args, CodesScratch& scratch, SearchCost& cost) const override;
  void describe(IndexInfo& info) const override;
  void save_body(Writer& out) const override;
  void load_body(Reader& in, const RowsView& keys) override;

 private:
  void check_values(const KvView& kv) const {
    const RowsView& v = kv.values;
    if (v.count >= kv.keys.count && v.dim == dim() && v.dtype == kv.keys.dtype) return;
    throw Error(Status::invalid_argument,
                "values are [" + std::to_string(v.count) + ", " + std::to_string(v.dim) + "] " +
                    dtype_name(v.dtype) + ", needed: [" + std::to_string(kv.keys.count) + ", " +
                    std::to_string(dim()) + "] " + dtype_name(kv.keys.dtype) + " like the keys");
  }
  /// The blocks of rows [first block, all complete ones).
  [[nodiscard]] std::vector<std::byte> encode(const CodeShape& shape, const Balance& balance,
                                              const KvView& kv, size_t first,
                                              const Progress& progress) const;
  [[nodiscard]] KvCodes encode_all(const KvView& kv, const RowsView& queries,
                                   const Balance* balance, const Progress& progress) const {
    const CodeShape shape = shape_of(spec(), dim(), kv.values.count != 0);
    Balance own = balance != nullptr ? *balance : learn_balance(kernels(), kv, queries);
    std::vector<std::byte> blocks = encode(shape, own, kv, 0, progress);
    return {shape, std::move(own), blocks};
  }

  cpu::Shared<KvCodes> codes_;  // none before there is a row
  bool has_values_ = false;
};

std::vector<std::byte> CodesIndex::encode(const CodeShape& shape, const Balance& balance,
                                          const KvView& kv, size_t first,
                                          const Progress& progress) const {
  const size_t n = kv.keys.count / kCodeBlock - first;
  std::vector<std::byte> blocks(n * shape.block_bytes());
  ProgressMeter meter(progress, static_cast<double>(std::max<size_t>(n, 1)));
  for (size_t b = 0; b < n; ++b) {
    encode_block(shape, balance, kernels(), kv, (first + b) * kCodeBlock,
                 blocks.data() + b * shape.block_bytes());
    meter.advance(1.0);
  }
  if (n == 0) meter.advance(1.0);
  return blocks;
}

std::unique_ptr<Addition> CodesIndex::do_prepare_kv(const KvView& kv, const std::vector<float>&,
                                                    const Progress& progress) const {
  auto growth = std::make_unique<CodesGrowth>();
  if (kv.values.count != 0) check_values(kv);
  if (!codes_) {
    growth->first = cpu::Shared(encode_all(kv, {}, nullptr, progress));
    growth->has_values = kv.values.count != 0;
    return growth;
  }
  if (has_values_ && kv.values.count == 0) {
    throw Error(Status::invalid_argument,
                "the index has codes of values: its new rows need values, too");
  }
  growth->more = encode(codes_->shape(), codes_->balance(), has_values_ ? kv : KvView{kv.keys, {}},
                        codes_->blocks(), progress);
  return growth;
}

void CodesIndex::find(const SearchArgs& args, CodesScratch& scratch, SearchCost& cost) const {
  Collector& collector = scratch.collector;
  const CodeShape& shape = codes_->shape();
  const CodeSearch search{.kernels = &kernels(),
                          .codes = &*codes_,
                          .queries = args.queries,
                          .group = args.group,
                          .logits = {},
                          .wanted = 0};
  const size_t begin = args.begin_of(codes_->blocks());
  const size_t end = args.end_of(codes_->blocks());
  const bool logs = collector.logging();
  if (!logs) {
    const size_t each = kept(shape.key_bits, args.k, count());
    scratch.shortlist.begin(args.group, each, count());
    const size_t most = size_t{args.group} * args.group * each;
    if (scratch.exact.size() < most) scratch.exact.resize(most);
  }
  const auto offer = [&](const float* scores, size_t first, size_t n) {
    const auto row = static_cast<uint32_t>(first);
    if (logs) return collector.offer(scores, kScanBlock, row, n);
    scratch.shortlist.offer(scores, kScanBlock, row, n);
  };
  if (begin != end) scratch.scan.begin(search);
  for (size_t b = begin; b < end; ++b) {
    offer(scratch.scan.score(search, b), b * kCodeBlock, kCodeBlock);
  }
  cost.keys_scored += args.group * (end - begin) * kCodeBlock;
  cost.bytes_read += (end - begin) * (shape.key_bytes() + kCodeBlock * 4 + shape.dim * 2);
  // The rows of the last block, which have no codes yet.
  const size_t rest = count() - codes_->count();
  if (args.part + 1 == args.parts && rest != 0) {
    cpu::score_rows(kernels(), keys().slice(codes_->count(), rest), args.queries, args.group,
                    nullptr, rest, scratch.scores.data(), kScanBlock);
    offer(scratch.scores.data(), codes_->count(), rest);
    cost.keys_scored += args.group * rest;
    cost.bytes_read += rest * row_bytes();
  }
  cost.exact = false;
  if (logs) return;
  const auto rows = scratch.shortlist.unite(count(), count());
  score_ids(kernels(), keys(), args, rows.data(), rows.size(), scratch.exact.data(), rows.size());
  collector.offer(scratch.exact.data(), rows.size(), rows.data(), rows.size());
  cost.bytes_read += rows.size() * row_bytes();
}

void CodesIndex::describe(IndexInfo& info) const {
  if (!codes_) return;
  const std::vector<float>& scale = codes_->balance().key_scale;
  const auto [low, high] = std::minmax_element(scale.begin(), scale.end());
  info.diagnostics.emplace_back("coded_rows", static_cast<double>(codes_->count()));
  info.diagnostics.emplace_back("value_codes", has_values_ ? 1.0 : 0.0);
  // How far apart the channels' scales are: 1 where no queries were known.
  info.diagnostics.emplace_back("balance", *high / *low);
}

// Codes are saved, not made again from K and V: they are a seventh of these at 2 bits, and a load of 128k rows takes a
// copy in place of a second for each head.
void CodesIndex::save_body(Writer& out) const {
  out.put(static_cast<uint32_t>(codes_ ? (has_values_ ? 2 : 1) : 0));
  if (!codes_) return;
  out.put_array(codes_->balance().key_scale.data(), dim());
  out.put(codes_->balance().value_scale);
  out.put(static_cast<uint64_t>(codes_->blocks()));
  for (size_t b = 0; b < codes_->blocks(); ++b) {
    out.put_array(codes_->block(b), codes_->shape().block_bytes());
  }
}

void CodesIndex::load_body(Reader& in, const RowsView& keys) {
  const auto kind = in.get<uint32_t>();
  require_sound(kind <= 2 && (kind != 0 || keys.count == 0), "impossible codes");
  if (kind == 0) {
    in.finish();
    codes_ = {};
    has_values_ = false;
    return;
  }
  const CodeShape shape = shape_of(spec(), dim(), kind == 2);
  Balance balance;
  balance.key_scale = in.get_array<float>(dim());
  balance.value_scale = in.get<float>();
  const auto usable = [](float x) { return std::isfinite(x) && x > 0.0F; };
  require_sound(std::all_of(balance.key_scale.begin(), balance.key_scale.end(), usable) &&
                    usable(balance.value_scale),
                "a balance that is not finite and above 0");
  const auto blocks = in.get<uint64_t>();
  require_sound(blocks == keys.count / kCodeBlock, "codes of other rows");
  KvCodes codes(shape, std::move(balance), in.get_array<std::byte>(blocks * shape.block_bytes()));
  in.finish();
  codes_ = cpu::Shared(std::move(codes));
  has_values_ = kind == 2;
}

}  // namespace

const TypeDecl kCodesType = {
    "codes", "1 to 4 bits for every element of every key and value, the heaviest keys exactly",
    kParams};

CodeBits code_bits(const Spec& spec) {
  constexpr uint32_t kBits[] = {0, 1, 2, 4};
  return {kBits[spec[kKeyBits] + 1], kBits[spec[kValueBits]]};
}

std::unique_ptr<Index> make_codes(const Spec& spec, uint32_t dim, DType dtype,
                                  const Context& context) {
  return std::make_unique<CodesIndex>(spec, dim, dtype, context);
}

size_t estimate_codes(const Spec& spec, size_t count, uint32_t dim, DType) {
  if (count == 0) return 0;
  return count / kCodeBlock * shape_of(spec, dim, true).block_bytes() + dim * sizeof(float);
}

}  // namespace keyhole::index

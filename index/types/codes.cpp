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

enum Param : size_t { kKeyBits, kValueBits, kLists, kRead, kMiss, kFrom };

constexpr std::string_view kKeyOptions[] = {"1", "2", "4"};
constexpr std::string_view kValueOptions[] = {"0", "1", "2", "4"};

constexpr ParamDecl kParams[] = {
    choice("k", Stage::build, 1, kKeyOptions, "bits of an element of a key"),
    choice("v", Stage::build, 2, kValueOptions,
           "bits of an element of a value; 0: the mean of its block stands for it"),
    integer("lists", Stage::build, 0, 0, kCodeBlock,
            "rows of a list of near rows, on average: a step reads the lists that weigh, and the "
            "means of the others; 0: none are made, and it reads all rows"),
    integer("read", Stage::search, 12, 1, 100,
            "percent of the rows that a step reads in lists, 8,192 rows at least"),
    integer(
        "miss", Stage::search, 70, 0, 1000,
        "percent of a head's output that lists which a step does not read may hold, by an upper "
        "estimate: it reads more of them until none holds more; 0: it reads no more"),
    integer(
        "from", Stage::search, 0, 0, int64_t{1} << 30U,
        "rows that a head has when it is first indexed; up to there all are attended exactly, on "
        "a device all by their codes, which steps choose among from there on"),
};
constexpr uint32_t kLeastListRows = 16;

CodeShape shape_of(const Spec& spec, uint32_t dim, bool has_values) {
  const CodeBits bits = code_bits(spec);
  return {dim, bits.keys, has_values ? bits.values : 0};
}

/// How many of the best rows by code a search has to look at again for a head's k best: a multiple of k, and some
/// more.
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
  cpu::Shared<CodeLists> first_lists;    // where there were none
  std::vector<CodeLists::Chunk> chunks;  // to add to those that are there
  cpu::Shared<KvCodes> first;            // where there was none
  std::vector<std::byte> more;           // blocks to add to those that are there
  bool has_values = false;               // of `first`
};

class CodesIndex final : public TypedIndex<CodesScratch> {
 public:
  using TypedIndex::TypedIndex;

  [[nodiscard]] Sharing sharing() const override { return Sharing::rows; }
  [[nodiscard]] bool finds_per_head() const override { return true; }
  [[nodiscard]] size_t bytes() const override { return held(codes_) + held(lists_); }
  [[nodiscard]] size_t bytes_of_others() const override {
    return held_by_others(codes_) + held_by_others(lists_);
  }
  [[nodiscard]] const KvCodes* codes() const override {
    return has_values_ ? codes_.get() : nullptr;
  }
  [[nodiscard]] const CodeLists* lists() const override {
    return has_values_ ? lists_.get() : nullptr;
  }
  [[nodiscard]] ListGoal list_goal() const override {
    const CodeListing listing = code_listing(spec());
    return {.share = listing.share, .miss = listing.miss};
  }

 protected:
  // Its balance is that of its codes.
  [[nodiscard]] std::vector<float> learn_scale(const BuildInput&) const override { return {}; }
  void do_build(const BuildInput& input, const std::vector<float>&,
                const Progress& progress) override {
    const bool has_values = input.values.tokens != 0;
    if (has_values) check_values({input.keys, input.values});
    cpu::Shared<KvCodes> codes;
    cpu::Shared<CodeLists> lists;
    const KvView kv{input.keys, input.values};
    if (input.keys.tokens != 0 && has_lists()) {
      lists = cpu::Shared(all_lists(kv, input.queries.rows, input.balance, progress));
    } else if (input.keys.tokens != 0) {
      codes = cpu::Shared(encode_all(kv, input.queries.rows, input.balance, progress));
    }
    codes_ = std::move(codes);
    lists_ = std::move(lists);
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
    if (growth.first || growth.first_lists) {
      has_values_ = growth.has_values;
      codes_ = std::move(growth.first);
      lists_ = std::move(growth.first_lists);
    } else if (lists_) {
      lists_.own().append(std::move(growth.chunks));
    } else {
      codes_.own().append(growth.more);
    }
  }
  void do_truncate(size_t count) override {
    if (codes_) codes_.own().truncate(count);
    if (lists_) lists_.own().truncate(count);
  }
  [[nodiscard]] std::unique_ptr<BasicIndex> do_share() const override {
    return std::make_unique<CodesIndex>(*this);
  }
  void reserve(CodesScratch& scratch) const override {
    if (!codes_ && !lists_) return;
    scratch.scan.reserve(shape(), scratch.max_group, 0);
    const size_t each = kept(shape().key_bits, scratch.max_k, count());
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
    if (v.tokens >= kv.keys.tokens && v.dim == dim() && v.dtype == kv.keys.dtype) return;
    throw Error(Status::invalid_argument,
                "values are [" + std::to_string(v.tokens) + ", " + std::to_string(v.dim) + "] " +
                    dtype_name(v.dtype) + ", needed: [" + std::to_string(kv.keys.tokens) + ", " +
                    std::to_string(dim()) + "] " + dtype_name(kv.keys.dtype) + " like the keys");
  }
  /// The blocks of rows [first block, all complete ones).
  [[nodiscard]] std::vector<std::byte> encode(const CodeShape& shape, const Balance& balance,
                                              const KvView& kv, size_t first,
                                              const Progress& progress) const;
  [[nodiscard]] KvCodes encode_all(const KvView& kv, const RowsView& queries,
                                   const Balance* balance, const Progress& progress) const {
    const CodeShape shape = shape_of(spec(), dim(), kv.values.tokens != 0);
    Balance own = balance != nullptr ? *balance : learn_balance(kernels(), kv, queries);
    std::vector<std::byte> blocks = encode(shape, own, kv, 0, progress);
    return {shape, std::move(own), blocks};
  }

  template <class T>
  [[nodiscard]] static size_t held(const cpu::Shared<T>& shared) {
    return shared ? shared->bytes() : 0;
  }
  template <class T>
  [[nodiscard]] static size_t held_by_others(const cpu::Shared<T>& shared) {
    if (!shared) return 0;
    return shared.is_first() ? shared->bytes_of_others() : shared->bytes();
  }
  [[nodiscard]] bool has_lists() const { return spec()[kLists] != 0; }
  [[nodiscard]] ListConfig list_config() const { return {.rows = code_listing(spec()).rows}; }
  [[nodiscard]] const CodeShape& shape() const {
    return lists_ ? lists_->shape() : codes_->shape();
  }
  [[nodiscard]] size_t coded_rows() const {
    return lists_ ? lists_->count() : codes_ ? codes_->count() : 0;
  }
  /// Chunks of rows up to the last complete block that `lists` lacks.
  [[nodiscard]] std::vector<CodeLists::Chunk> chunks_for(const CodeLists& lists, const KvView& kv,
                                                         const Progress& progress) const;
  [[nodiscard]] CodeLists all_lists(const KvView& kv, const RowsView& queries,
                                    const Balance* balance, const Progress& progress) const {
    CodeLists lists(shape_of(spec(), dim(), kv.values.tokens != 0),
                    balance != nullptr ? *balance : learn_balance(kernels(), kv, queries));
    lists.append(chunks_for(lists, kv, progress));
    return lists;
  }
  void load_lists(Reader& in, CodeLists& lists, size_t rows);

  // One of `codes` and `lists` holds something; neither does before there is a row.
  cpu::Shared<KvCodes> codes_;
  cpu::Shared<CodeLists> lists_;
  bool has_values_ = false;
};

std::vector<std::byte> CodesIndex::encode(const CodeShape& shape, const Balance& balance,
                                          const KvView& kv, size_t first,
                                          const Progress& progress) const {
  const size_t n = kv.keys.tokens / kCodeBlock - first;
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

std::vector<CodeLists::Chunk> CodesIndex::chunks_for(const CodeLists& lists, const KvView& kv,
                                                     const Progress& progress) const {
  const size_t rows = kv.keys.tokens / kCodeBlock * kCodeBlock;
  std::vector<CodeLists::Chunk> chunks;
  if (rows <= lists.count()) {
    ProgressMeter(progress, 1.0).advance(1.0);
    return chunks;
  }
  const std::vector<size_t> cuts = lists.cuts(rows);
  const auto end_of = [&](size_t i) { return i + 1 < cuts.size() ? cuts[i + 1] : rows; };
  double work = 0.0;
  for (size_t i = 0; i < cuts.size(); ++i) work += list_work(end_of(i) - cuts[i], list_config());
  ProgressMeter meter(progress, work);
  std::vector<CodeChunk> made(cuts.size());
  const auto make = [&](uint32_t i, uint32_t) {
    made[i] = make_chunk(context(), lists.shape(), lists.balance(), kv, cuts[i],
                         end_of(i) - cuts[i], list_config(), meter);
  };
  cpu::run_on(context().pool, cuts.size(), make);
  join_memory(made);
  for (CodeChunk& chunk : made) chunks.emplace_back(std::move(chunk));
  return chunks;
}

std::unique_ptr<Addition> CodesIndex::do_prepare_kv(const KvView& kv, const std::vector<float>&,
                                                    const Progress& progress) const {
  auto growth = std::make_unique<CodesGrowth>();
  if (kv.values.tokens != 0) check_values(kv);
  if (!codes_ && !lists_) {
    if (has_lists()) {
      growth->first_lists = cpu::Shared(all_lists(kv, {}, nullptr, progress));
    } else {
      growth->first = cpu::Shared(encode_all(kv, {}, nullptr, progress));
    }
    growth->has_values = kv.values.tokens != 0;
    return growth;
  }
  if (has_values_ && kv.values.tokens == 0) {
    throw Error(Status::invalid_argument,
                "the index has codes of values: its new rows need values, too");
  }
  const KvView coded = has_values_ ? kv : KvView{kv.keys, {}};
  if (lists_) {
    growth->chunks = chunks_for(*lists_, coded, progress);
  } else {
    growth->more = encode(codes_->shape(), codes_->balance(), coded, codes_->blocks(), progress);
  }
  return growth;
}

void CodesIndex::find(const SearchArgs& args, CodesScratch& scratch, SearchCost& cost) const {
  Collector& collector = scratch.collector;
  const CodeShape& shape = this->shape();
  const CodeSearch search{.kernels = &kernels(),
                          .rows = {codes_.get(), lists_.get()},
                          .queries = args.queries,
                          .group = args.group,
                          .logits = {},
                          .wanted = 0};
  const size_t runs = lists_ ? lists_->lists() : codes_->blocks();
  const size_t begin = args.begin_of(runs), end = args.end_of(runs);
  const bool logs = collector.logging();
  if (!logs) {
    const size_t each = kept(shape.key_bits, args.k, count());
    scratch.shortlist.begin(args.group, each, count());
    const size_t most = size_t{args.group} * args.group * each;
    if (scratch.exact.size() < most) scratch.exact.resize(most);
  }
  const auto offer = [&](const float* scores, auto rows, size_t n) {
    cost.keys_scored += args.group * n;
    if (logs) return collector.offer(scores, kScanBlock, rows, n);
    scratch.shortlist.offer(scores, kScanBlock, rows, n);
  };
  if (begin != end) scratch.scan.begin(search);
  for (size_t r = begin; r < end; ++r) {
    const float* scores = scratch.scan.score(search, r);
    if (lists_) {
      offer(scores, lists_->ids(r).data(), lists_->ids(r).size());
    } else {
      offer(scores, static_cast<uint32_t>(r * kCodeBlock), kCodeBlock);
    }
    cost.bytes_read +=
        search.run(r).tiles() * (shape.key_bytes() / kCodeTiles + kCodeTile * 4) + shape.dim * 2;
  }
  // Rows that have no codes yet.
  if (args.part + 1 == args.parts) {
    for (size_t first = coded_rows(); first < count(); first += kScanBlock) {
      const size_t n = std::min(kScanBlock, count() - first);
      cpu::score_rows(kernels(), keys().slice(first, n), args.queries, args.group, nullptr, n,
                      scratch.scores.data(), kScanBlock);
      offer(scratch.scores.data(), static_cast<uint32_t>(first), n);
      cost.bytes_read += n * row_bytes();
    }
  }
  cost.exact = false;
  if (logs) return;
  const auto rows = scratch.shortlist.unite(count(), count());
  score_ids(kernels(), keys(), args, rows.data(), rows.size(), scratch.exact.data(), rows.size());
  collector.offer(scratch.exact.data(), rows.size(), rows.data(), rows.size());
  cost.bytes_read += rows.size() * row_bytes();
}

void CodesIndex::describe(IndexInfo& info) const {
  if (!codes_ && !lists_) return;
  const std::vector<float>& scale = (lists_ ? lists_->balance() : codes_->balance()).key_scale;
  const auto [low, high] = std::minmax_element(scale.begin(), scale.end());
  info.diagnostics.emplace_back("coded_rows", static_cast<double>(coded_rows()));
  if (lists_) info.diagnostics.emplace_back("lists", static_cast<double>(lists_->lists()));
  info.diagnostics.emplace_back("value_codes", has_values_ ? 1.0 : 0.0);
  // How far apart the channels' scales are: 1 where no queries were known.
  info.diagnostics.emplace_back("balance", *high / *low);
}

// Codes are saved, not made again from K and V: they are a seventh of these at 2 bits, and a load of 128k rows takes a
// copy in place of a second for each head.
void CodesIndex::save_body(Writer& out) const {
  const bool none = !codes_ && !lists_;
  out.put(static_cast<uint32_t>(none ? 0 : has_values_ ? 2 : 1));
  if (none) return;
  const Balance& balance = lists_ ? lists_->balance() : codes_->balance();
  out.put_array(balance.key_scale.data(), dim());
  out.put(balance.value_scale);
  if (lists_) {
    out.put(static_cast<uint64_t>(lists_->chunks()));
    for (size_t c = 0; c < lists_->chunks(); ++c) {
      out.put(static_cast<uint64_t>(lists_->chunk(c).rows));
      lists_->chunk(c).save(out);
    }
    return;
  }
  out.put(static_cast<uint64_t>(codes_->blocks()));
  for (size_t b = 0; b < codes_->blocks(); ++b) {
    out.put_array(codes_->block(b), codes_->shape().block_bytes());
  }
}

void CodesIndex::load_lists(Reader& in, CodeLists& lists, size_t rows) {
  const auto chunks = in.get<uint64_t>();
  require_sound(chunks <= rows / kCodeBlock, "chunks of other rows");
  std::vector<CodeChunk> loaded;
  size_t begin = 0;
  for (uint64_t c = 0; c < chunks; ++c) {
    const auto size = in.get<uint64_t>();
    require_sound(
        size != 0 && size % kCodeBlock == 0 && size <= kListSegment && begin + size <= rows,
        "a chunk of other rows");
    loaded.push_back(CodeChunk::load(in, lists.shape(), begin, begin + size));
    begin += size;
  }
  join_memory(loaded);
  std::vector<CodeLists::Chunk> all;
  for (CodeChunk& chunk : loaded) all.emplace_back(std::move(chunk));
  lists.append(std::move(all));
}

void CodesIndex::load_body(Reader& in, const RowsView& keys) {
  const auto kind = in.get<uint32_t>();
  require_sound(kind <= 2 && (kind != 0 || keys.tokens == 0), "impossible codes");
  if (kind == 0) {
    in.finish();
    codes_ = {};
    lists_ = {};
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
  cpu::Shared<KvCodes> codes;
  cpu::Shared<CodeLists> lists;
  if (has_lists()) {
    lists = cpu::Shared(CodeLists(shape, std::move(balance)));
    load_lists(in, lists.own(), keys.tokens);
  } else {
    const auto blocks = in.get<uint64_t>();
    require_sound(blocks == keys.tokens / kCodeBlock, "codes of other rows");
    codes = cpu::Shared(
        KvCodes(shape, std::move(balance), in.get_array<std::byte>(blocks * shape.block_bytes())));
    for (size_t b = 0; b < blocks; ++b) {
      require_sound(is_sound_run(shape, codes->run(b)),
                    "a block whose means or factors are not finite");
    }
  }
  in.finish();
  codes_ = std::move(codes);
  lists_ = std::move(lists);
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

CodeListing code_listing(const Spec& spec) {
  if (spec[kLists] == 0) return {};
  return {std::max(static_cast<uint32_t>(spec[kLists]), kLeastListRows),
          static_cast<float>(spec[kRead]) / 100.0F, static_cast<float>(spec[kMiss]) / 100.0F,
          first_rows(spec)};
}

uint32_t first_rows(const Spec& spec) { return static_cast<uint32_t>(spec[kFrom]); }

std::unique_ptr<Index> make_codes(const Spec& spec, uint32_t dim, DType dtype,
                                  const Context& context) {
  return std::make_unique<CodesIndex>(spec, dim, dtype, context);
}

size_t estimate_codes(const Spec& spec, size_t count, uint32_t dim, DType) {
  if (count == 0) return 0;
  const CodeShape shape = shape_of(spec, dim, true);
  const size_t scales = dim * sizeof(float);
  if (spec[kLists] == 0) return count / kCodeBlock * shape.block_bytes() + scales;
  // A list has half a tile too much, two means and nine numbers; a row its number.
  const size_t rows = std::max<size_t>(static_cast<size_t>(spec[kLists]), kLeastListRows);
  const size_t coded = count / kCodeBlock * kCodeBlock;
  const size_t lists = coded / rows + 1;
  return coded * (CodeLists::tile_bytes(shape) / kCodeTile + sizeof(uint32_t)) +
         lists * (CodeLists::tile_bytes(shape) / 2 + size_t{dim} * 4 + 44) + scales;
}

}  // namespace keyhole::index

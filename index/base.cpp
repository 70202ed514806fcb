#include "index/base.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <istream>

#include "cpu/row_access.h"
#include "index/scan/balance.h"

namespace keyhole::index {
namespace {

// "KHINDEX" and a byte that text-mode copies would damage.
constexpr uint64_t kMagic = 0x8A58'4544'4E49'484BU;
constexpr uint32_t kFormatVersion = 4;
constexpr size_t kLongestText = 4096;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// A type's addition and which index it belongs to.
struct Prepared final : Addition {
  std::unique_ptr<Addition> addition;  ///< null: no row to add
  RowsView keys;
  std::vector<float> scale;
  uint64_t version = 0;  ///< of the index that it was worked out from
  double seconds = 0.0;
};

}  // namespace

BasicIndex::BasicIndex(Spec spec, uint32_t dim, DType dtype, const Context& context)
    : spec_(std::move(spec)), dim_(dim), dtype_(dtype), context_(context) {
  keys_.dim = dim;
  keys_.dtype = dtype;
}

void BasicIndex::check_keys(const RowsView& keys, size_t at_least) const {
  // Keys are of the index's dtype, or int8 that stands for it.
  const bool is_int8 = keys.dtype == DType::i8 && keys.scales.data != nullptr;
  if (keys.dim != dim_ || (keys.dtype != dtype_ && !is_int8)) {
    throw Error(Status::invalid_argument, "keys are [*, " + std::to_string(keys.dim) + "] " +
                                              dtype_name(keys.dtype) +
                                              ", the index was made for [*, " +
                                              std::to_string(dim_) + "] " + dtype_name(dtype_));
  }
  if (keys.tokens < at_least || keys.tokens > kMaxRows) {
    throw Error(Status::invalid_argument, "keys have " + std::to_string(keys.tokens) +
                                              " rows; allowed: " + std::to_string(at_least) + ".." +
                                              std::to_string(kMaxRows));
  }
}

std::vector<float> BasicIndex::learn_scale(const BuildInput& input) const {
  return input.balance != nullptr
             ? input.balance->key_scale
             : learn_balance(kernels(), {.keys = input.keys, .values = {}}, input.queries.rows)
                   .key_scale;
}

void BasicIndex::build(const BuildInput& input, const Progress& progress) {
  check_keys(input.keys, 0);
  const auto start = Clock::now();
  std::vector<float> scale = input.keys.tokens != 0 ? learn_scale(input) : std::vector<float>{};
  do_build(input, scale, progress);
  channel_scale_ = std::move(scale);
  keys_ = input.keys;
  ++version_;
  build_seconds_ = seconds_since(start);
}

std::unique_ptr<Addition> BasicIndex::prepare_append(const RowsView& keys,
                                                     const Progress& progress) const {
  return prepare_append_kv({keys, {}}, progress);
}

std::unique_ptr<Addition> BasicIndex::prepare_append_kv(const KvView& kv,
                                                        const Progress& progress) const {
  check_keys(kv.keys, count());
  const auto start = Clock::now();
  auto prepared = std::make_unique<Prepared>();
  prepared->scale = channel_scale_;
  if (kv.keys.tokens > count()) {
    if (count() == 0 && channel_scale_.empty()) {
      BuildInput first;
      first.keys = kv.keys;
      prepared->scale = learn_scale(first);
    }
    prepared->addition = do_prepare_kv(kv, prepared->scale, progress);
  }
  prepared->keys = kv.keys;
  prepared->version = version_;
  prepared->seconds = seconds_since(start);
  return prepared;
}

std::unique_ptr<Addition> BasicIndex::commit_append(std::unique_ptr<Addition> addition) {
  auto* prepared = dynamic_cast<Prepared*>(addition.get());
  if (prepared == nullptr || prepared->version != version_) {
    throw Error(Status::internal, "an append that was prepared for another state of the index");
  }
  if (prepared->addition == nullptr) return addition;
  const auto start = Clock::now();
  do_commit(*prepared->addition);
  std::swap(channel_scale_, prepared->scale);
  keys_ = prepared->keys;
  ++version_;
  build_seconds_ += prepared->seconds + seconds_since(start);
  return addition;
}

void BasicIndex::truncate(size_t new_count) {
  if (new_count >= count()) return;
  do_truncate(new_count);
  keys_.tokens = new_count;
  ++version_;
}

std::unique_ptr<Index> BasicIndex::share(const RowsView& keys) const {
  check_keys(keys, count());
  std::unique_ptr<BasicIndex> copy = do_share();
  copy->keys_ = keys;
  copy->keys_.tokens = count();
  return copy;
}

SearchScratch& BasicIndex::check_search(const SearchArgs& args, Scratch& scratch) const {
  auto* own = dynamic_cast<SearchScratch*>(&scratch);
  if (own == nullptr || args.group == 0 || args.group > own->max_group || args.k > own->max_k) {
    throw Error(
        Status::invalid_argument,
        "search of " + std::to_string(args.group) + " heads, k=" + std::to_string(args.k) +
            (own == nullptr ? ": the scratch is not of an index"
                            : ": its scratch was made for 1.." + std::to_string(own->max_group) +
                                  " heads, k up to " + std::to_string(own->max_k)));
  }
  if (args.part >= args.parts) {
    throw Error(Status::invalid_argument, "part " + std::to_string(args.part) + " of a search in " +
                                              std::to_string(args.parts) + " parts");
  }
  return *own;
}

void BasicIndex::search(const SearchArgs& args, Scratch& scratch, Hits& hits) const {
  SearchScratch& own = check_search(args, scratch);
  hits.keys_scored = 0;
  hits.bytes_read = 0;
  hits.exact_rows = 0;
  if (count() == 0 || args.k == 0) {
    std::fill(hits.counts, hits.counts + args.group, 0U);
    return;
  }
  own.collector.begin_top(args.group, args.k, count());
  SearchCost cost;
  cost.coverage = hits.coverage;
  do_search(args, own, cost);
  own.collector.top().finish(hits);
  hits.keys_scored = cost.keys_scored;
  hits.bytes_read = cost.bytes_read;
  hits.exact_rows = cost.exact_rows;
}

void BasicIndex::explore(const SearchArgs& args, Scratch& scratch, Scored& scored) const {
  SearchScratch& own = check_search(args, scratch);
  own.collector.begin_log(args.group, count());
  SearchCost cost;
  if (count() != 0) do_search(args, own, cost);
  scored = {.rows = own.collector.rows(),
            .scores = own.collector.scores(),
            .stride = own.collector.stride(),
            .exact = cost.exact,
            .keys_scored = cost.keys_scored,
            .bytes_read = cost.bytes_read};
}

void BasicIndex::reserve_explore(Scratch& scratch) const {
  SearchScratch& own = check_search({.group = 1}, scratch);
  own.collector.begin_log(own.max_group, count());
  do_reserve_log(own);
}

void BasicIndex::scan_all(const SearchArgs& args, SearchScratch& scratch, SearchCost& cost) const {
  const size_t end = args.end_of(count());
  for (size_t first = args.begin_of(count()); first < end; first += kScanBlock) {
    const size_t n = std::min(kScanBlock, end - first);
    cpu::score_rows(kernels(), keys_.slice(first, n), args.queries, args.group, nullptr, n,
                    scratch.scores.data(), kScanBlock);
    scratch.collector.offer(scratch.scores.data(), kScanBlock, static_cast<uint32_t>(first), n);
  }
  const size_t scanned = end - args.begin_of(count());
  cost.keys_scored += args.group * scanned;
  cost.exact_rows += scanned;
  cost.bytes_read += scanned * row_bytes();
}

void score_ids(const cpu::Kernels& kernels, const RowsView& keys, const SearchArgs& args,
               const uint32_t* ids, size_t n, float* out, size_t stride) {
  cpu::score_rows(kernels, keys, args.queries, args.group, ids, n, out, stride);
}

void BasicIndex::score_log(const SearchArgs& args, Collector& collector, SearchCost& cost) const {
  score_ids(kernels(), keys_, args, collector.rows().data(), collector.rows().size(),
            collector.scores(), collector.stride());
  cost.bytes_read += collector.rows().size() * row_bytes();
}

IndexInfo BasicIndex::info() const {
  IndexInfo info;
  info.type = std::string(spec_.type().name);
  info.params = spec_.text();
  info.count = count();
  info.bytes = bytes();
  info.build_seconds = build_seconds_;
  describe(info);
  return info;
}

void BasicIndex::check_same_build(const Spec& other, Status status,
                                  const std::string& saved) const {
  for (size_t i = 0; i < spec_.type().params.size(); ++i) {
    const ParamDecl& param = spec_.type().params[i];
    if (param.stage == Stage::build && other[i] != spec_[i]) {
      throw Error(status, saved + " has " + std::string(param.name) + "=" +
                              value_text(param, other[i]) + ", this index was built with " +
                              value_text(param, spec_[i]));
    }
  }
}

void BasicIndex::set_search_params(std::string_view spec) {
  const TypeDecl* types[] = {&spec_.type()};
  Spec other = Spec::parse(spec, types);
  check_same_build(other, Status::invalid_argument, "index spec '" + std::string(spec) + "'");
  spec_ = std::move(other);
}

void BasicIndex::save(std::ostream& out) const {
  Writer writer(out);
  writer.put(kMagic);
  writer.put(kFormatVersion);
  writer.put_text(spec_.text());
  writer.put(dim_);
  writer.put(static_cast<int32_t>(dtype_));
  writer.put(build_seconds_);
  writer.put(static_cast<uint64_t>(count()));
  writer.put(static_cast<uint32_t>(channel_scale_.size()));
  writer.put_array(channel_scale_.data(), channel_scale_.size());
  save_body(writer);
  writer.finish();
}

void BasicIndex::load(std::istream& in, const RowsView& keys) {
  check_keys(keys, 0);
  Reader reader(in);
  require_sound(reader.get<uint64_t>() == kMagic, "it does not begin with an index's mark");
  const auto version = reader.get<uint32_t>();
  if (version != kFormatVersion) {
    throw Error(Status::version, "saved index of format " + std::to_string(version) +
                                     "; this library reads format " +
                                     std::to_string(kFormatVersion));
  }
  const std::string text = reader.get_text(kLongestText);
  const TypeDecl* types[] = {&spec_.type()};
  try {
    check_same_build(Spec::parse(text, types), Status::corrupt, "it");
  } catch (const Error& e) {
    throw Error(Status::corrupt, std::string("saved index: ") + e.what());
  }
  require_sound(reader.get<uint32_t>() == dim_, "its keys have another head dimension");
  require_sound(reader.get<int32_t>() == static_cast<int32_t>(dtype_),
                "its keys have another dtype");
  const auto seconds = reader.get<double>();
  require_sound(seconds >= 0.0 && seconds < 1e12, "an impossible build time");
  const auto saved_count = reader.get<uint64_t>();
  require_sound(saved_count <= keys.tokens, "it has more rows than there are keys");
  const auto channels = reader.get<uint32_t>();
  require_sound(channels == 0 || channels == dim_, "scales of other channels than keys have");
  auto scale = reader.get_array<float>(channels);
  require_sound(
      std::all_of(scale.begin(), scale.end(), [](float s) { return std::isfinite(s) && s > 0.0F; }),
      "an impossible scale of a channel");
  RowsView view = keys;
  view.tokens = saved_count;
  std::swap(channel_scale_, scale);
  try {
    load_body(reader, view);
  } catch (...) {
    std::swap(channel_scale_, scale);
    throw;
  }
  keys_ = view;
  ++version_;
  build_seconds_ = seconds;
}

}  // namespace keyhole::index

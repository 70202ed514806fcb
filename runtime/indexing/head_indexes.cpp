#include "runtime/indexing/head_indexes.h"

#include <istream>
#include <sstream>
#include <streambuf>
#include <utility>

#include "index/types/factory.h"

namespace keyhole::runtime {
namespace {

[[noreturn]] void corrupt(uint32_t layer, const std::string& text) {
  throw Error(Status::corrupt, "layer " + std::to_string(layer) + " has " + text);
}

/// Bytes as a stream, without a copy of them.
class MemoryBuffer final : public std::streambuf {
 public:
  explicit MemoryBuffer(std::span<const std::byte> bytes) {
    // Nothing is written to a get area.
    auto* begin = const_cast<char*>(reinterpret_cast<const char*>(bytes.data()));
    setg(begin, begin, begin + bytes.size());
  }
};

std::string saved(const index::Index& index) {
  std::ostringstream out;
  out.exceptions(std::ios::badbit);  // else a lack of memory would look like an error of the disk
  index.save(out);
  return std::move(out).str();
}

std::string saved(const index::TailTree& tail) {
  std::ostringstream out;
  out.exceptions(std::ios::badbit);
  index::Writer writer(out);
  tail.save(writer);
  writer.finish();
  return std::move(out).str();
}

}  // namespace

HeadIndexes::HeadIndexes(const Engine& engine, const SessionParams& params)
    : engine_(&engine),
      params_(&params),
      layers_(engine.model().layers),
      numbers_(engine.model().head_numbers()),
      on_device_(layers_) {
  const ModelShape& m = engine.model();
  heads_.reserve(numbers_.count());
  for (uint32_t layer = 0; layer < layers_; ++layer) {
    const LayerShape shape = m.of(layer);
    for (uint32_t h = 0; h < shape.kv_heads; ++h) {
      heads_.push_back({nullptr,
                        {},
                        QuerySample(params.training_queries, shape.group(), shape.head_dim),
                        params.head(heads_.size()),
                        0,
                        std::nullopt});
      heads_.back().first_rows = index::first_rows(heads_.back().params.index);
    }
  }
}

bool HeadIndexes::has_index(uint32_t layer) const {
  for (uint32_t h = 0; h < kv_heads(layer); ++h) {
    if (at(layer, h).index != nullptr || at(layer, h).tail) return true;
  }
  return false;
}

void HeadIndexes::set_on_device(uint32_t layer, bool on_device) {
  on_device_[layer] = on_device ? 1 : 0;
  if (on_device) drop(layer);
}

void HeadIndexes::drop(uint32_t layer) {
  for (uint32_t h = 0; h < kv_heads(layer); ++h) {
    at(layer, h).index.reset();
    at(layer, h).tail = {};
  }
  count_bytes();
}

index::Balance HeadIndexes::learn(const HeadIndex& hd, const KvView& rows) const {
  return index::learn_balance(engine_->kernels(), rows, hd.queries.view().rows);
}

const index::Balance& HeadIndexes::fix_balance(uint32_t layer, uint32_t kv_head,
                                               const KvView& rows) {
  HeadIndex& hd = at(layer, kv_head);
  if (!hd.balance) hd.balance = learn(hd, rows);
  return *hd.balance;
}

void HeadIndexes::tell_unguided(const HeadIndex& hd) {
  if (told_unguided_ || hd.queries.size() != 0) return;
  told_unguided_ = true;
  engine_->log()(KEYHOLE_LOG_INFO,
                 "indexes are built without queries, as the prefill was given none: which channels "
                 "of the keys matter is guessed from the keys alone");
}

BuiltHead HeadIndexes::build(uint32_t layer, uint32_t kv_head, const KvView& kv,
                             std::optional<index::Balance> balance, bool with_tail,
                             const index::Progress& progress) const {
  const ModelShape& m = engine_->model();
  const HeadIndex& hd = at(layer, kv_head);
  BuiltHead built;
  built.balance = balance ? std::move(*balance) : learn(hd, kv);
  built.index = index::make_index(hd.params.index, m.of(layer).head_dim, m.kv_dtype,
                                  engine_->index_context(layer, kv_head));
  index::BuildInput input;
  input.keys = kv.keys;
  input.values = kv.values;
  input.queries = hd.queries.view();
  input.first_position = params_->sink;
  input.rope = &engine_->rope(layer);
  input.balance = &built.balance;
  built.index->build(input, progress);
  if (with_tail) {
    index::TailTree tail = make_tail(layer, kv_head, built.balance);
    tail.build(kv, progress);
    built.tail = cpu::Shared(std::move(tail));
  }
  return built;
}

index::TailTree HeadIndexes::make_tail(uint32_t layer, uint32_t kv_head,
                                       const index::Balance& balance) const {
  const ModelShape& m = engine_->model();
  return {engine_->index_context(layer, kv_head), m.of(layer).head_dim, m.kv_dtype,
          index::TailParams{.keys_per_partition = params_->tail_partition}, balance.key_scale};
}

uint64_t HeadIndexes::estimate_index(uint32_t layer, uint32_t kv_head, uint32_t rows) const {
  const ModelShape& m = engine_->model();
  return index::estimate_bytes(at(layer, kv_head).params.index, rows, m.of(layer).head_dim,
                               m.kv_dtype);
}

uint64_t HeadIndexes::estimate_tail(uint32_t layer, uint32_t rows) const {
  const ModelShape& m = engine_->model();
  return index::TailTree::estimate(rows, m.of(layer).head_dim, m.kv_dtype,
                                   {.keys_per_partition = params_->tail_partition});
}

void HeadIndexes::count_bytes() {
  bytes_ = 0;
  for (const HeadIndex& h : heads_) bytes_ += h.bytes();
}

void HeadIndexes::save_sample(const HeadIndex& hd, ChecksumWriter& out) const {
  out.value(hd.queries.stride());
  out.value(static_cast<uint64_t>(hd.queries.size()));
  out.bytes(reinterpret_cast<const std::byte*>(hd.queries.positions().data()),
            hd.queries.positions().size() * sizeof(uint32_t));
  out.bytes(reinterpret_cast<const std::byte*>(hd.queries.rows().data()),
            hd.queries.rows().size() * sizeof(float));
  out.value(uint32_t{hd.balance ? 1U : 0U});
  if (hd.balance) {
    out.bytes(reinterpret_cast<const std::byte*>(hd.balance->key_scale.data()),
              hd.balance->key_scale.size() * sizeof(float));
    out.value(hd.balance->value_scale);
  }
}

void HeadIndexes::save(uint32_t layer, ChecksumWriter& out) const {
  std::vector<std::string> indexes(kv_heads(layer)), tails(kv_heads(layer));
  engine_->pool().run(kv_heads(layer), [&](uint32_t h, uint32_t) {
    const HeadIndex& hd = at(layer, h);
    if (hd.index != nullptr) indexes[h] = saved(*hd.index);
    if (hd.tail) tails[h] = saved(*hd.tail);
  });
  std::vector<std::span<const std::byte>> forms;
  for (uint32_t h = 0; h < kv_heads(layer); ++h) {
    const HeadIndex& hd = at(layer, h);
    save_sample(hd, out);
    out.value(static_cast<uint64_t>(indexes[h].size()));
    out.value(static_cast<uint64_t>(hd.tail ? hd.tail->count() : 0));
    out.value(static_cast<uint64_t>(tails[h].size()));
    forms.push_back(std::as_bytes(std::span(indexes[h])));
    forms.push_back(std::as_bytes(std::span(tails[h])));
  }
  out.arrays(forms);
}

void HeadIndexes::load_sample(uint32_t layer, uint32_t kv_head, const KvView& kv, uint32_t tokens,
                              ChecksumReader& in) {
  const auto stride = in.value<uint32_t>("query sample");
  const auto count = in.value<uint64_t>("query sample");
  if (count > params_->training_queries || !QuerySample::is_stride(stride)) {
    corrupt(layer, "a query sample of " + std::to_string(count) + " with stride " +
                       std::to_string(stride));
  }
  auto positions = in.array<uint32_t>(count, "query sample");
  auto queries = in.array<float>(count * engine_->model().of(layer).head_dim, "query sample");
  for (size_t i = 0; i < positions.size(); ++i) {
    const bool rises = i == 0 || positions[i - 1] < positions[i];
    if (rises && positions[i] < tokens && positions[i] % stride == 0) continue;
    corrupt(layer, "a sampled query of token " + std::to_string(positions[i]) + " as number " +
                       std::to_string(i));
  }
  if (!engine_->kernels().all_finite[static_cast<size_t>(DType::f32)](
          reinterpret_cast<const std::byte*>(queries.data()), queries.size())) {
    corrupt(layer, "a sampled query that is not finite");
  }
  at(layer, kv_head).queries.restore(stride, std::move(positions), std::move(queries));
  if (const auto balanced = in.value<uint32_t>("balance"); balanced != 0) {
    index::Balance balance;
    balance.key_scale = in.array<float>(engine_->model().of(layer).head_dim, "balance");
    balance.value_scale = in.value<float>("balance");
    if (balanced != 1 || kv.keys.tokens == 0 || !balance.is_sound()) {
      corrupt(layer, "an impossible balance of channels");
    }
    at(layer, kv_head).balance = std::move(balance);
  }
}

void HeadIndexes::load(uint32_t layer, std::span<const KvView> kv, uint32_t tokens,
                       ChecksumReader& in) {
  std::vector<uint64_t> tail_rows(kv_heads(layer));
  std::vector<uint64_t> sizes;  // of each head's index and partitions
  uint64_t sum = 0;
  for (uint32_t h = 0; h < kv_heads(layer); ++h) {
    load_sample(layer, h, kv[h], tokens, in);
    const auto size = [&](const char* what) {
      sizes.push_back(in.value<uint64_t>(what));
      in.need(sizes.back(), what);  // so that the sum stays below 2^64
      in.need(sum += sizes.back(), what);
    };
    size("index");
    tail_rows[h] = in.value<uint64_t>("tail");
    size("tail");
    if (sizes.back() != 0 && tail_rows[h] > kv[h].keys.tokens) {
      corrupt(layer, "a tail of " + std::to_string(tail_rows[h]) + " keys over " +
                         std::to_string(kv[h].keys.tokens) + " rows");
    }
  }
  // Not a vector, which would write zeros first, on one thread.
  const std::unique_ptr<std::byte[]> bytes(new std::byte[sum]);
  std::vector<std::span<std::byte>> forms;
  std::byte* at = bytes.get();
  for (const uint64_t size : sizes) {
    forms.emplace_back(at, size);
    at += size;
  }
  in.arrays(forms, "indexes");
  engine_->pool().run(kv_heads(layer), [&](uint32_t h, uint32_t) {
    const auto index = forms[size_t{h} * 2], tail = forms[size_t{h} * 2 + 1];
    if (!index.empty()) load_index(layer, h, kv[h], index);
    if (!tail.empty()) load_tail(layer, h, tail_rows[h], tail);
  });
}

void HeadIndexes::load_index(uint32_t layer, uint32_t kv_head, const KvView& kv,
                             std::span<const std::byte> bytes) {
  const ModelShape& m = engine_->model();
  HeadIndex& hd = at(layer, kv_head);
  auto index = index::make_index(hd.params.index, m.of(layer).head_dim, m.kv_dtype,
                                 engine_->index_context(layer, kv_head));
  MemoryBuffer buffer(bytes);
  std::istream in(&buffer);
  index->load(in, kv.keys);
  if (index->count() > kv.keys.tokens) {
    corrupt(layer, "an index of " + std::to_string(index->count()) + " keys over " +
                       std::to_string(kv.keys.tokens) + " rows");
  }
  hd.index = std::move(index);
}

void HeadIndexes::load_tail(uint32_t layer, uint32_t kv_head, size_t rows,
                            std::span<const std::byte> bytes) {
  auto tail = make_tail(layer, kv_head, at(layer, kv_head).balance.value_or(index::Balance{}));
  MemoryBuffer buffer(bytes);
  std::istream in(&buffer);
  index::Reader reader(in);
  tail.load(reader, rows);
  reader.finish();
  at(layer, kv_head).tail = cpu::Shared(std::move(tail));
}

void HeadIndexes::copy(uint32_t layer, uint32_t kv_head, const KvView& kv, const HeadIndex& from) {
  HeadIndex& hd = at(layer, kv_head);
  // Not assigned: an assignment that the compiler makes takes the copy for one that cannot fail.
  QuerySample queries(from.queries);
  hd.queries = std::move(queries);
  hd.balance = from.balance;
  if (from.index != nullptr) hd.index = from.index->share(kv.keys);
  hd.tail = from.tail;
}

}  // namespace keyhole::runtime

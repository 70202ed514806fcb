// Caches that keep all keys and values in few bits (tools/caches/): each step attends all rows, as the cache gives them
// back.
//
// Sink and window are attended exactly, as those of all ways of compare are, so that the offloaded rows alone go
// through the format, in whole granules of it from the first offloaded row on; what is left behind the last granule
// stays as it is stored, and counts 16 bits. oscar2 is calibrated on the training queries of the same head, where eval
// takes those of another text.
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tools/caches/oscar.h"
#include "tools/caches/oscar_fit.h"
#include "tools/rivals/rival.h"
#include "tools/rivals/rivals.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

/// The format of a row of the table below.
KvFormat format_of(const RivalSpec& spec) {
  const std::string name = spec.type().name;
  if (name == "q8_0") return KvFormat::q8_0;
  if (name == "q4_0") return KvFormat::q4_0;
  if (name == "kivi2") return KvFormat::kivi2;
  if (name == "kivi4") return KvFormat::kivi4;
  if (name == "kvarn2") return KvFormat::kvarn2;
  if (name == "kvarn_k4v2") return KvFormat::kvarn_k4v2;
  return KvFormat::oscar2;
}

/// OSCAR's calibration, by queries whose positions count from the first row.
std::shared_ptr<const AgingFormat> fit_to(const RivalData& data, const float* values) {
  std::vector<uint32_t> positions;
  std::vector<float> queries;
  const size_t width = data.shape.group * data.shape.dim;
  const size_t steps = data.shape.training_rows / data.shape.group;
  for (size_t i = 0; i < steps; ++i) {
    // Sets of vectors have no positions: their queries see all rows.
    const size_t at = data.training_positions.empty() ? data.first_token + data.shape.rows
                                                      : data.training_positions[i];
    if (at < data.first_token) continue;
    positions.push_back(static_cast<uint32_t>(at - data.first_token));
    const float* q = data.training + i * width;
    queries.insert(queries.end(), q, q + width);
  }
  if (positions.empty()) {
    throw std::runtime_error("oscar2: no training query comes behind the first offloaded row");
  }
  return make_oscar({fit_oscar({.keys = data.keys,
                                .values = values,
                                .rows = data.shape.rows,
                                .dim = data.shape.dim,
                                .queries = queries.data(),
                                .group = data.shape.group,
                                .positions = positions,
                                .scale = data.rule.scale,
                                .softcap = data.rule.softcap})},
                    1, static_cast<uint32_t>(data.shape.dim));
}

class CacheInFewBits : public Rival {
 public:
  explicit CacheInFewBits(const RivalSpec& spec) : format_(format_of(spec)) {}

  void build(const RivalData& data) override {
    const size_t n = data.shape.rows, dim = data.shape.dim;
    std::vector<float> keys(data.keys, data.keys + n * dim), values(n * dim);
    for (size_t row = 0; row < n; ++row) data.stored->values.read(row, values.data() + row * dim);
    double bits = 0.0;
    if (ages(format_)) {
      auto format = make_aging_format(format_, static_cast<uint32_t>(dim));
      if (!format) format = fit_to(data, values.data());
      bits = age(*format, KvRows::keys, keys, dim) + age(*format, KvRows::values, values, dim);
    } else {
      pass_rows(format_, keys.data(), keys.size(), static_cast<uint32_t>(dim), false);
      pass_rows(format_, values.data(), values.size(), static_cast<uint32_t>(dim), true);
      bits = 2 * static_cast<double>(n * dim) * kv_format_bits(format_);
    }
    rows_ = {StoredMatrix(ElementType::f32, keys.data(), n, dim),
             StoredMatrix(ElementType::f32, values.data(), n, dim)};
    row_bytes_ = n == 0 ? 0.0 : bits / 8 / static_cast<double>(n);
  }
  void set_spec(const RivalSpec& /*spec*/) override {}

  void search(const float* /*queries*/, size_t /*group*/, size_t /*k*/,
              RivalAnswer& answer) override {
    std::vector<uint32_t>& all = answer.heads.front().rows;
    for (uint32_t row = 0; row < rows_.keys.rows(); ++row) all.push_back(row);
  }

  [[nodiscard]] uint64_t bytes() const override { return 0; }
  [[nodiscard]] OwnRows own_rows() const override { return {&rows_, row_bytes_}; }

 private:
  /// Passes the rows of whole granules. Returns the bits of all.
  static double age(const AgingFormat& format, KvRows kind, std::vector<float>& rows, size_t dim) {
    const AgingLayout::Ages& ages = format.layout().of(kind);
    const size_t n = rows.size() / dim, old = n / ages.granule * ages.granule;
    format.pass(0, 0, kind, rows.data(), old);
    return static_cast<double>(dim) *
           (static_cast<double>(old) * ages.bits + static_cast<double>(n - old) * 16.0);
  }

  const KvFormat format_;
  StoredRows rows_;
  double row_bytes_ = 0.0;
};

void check_cache(const RivalSpec& spec, const RivalShape& shape) {
  const KvFormat format = format_of(spec);
  const auto dim = static_cast<uint32_t>(shape.dim);
  if (!ages(format) && shape.dim % kKvFormatBlock != 0) {
    throw UsageError("head_dim is " + std::to_string(shape.dim) +
                     "; allowed: multiples of 32, the numbers that share a scale");
  }
  if (!ages(format)) return;
  try {
    (void)aging_layout(format, dim);
  } catch (const std::invalid_argument& e) {
    throw UsageError(e.what());
  }
  if (format == KvFormat::oscar2 && shape.training_rows == 0) {
    throw UsageError(
        "the trace has no training queries to calibrate on; needed: record --training");
  }
}

std::unique_ptr<Rival> make_cache_in_few_bits(const RivalSpec& spec) {
  return std::make_unique<CacheInFewBits>(spec);
}

constexpr RivalType cache_type(const char* name, const char* meaning) {
  return {.name = name,
          .meaning = meaning,
          .params = {},
          .check = check_cache,
          .make = make_cache_in_few_bits};
}

}  // namespace

const RivalType kCacheQ8 =
    cache_type("q8_0", "all keys and values in 8.5 bits a number, as llama.cpp's caches have them");
const RivalType kCacheQ4 = cache_type("q4_0", "the same in 4.5 bits");
const RivalType kCacheKivi2 = cache_type(
    "kivi2", "all keys and values in 3 bits a number: KIVI with 2 bits (arXiv 2402.02750)");
const RivalType kCacheKivi4 = cache_type("kivi4", "KIVI with 4 bits: 5 bits a number");
const RivalType kCacheKvarn2 = cache_type(
    "kvarn2",
    "all keys and values in some 2.4 bits a number: KVarN with 2 bits (arXiv 2606.03458)");
const RivalType kCacheKvarnK4V2 =
    cache_type("kvarn_k4v2", "KVarN with keys in 4 bits: some 3.4 bits a number");
const RivalType kCacheOscar2 = cache_type(
    "oscar2",
    "all keys and values in some 2.3 bits a number: OSCAR (arXiv 2605.17757), calibrated on the "
    "head's training queries");

}  // namespace keyhole::tools

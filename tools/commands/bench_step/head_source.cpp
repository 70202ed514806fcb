#include "tools/commands/bench_step/head_source.h"

#include <algorithm>
#include <cmath>

#include "runtime/files/element.h"
#include "tools/commands/bench_step/head_turn.h"
#include "tools/tasks/random.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

// Adds noise that is uniform with this deviation: sixteen bits are fine enough for what fp16 keeps of it.
void add_noise(float* row, size_t dim, float deviation, uint64_t seed) {
  Random random(seed);
  const float step = deviation * std::sqrt(12.0F) / 65536.0F;
  for (size_t i = 0; i < dim; i += 4) {
    uint64_t bits = random.next();
    for (size_t x = i; x < std::min(dim, i + 4); ++x, bits >>= 16U) {
      row[x] += step * (static_cast<float>(bits & 0xffffU) - 32767.5F);
    }
  }
}

// ---- Heads of a trace ------------------------------------------------------------------------------

class TraceSource final : public HeadSource {
 public:
  TraceSource(const Trace& trace, uint64_t context, uint32_t sink, uint64_t seed)
      : trace_(trace),
        dim_(trace.info().head_dim),
        context_(context),
        seed_(seed),
        recorded_(trace.query_positions().front()) {
    if (!trace.heads().front().values) {
      throw UsageError("the trace has no values; needed: one that `keyhole record` wrote");
    }
    head_part_ = std::min({uint64_t{sink}, context, recorded_});
    if (context > recorded_) {
      if (recorded_ <= head_part_) {
        throw UsageError("the trace holds " + format_count(recorded_) +
                         " tokens before its first decoding query; needed: more than --sink, " +
                         std::to_string(sink));
      }
      copied_ = context - recorded_;
    }
  }

  [[nodiscard]] uint32_t heads() const override {
    return static_cast<uint32_t>(trace_.heads().size());
  }
  [[nodiscard]] uint32_t dim() const override { return dim_; }

  void rows(uint32_t head, Part part, uint64_t first, size_t count, float* out) const override {
    const TraceHead& h = trace_.heads()[head];
    const StoredTensor& tensor = part == Part::keys ? h.keys : *h.values;
    for (size_t at = 0; at < count;) {
      const Run run = run_of(first + at);
      const size_t n = std::min<uint64_t>(count - at, run.tokens);
      float* rows = out + at * dim_;
      read(tensor, run.row, n, rows);
      for (size_t i = 0; run.copied && i < n; ++i) {
        perturb(rows + i * dim_,
                mixed_seed(seed_, 2 * head + (part == Part::keys ? 0 : 1), first + at + i));
      }
      at += n;
    }
  }

  void step_query(uint32_t head, uint32_t step, uint32_t j, float* out) const override {
    const StoredTensor& queries = trace_.heads()[head].queries;
    // A group larger than the trace's takes the queries of other steps.
    const uint64_t recorded = queries.shape[0];
    const uint64_t group = queries.shape[1];
    read(queries, (step + 7 * (j / group)) % recorded * group + j % group, 1, out);
  }

  [[nodiscard]] uint32_t training_positions() const override {
    return static_cast<uint32_t>(trace_.training_positions().size());
  }
  void training_query(uint32_t head, uint32_t position, uint32_t j, float* out) const override {
    const StoredTensor& queries = *trace_.heads()[head].training_queries;
    const uint64_t group = queries.shape[1];
    read(queries, position * group + j % group, 1, out);
  }

  [[nodiscard]] float scale() const override { return trace_.info().scale; }
  [[nodiscard]] float softcap() const override { return trace_.info().softcap; }
  [[nodiscard]] uint64_t copied_tokens() const override { return copied_; }

  [[nodiscard]] std::string description() const override {
    const TraceInfo& info = trace_.info();
    std::string text = info.model + ", " + info.task + " of " + format_count(info.tokens) +
                       " tokens: " + std::to_string(heads()) + " heads";
    if (copied_ != 0) {
      text += "; " + format_count(copied_) + " of the " + format_count(context_) +
              " tokens are noisy copies, for the trace has " + format_count(recorded_) +
              " before its first decoding query";
    }
    return text;
  }

 private:
  // Tokens from a row of the trace on, in its order.
  struct Run {
    uint64_t row = 0, tokens = 0;
    bool copied = false;
  };

  [[nodiscard]] Run run_of(uint64_t token) const {
    if (token >= context_) {
      const auto positions = trace_.query_positions();
      return {positions[(token - context_) % positions.size()], 1, false};
    }
    if (token < head_part_) return {token, head_part_ - token, false};
    if (token < head_part_ + copied_) {
      const uint64_t period = recorded_ - head_part_;
      const uint64_t at = (token - head_part_) % period;
      return {head_part_ + at, std::min(period - at, head_part_ + copied_ - token), true};
    }
    // The newest tokens are those right before the first decoding query.
    return {recorded_ - (context_ - token), context_ - token, false};
  }

  void read(const StoredTensor& tensor, uint64_t row, size_t count, float* out) const {
    const size_t bytes = dim_ * element_size(tensor.type);
    elements_to_f32(tensor.type, tensor.bytes.subspan(row * bytes, count * bytes),
                    {out, count * dim_});
  }

  void perturb(float* row, uint64_t seed) const {
    float squares = 0;
    for (size_t i = 0; i < dim_; ++i) squares += row[i] * row[i];
    add_noise(row, dim_, 0.1F * std::sqrt(squares / static_cast<float>(dim_)), seed);
  }

  const Trace trace_;
  const uint32_t dim_;
  const uint64_t context_, seed_;
  const uint64_t recorded_;  ///< tokens before the first decoding query
  uint64_t head_part_ = 0;   ///< tokens that stay at the beginning
  uint64_t copied_ = 0;
};

// ---- Synthetic heads -------------------------------------------------------------------------------

class SyntheticSource final : public HeadSource {
 public:
  SyntheticSource(uint32_t dim, uint64_t seed) : dim_(dim), seed_(seed) {
    spectrum_.resize(dim);
    double squares = 0;
    for (uint32_t i = 0; i < dim; ++i) squares += 1 / std::sqrt(1.0 + i);
    for (uint32_t i = 0; i < dim; ++i) {  // of rows whose squared length is dim
      spectrum_[i] = static_cast<float>(std::sqrt(dim / squares / std::sqrt(1.0 + i)));
    }
    for (uint32_t h = 0; h < kHeads; ++h) {
      Head head;
      head.centres = shaped(kClusters, mixed_seed(seed, h, 1));
      head.value_centres = normal_numbers(size_t{kClusters} * dim, mixed_seed(seed, h, 2));
      head.key_mean = shaped(1, mixed_seed(seed, h, 3));
      head.drawn = unit_length(normal_numbers(dim, mixed_seed(seed, h, 4)));
      head.sharpness = 0.3F + 0.04F * static_cast<float>(h);
      heads_.push_back(std::move(head));
    }
  }

  [[nodiscard]] uint32_t heads() const override { return kHeads; }
  [[nodiscard]] uint32_t dim() const override { return dim_; }

  void rows(uint32_t head, Part part, uint64_t first, size_t count, float* out) const override {
    const Head& h = heads_[head];
    for (size_t i = 0; i < count; ++i, out += dim_) {
      const uint64_t token = first + i;
      const uint64_t seed = mixed_seed(seed_, 100 + 2 * head + (part == Part::keys ? 0 : 1), token);
      const size_t cluster = cluster_of(head, token) * dim_;
      std::fill_n(out, dim_, 0.0F);
      add_noise(out, dim_, 1.0F, seed);
      if (part == Part::values) {
        const float size = token < kSinks ? 0.05F : 1.0F;
        for (uint32_t x = 0; x < dim_; ++x) {
          out[x] = size * (0.7F * out[x] + 0.7F * h.value_centres[cluster + x]);
        }
        continue;
      }
      for (uint32_t x = 0; x < dim_; ++x) {
        out[x] = 0.6F * spectrum_[x] * out[x] + 0.8F * h.centres[cluster + x] + h.key_mean[x];
      }
      if (token < kSinks) {
        const float length = std::sqrt(static_cast<float>(dim_));
        for (uint32_t x = 0; x < dim_; ++x) out[x] = 1.2F * length * h.drawn[x];
      }
    }
  }

  void step_query(uint32_t head, uint32_t step, uint32_t j, float* out) const override {
    // The heads of a group look at the same places, more or less.
    query(head, mixed_seed(seed_, 200 + head, step), mixed_seed(seed_, 300 + head, step * 64 + j),
          out);
  }
  [[nodiscard]] uint32_t training_positions() const override { return 2048; }
  void training_query(uint32_t head, uint32_t position, uint32_t j, float* out) const override {
    query(head, mixed_seed(seed_, 400 + head, position),
          mixed_seed(seed_, 500 + head, position * 64 + j), out);
  }

  [[nodiscard]] float scale() const override { return 0; }
  [[nodiscard]] float softcap() const override { return 0; }
  [[nodiscard]] std::string description() const override {
    return "synthetic heads (figures of quality on them mean little)";
  }

 private:
  static constexpr uint32_t kHeads = 12;
  static constexpr uint32_t kClusters = 256;
  static constexpr uint64_t kSinks = 4;
  static constexpr uint64_t kRun = 32;

  struct Head {
    std::vector<float> centres, value_centres;  ///< `[kClusters, dim]`
    std::vector<float> key_mean;
    std::vector<float> drawn;  ///< where sinks lie and every query looks, of length 1
    float sharpness = 0;
  };

  [[nodiscard]] std::vector<float> shaped(size_t count, uint64_t seed) const {
    std::vector<float> out = normal_numbers(count * dim_, seed);
    for (size_t i = 0; i < out.size(); ++i) out[i] *= spectrum_[i % dim_];
    return out;
  }

  static std::vector<float> unit_length(std::vector<float> row) {
    float squares = 0;
    for (const float x : row) squares += x * x;
    for (float& x : row) x /= std::sqrt(squares);
    return row;
  }

  // The square of a uniform number: cluster 0 has 1/16 of all runs, the last one 1/512.
  [[nodiscard]] size_t cluster_of(uint32_t head, uint64_t token) const {
    const double u =
        static_cast<double>(mixed_seed(seed_, 600 + head, token / kRun) >> 11U) * 0x1p-53;
    return static_cast<size_t>(u * u * kClusters);
  }

  void query(uint32_t head, uint64_t place, uint64_t seed, float* out) const {
    const Head& h = heads_[head];
    Random random(place);
    std::fill_n(out, dim_, 0.0F);
    add_noise(out, dim_, 1.0F, seed);
    const float length = std::sqrt(static_cast<float>(dim_));
    for (uint32_t x = 0; x < dim_; ++x) out[x] += 0.6F * length * h.drawn[x];
    for (int i = 0; i < 3; ++i) {
      const float* centre = h.centres.data() + random.below(kClusters) * dim_;
      for (uint32_t x = 0; x < dim_; ++x) out[x] += h.sharpness * centre[x];
    }
  }

  const uint32_t dim_;
  const uint64_t seed_;
  std::vector<float> spectrum_;
  std::vector<Head> heads_;
};

}  // namespace

std::unique_ptr<HeadSource> make_trace_source(const Trace& trace, uint64_t context, uint32_t sink,
                                              uint64_t seed) {
  return std::make_unique<TraceSource>(trace, context, sink, seed);
}

std::unique_ptr<HeadSource> make_synthetic_source(uint32_t dim, uint64_t seed) {
  return std::make_unique<SyntheticSource>(dim, seed);
}

}  // namespace keyhole::tools

// A prompt through the model, layer by layer, each in chunks of tokens. The GPU is told of the next chunks before the
// host takes this one's keys and values, so that neither waits for the other longer than it must.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>

#include "tools/llama/cuda/prompt_attention.h"
#include "tools/llama/cuda/token_rows.h"

namespace keyhole::tools {
namespace {

/// The receiver of q, k and v: one of the two, or nobody.
struct Sink {
  const LayerSink* host = nullptr;
  const DeviceSink* device = nullptr;

  [[nodiscard]] bool any() const { return host != nullptr || device != nullptr; }
  [[nodiscard]] ElementType type() const {
    return device == nullptr ? ElementType::f32 : device->type;
  }
  [[nodiscard]] size_t bytes() const { return any() ? element_size(type()) : 0; }
  [[nodiscard]] KvShare share() const { return device == nullptr ? KvShare{} : device->share; }
};

/// q, k and v of a chunk on their way to the sink.
struct Export {
  cuda::Buffer<std::byte> device;
  cuda::Pinned<std::byte> host;
  cuda::Event ready, copied;
  Export(size_t bytes, size_t host_bytes) : device(bytes), host(host_bytes) {}
};

/// Dense attention beside what is computed, and the errors that it shows.
struct PrefillCheck {
  PrefillCheck(const LlamaConfig& config, const GpuPrefillSizes& sizes)
      : dense(config, "dense"),
        out(sizes.q),
        bins(size_t{config.layers} * cuda::kErrorBins),
        layers(config.layers) {
    cuda::check(cudaMemset(bins.get(), 0, bins.size() * sizeof(uint32_t)), "errors of attention");
  }

  [[nodiscard]] std::vector<GpuModel::PrefillErrors> errors() const {
    std::vector<uint32_t> counts(bins.size());
    cuda::check(cudaMemcpy(counts.data(), bins.get(), counts.size() * sizeof(uint32_t),
                           cudaMemcpyDeviceToHost),
                "errors of attention");
    std::vector<GpuModel::PrefillErrors> all;
    for (uint32_t layer = 0; layer < layers; ++layer) {
      const std::span own(&counts[size_t{layer} * cuda::kErrorBins], cuda::kErrorBins);
      const auto quantile = [&](double share) {
        const double wanted =
            share * static_cast<double>(std::accumulate(own.begin(), own.end(), uint64_t{0}));
        double below = 0.0;
        uint32_t bin = 0;
        while (bin + 1 < cuda::kErrorBins && (below += own[bin]) < wanted) ++bin;
        return cuda::error_of_bin(bin);
      };
      all.push_back({layer, quantile(0.5), quantile(0.95)});
    }
    return all;
  }

  cuda::PromptAttention dense;
  cuda::Buffer<float> out;
  cuda::Buffer<uint32_t> bins;  // [layers, kErrorBins]
  uint32_t layers;
};

/// The GPU's seconds of each stage of a prompt, by events between them on its stream.
class StageClock {
 public:
  /// times: null where nobody wants them.
  StageClock(PrefillTimes* times, cudaStream_t stream) : times_(times), stream_(stream) {}

  /// Begins the stages; what the stream waits for until then counts for none.
  void begin() { mark(nullptr); }
  /// Counts what was enqueued since the former call for the stage.
  void end(double PrefillTimes::*stage) { mark(stage); }
  [[nodiscard]] PrefillTimes* times() const { return times_; }

  /// Adds the times up, when the stream has done everything.
  void add_up() const {
    constexpr double kPerSecond = 1e3;
    for (size_t i = 1; i < marks_.size(); ++i) {
      if (marks_[i].stage == nullptr) continue;
      float milliseconds = 0.0F;
      cuda::check(
          cudaEventElapsedTime(&milliseconds, marks_[i - 1].event->get(), marks_[i].event->get()),
          "an event");
      times_->*marks_[i].stage += double{milliseconds} / kPerSecond;
    }
  }

 private:
  struct Mark {
    std::unique_ptr<cuda::Event> event;
    double PrefillTimes::*stage;
  };
  void mark(double PrefillTimes::*stage) {
    if (times_ == nullptr) return;
    marks_.push_back({std::make_unique<cuda::Event>(cudaEventDefault), stage});
    marks_.back().event->record(stream_);
  }

  PrefillTimes* times_;
  cudaStream_t stream_;
  std::vector<Mark> marks_;
};

class GpuPrefill {
 public:
  GpuPrefill(const GpuModel& model, std::span<const uint32_t> tokens, const Sink& sink,
             const PrefillProgress& progress, PrefillTimes* times)
      : model_(model),
        config_(model.host().config),
        sink_(sink),
        progress_(progress),
        n_(tokens.size()),
        sizes_(gpu_prefill_sizes(config_, n_, sink.bytes(), model.prefill_pattern(),
                                 model.prefill_chunk(), sink.share())),
        chunk_(sizes_.rows.chunk),
        qkv_width_(config_.q_width() + 2 * config_.kv_width()),
        tokens_(sizes_.tokens),
        hidden_(sizes_.hidden),
        ropes_(config_, n_, n_),
        k_(sizes_.kv * sizes_.attended_bytes()),
        v_(sizes_.kv * sizes_.attended_bytes()),
        q_(sizes_.q * sizes_.attended_bytes()),
        attention_(config_, sizes_.fine ? "dense" : model.prefill_pattern(), attended()),
        clock_(times, stream_.get()),
        rows_(model, sizes_.rows, model.rounds_activations(n_), stream_.get()) {
    cuda::copy_now(tokens_.get(), tokens.data(), n_);
    for (size_t i = 0; i < slots(); ++i) make_export();
    if (!sizes_.fine && model.checks_prefill()) check_.emplace(config_, sizes_);
  }
  /// A callback that throws must not leave kernels behind that work on freed memory.
  ~GpuPrefill() {
    (void)cudaStreamSynchronize(stream_.get());
    (void)cudaStreamSynchronize(copies_.get());
  }
  GpuPrefill(const GpuPrefill&) = delete;
  GpuPrefill& operator=(const GpuPrefill&) = delete;

  std::vector<float> run() {
    if (clock_.times() != nullptr) *clock_.times() = {};
    clock_.begin();
    rows_.embed(tokens_.get(), n_, hidden_.get());
    ropes_.fill(0, n_, stream_.get());
    clock_.end(&PrefillTimes::projections);

    std::deque<Item> enqueued;  // and not handed over
    const auto finish_first = [&] {
      finish(enqueued.front());
      enqueued.pop_front();
    };
    size_t number = 0;
    for (uint32_t layer = 0; layer < config_.layers; ++layer) {
      for (size_t first = 0; first < n_; first += chunk_, ++number) {
        if (enqueued.size() == slots()) finish_first();
        enqueued.push_back({layer, first, std::min(chunk_, n_ - first), number % slots()});
        enqueue(enqueued.back());
      }
    }
    while (!enqueued.empty()) finish_first();

    std::vector<float> logits(config_.vocab_size);
    clock_.begin();
    rows_.logits(hidden(n_ - 1), logits);
    clock_.end(&PrefillTimes::logits);
    if (clock_.times() != nullptr) {
      cuda::check(cudaStreamSynchronize(stream_.get()), "a prompt");
      clock_.add_up();
    }
    if (check_) model_.note_prefill_errors(check_->errors());
    model_.note_prefill_share(attention_.share());
    if (progress_) progress_(1.0);
    return logits;
  }

 private:
  /// A chunk of a layer, and which of the exports it uses.
  struct Item {
    uint32_t layer = 0;
    size_t first = 0;
    size_t count = 0;
    size_t slot = 0;
  };

  [[nodiscard]] float* hidden(size_t token) const {
    return hidden_.get() + token * config_.hidden_size;
  }
  [[nodiscard]] bool last(const Item& item) const { return item.layer + 1 == config_.layers; }

  /// The type of q, k and v in attention.
  [[nodiscard]] cuda::KvNumbers attended() const {
    return sizes_.fine ? cuda::KvNumbers::f32 : cuda::KvNumbers::f16;
  }
  /// Where the queries of a chunk lie from one of its tokens on, and k or v from one of the prompt's tokens on.
  [[nodiscard]] std::byte* queries(size_t token) const {
    return q_.get() + token * config_.q_width() * sizes_.attended_bytes();
  }
  [[nodiscard]] std::byte* rows(const cuda::Buffer<std::byte>& kv, size_t token) const {
    return kv.get() + token * config_.kv_width() * sizes_.attended_bytes();
  }

  /// Chunks that are enqueued before the first of them is handed over. Two where nobody takes them, for their progress.
  [[nodiscard]] size_t slots() const { return std::max<size_t>(sizes_.exports, 2); }
  void make_export() {
    const size_t pinned =
        sizes_.exports == 0 ? 0 : sizes_.pinned_bytes(sink_.device != nullptr) / sizes_.exports;
    exports_.emplace_back(sizes_.exported * sizes_.export_bytes, pinned);
    // What is not brought is looked at all the same: numbers that are not finite would be an error.
    if (sink_.share().block != 0) std::memset(exports_.back().host.get(), 0, pinned);
  }

  /// Where a chunk's q, k and v lie in an export of it.
  struct Parts {
    std::byte *q, *k, *v;
  };
  [[nodiscard]] Parts parts(std::byte* data, size_t count) const {
    const size_t size = sizes_.export_bytes;
    std::byte* const k = data + count * config_.q_width() * size;
    return {data, k, k + count * config_.kv_width() * size};
  }

  void enqueue(const Item& item) {
    clock_.begin();
    cuda::Heads heads =
        rows_.project(item.layer, hidden(item.first), item.count, ropes_, item.first);
    heads.attended = attended();
    heads.q = q_.get();
    heads.k = rows(k_, item.first);
    heads.v = rows(v_, item.first);
    if (sink_.any()) {
      const Parts out = parts(exports_[item.slot].device.get(), item.count);
      heads.numbers = cuda::numbers_of(sink_.type());
      heads.q_out = out.q;
      heads.k_out = out.k;
      heads.v_out = out.v;
    }
    cuda::finish_heads(heads, stream_.get());
    clock_.end(&PrefillTimes::projections);
    hand_on(item);

    // Of the last layer only the last token's output is ever read.
    if (last(item) && item.first + item.count < n_) return;
    const size_t skipped = last(item) ? item.count - 1 : 0;
    attend(item, skipped);
    clock_.end(&PrefillTimes::attention);
    rows_.output_and_mlp(item.layer, hidden(item.first + skipped), item.count - skipped);
    clock_.end(&PrefillTimes::mlp);
  }

  /// Whether the sink, which is on the GPU, gets the item's keys and values on the host.
  [[nodiscard]] bool brings_kv(const Item& item) const {
    return sink_.device != nullptr && !config_.slides(item.layer);
  }

  /// Marks that the sink's numbers are ready, and enqueues the copy of those that it gets on the host.
  void hand_on(const Item& item) {
    const Export& out = exports_[item.slot];
    out.ready.record(stream_.get());
    if (sink_.host == nullptr && !brings_kv(item)) return;
    cuda::check(cudaStreamWaitEvent(copies_.get(), out.ready.get(), 0), "an event");
    if (sink_.host != nullptr) {
      cuda::check(cudaMemcpyAsync(out.host.get(), out.device.get(),
                                  item.count * qkv_width_ * sizes_.export_bytes,
                                  cudaMemcpyDeviceToHost, copies_.get()),
                  "queries, keys and values to the host");
    } else {
      bring_kv(item);
    }
    out.copied.record(copies_.get());
  }

  /// Bytes of the keys, or of the values, of a token that are brought to the host.
  [[nodiscard]] size_t brought_row() const {
    return sizes_.brought / 2 / chunk_ * sizes_.export_bytes;
  }
  /// Enqueues the copy of the share of an item's keys and values.
  void bring_kv(const Item& item) {
    const KvShare share = sink_.share();
    const Export& out = exports_[item.slot];
    const Parts from = parts(out.device.get(), item.count);
    const size_t row = brought_row(), pitch = config_.kv_width() * sizes_.export_bytes;
    const size_t first = size_t{share.first_head} * config_.head_dim * sizes_.export_bytes;
    share.for_each_run(item.first, item.count, [&](size_t token, size_t n) {
      const size_t at = token - item.first;
      for (const bool is_v : {false, true}) {
        std::byte* const to = out.host.get() + (at + (is_v ? item.count : 0)) * row;
        cuda::check(cudaMemcpy2DAsync(to, row, (is_v ? from.v : from.k) + at * pitch + first, pitch,
                                      row, n, cudaMemcpyDeviceToHost, copies_.get()),
                    "keys and values to the host");
      }
      if (sink_.device->brought != nullptr) *sink_.device->brought += 2 * n * row;
    });
  }

  /// All queries of the item but the first `skipped`.
  void attend(const Item& item, size_t skipped) {
    const size_t n = item.count - skipped;
    const auto attend_to = [&](auto* out) {
      attention_.attend(item.layer, n, item.first + item.count, queries(skipped), k_.get(),
                        v_.get(), out, stream_.get());
    };
    if (rows_.is_rounded() && !check_) return attend_to(rows_.attended().high);
    attend_to(rows_.spare());
    if (check_) check_attention(item, skipped, n);
    cuda::split_numbers(rows_.spare(), n * config_.q_width(), rows_.attended(), stream_.get());
  }

  void check_attention(const Item& item, size_t skipped, size_t n) {
    check_->dense.attend(item.layer, n, item.first + item.count, queries(skipped), k_.get(),
                         v_.get(), check_->out.get(), stream_.get());
    cuda::count_errors(rows_.spare(), check_->out.get(), n * config_.q_heads, config_.head_dim,
                       check_->bins.get() + item.layer * cuda::kErrorBins, stream_.get());
  }

  /// Waits for the item's keys and values and hands them over; the GPU is at its attention meanwhile.
  void finish(const Item& item) {
    if (item.first == 0) model_.note_memory();
    const Export& out = exports_[item.slot];
    const auto start = std::chrono::steady_clock::now();
    if (sink_.host != nullptr) {
      out.copied.wait();
      const Parts p = parts(out.host.get(), item.count);
      const auto floats = [](const std::byte* data) {
        return reinterpret_cast<const float*>(data);
      };
      (*sink_.host)({item.layer, item.first, item.count, floats(p.q), floats(p.k), floats(p.v)});
    } else {
      out.ready.wait();
      if (sink_.device != nullptr) {
        Parts p = parts(out.device.get(), item.count);
        const bool on_host = brings_kv(item);
        if (on_host) {
          out.copied.wait();
          p.k = out.host.get();
          p.v = p.k + item.count * brought_row();
        }
        sink_.device->take(
            {item.layer, item.first, item.count, sink_.type(), p.q, p.k, p.v, on_host});
      }
    }
    if (clock_.times() != nullptr && sink_.any()) {
      clock_.times()->hand_over +=
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    if (!progress_) return;
    // The item's own attention is still to come.
    done_ += work_of_former_;
    work_of_former_ = work(item);
    progress_(std::min(1.0, done_ / total_work()));
  }

  [[nodiscard]] double work(const Item& item) const {
    const auto count = static_cast<double>(item.count);
    const double projections = static_cast<double>(config_.hidden_size) * qkv_width_;
    const double mlp = static_cast<double>(config_.hidden_size) *
                       (config_.q_width() + 3.0 * config_.intermediate_size);
    const double cells = count * (static_cast<double>(item.first) + count / 2);
    return count * projections +
           (last(item) ? 0.0 : count * mlp + 2.0 * static_cast<double>(config_.q_width()) * cells);
  }
  [[nodiscard]] double total_work() const {
    const Item all{0, 0, n_, 0};
    const Item end{config_.layers - 1, 0, n_, 0};
    return (config_.layers - 1.0) * work(all) + work(end);
  }

  const GpuModel& model_;
  const LlamaConfig& config_;
  const Sink sink_;
  const PrefillProgress& progress_;
  const size_t n_;
  const GpuPrefillSizes sizes_;
  const size_t chunk_;
  const size_t qkv_width_;
  cuda::OwnStream stream_, copies_;
  cuda::Buffer<uint32_t> tokens_;
  cuda::Buffer<float> hidden_;  // [n, hidden]
  cuda::RopeTables ropes_;
  cuda::Buffer<std::byte> k_,
      v_;                      // [n, kv_heads, d] of the current layer, in f16 or, where fine, f32
  cuda::Buffer<std::byte> q_;  // [chunk, q_heads, d], likewise
  cuda::PromptAttention attention_;
  std::deque<Export> exports_;  // slots() of them
  StageClock clock_;
  cuda::TokenRows rows_;
  std::optional<PrefillCheck> check_;
  double done_ = 0.0, work_of_former_ = 0.0;
};

std::vector<float> run_prefill(const GpuModel& model, std::span<const uint32_t> tokens,
                               const Sink& sink, const PrefillProgress& progress,
                               PrefillTimes* times) {
  if (tokens.empty()) throw std::runtime_error("the prompt is empty; at least one token is needed");
  check_tokens(model.host().config, tokens);
  return GpuPrefill(model, tokens, sink, progress, times).run();
}

}  // namespace

std::vector<float> gpu_prefill(const GpuModel& model, std::span<const uint32_t> tokens,
                               const LayerSink& sink, const PrefillProgress& progress,
                               PrefillTimes* times) {
  return run_prefill(model, tokens, {sink ? &sink : nullptr, nullptr}, progress, times);
}

std::vector<float> gpu_prefill_to_device(const GpuModel& model, std::span<const uint32_t> tokens,
                                         const DeviceSink& sink, const PrefillProgress& progress) {
  return run_prefill(model, tokens, {nullptr, &sink}, progress, nullptr);
}

}  // namespace keyhole::tools

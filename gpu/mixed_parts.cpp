#include "gpu/mixed_parts.h"

#include <atomic>
#include <span>

#include "gpu/parts_of_kinds.h"

namespace keyhole::gpu {
namespace {

class MixedResident final : public Resident, public StreamSteps {
 public:
  explicit MixedResident(const ResidentShape& shape) : all(shape.shapes) {}
  ~MixedResident() override { give_up_all(); }  // before the memory of any part is freed
  MixedResident(const MixedResident&) = delete;
  MixedResident& operator=(const MixedResident&) = delete;

  // Resident
  void append_sink(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) override {
    const auto p = all.at(layer);
    p->append_sink(p.layer, k, v, n);
  }
  void append_window(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) override {
    const auto p = all.at(layer);
    p->append_window(p.layer, k, v, n);
  }
  void evict(uint32_t layer, std::byte* k, std::byte* v, uint32_t n) override {
    const auto p = all.at(layer);
    p->evict(p.layer, k, v, n);
  }
  void truncate(uint32_t layer, uint32_t sink, uint32_t window) override {
    const auto p = all.at(layer);
    p->truncate(p.layer, sink, window);
  }
  uint32_t sink_count(uint32_t layer) const override {
    if (!all.kinds.has(layer)) return 0;
    const auto p = all.at(layer);
    return p->sink_count(p.layer);
  }
  uint32_t window_count(uint32_t layer) const override {
    if (!all.kinds.has(layer)) return 0;
    const auto p = all.at(layer);
    return p->window_count(p.layer);
  }
  using Resident::attend_begin;
  void attend_begin(uint32_t layer, const float* q, Codes* codes) override {
    const auto p = all.at(layer);
    p->attend_begin(p.layer, q, part_of(codes, layer));
    step_ = p.part;
  }
  uint32_t host_tasks() const override { return step_ == nullptr ? 0 : step_->host_tasks(); }
  void run_host_task(uint32_t task) override { step_->run_host_task(task); }
  StateView host_state(uint32_t kv_head) override {
    return step_ == nullptr ? StateView{} : step_->host_state(kv_head);
  }
  void attend_end(StateView out) override { step_->attend_end(out); }
  KvView contiguous_rows(uint32_t layer, uint32_t kv_head) const override {
    const auto p = all.at(layer);
    return p->contiguous_rows(p.layer, kv_head);
  }
  void read(uint32_t layer, std::byte* k, std::byte* v) const override {
    const auto p = all.at(layer);
    p->read(p.layer, k, v);
  }
  StreamSteps* stream_steps() override { return this; }
  /// That of the first shape: all lie on one device, and count against one limit.
  ResidentPlace place() const override { return all.parts.front()->place(); }
  Resident& of_layer(uint32_t layer) override { return *all.at(layer).part; }
  KvPieces host_rows(uint32_t layer) override {
    const auto p = all.at(layer);
    return p->host_rows(p.layer);
  }

  // StreamSteps
  void begin(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
             const OnDevice& tokens, Stream stream) override {
    const auto p = all.at(layer);
    steps(p).begin(p.layer, q, k, v, part_of(tokens, layer), stream);
  }
  void end(uint32_t layer, const TensorOut& out, float* lse, Stream stream) override {
    const auto p = all.at(layer);
    steps(p).end(p.layer, out, lse, stream);
  }
  void step(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
            const OnDevice& tokens, const TensorOut& out, float* lse, Stream stream) override {
    const auto p = all.at(layer);
    steps(p).step(p.layer, q, k, v, part_of(tokens, layer), out, lse, stream);
  }
  void step_tokens(uint32_t layer, const ManyTokens& tokens, Codes& codes, Stream stream) override {
    const auto p = all.at(layer);
    steps(p).step_tokens(p.layer, tokens, *part_of(&codes, layer), stream);
  }
  std::unique_ptr<StepGroup> make_group(uint32_t most) override {
    return first().make_group(most);  // of any sessions of the device
  }
  void keep_newest(std::span<const uint32_t> layers, uint32_t of, std::span<const uint32_t> kept,
                   Stream stream) override {
    all.for_layers(layers, [&](Resident& part, std::span<const uint32_t> own) {
      part.stream_steps()->keep_newest(own, of, kept, stream);
    });
  }
  Signal signal() const override { return first().signal(); }
  uint64_t capture_id(Stream stream) const override { return first().capture_id(stream); }
  bool await(uint32_t layer, uint32_t sequence, uint32_t spin_us, uint64_t timeout_us,
             const std::atomic<bool>& stop, Published& out) override {
    const auto p = all.at(layer);
    return steps(p).await(p.layer, sequence, spin_us, timeout_us, stop, out);
  }
  StateView host_slot(uint32_t layer, uint32_t kv_head) override {
    const auto p = all.at(layer);
    return steps(p).host_slot(p.layer, kv_head);
  }
  void deliver(uint32_t layer, uint32_t kv_head, uint32_t sequence) override {
    const auto p = all.at(layer);
    steps(p).deliver(p.layer, kv_head, sequence);
  }
  void give_up(uint32_t layer, uint32_t sequence) override {
    if (!all.kinds.has(layer)) return;  // no step waits for the host there
    const auto p = all.at(layer);
    steps(p).give_up(p.layer, sequence);
  }
  void give_up_all() final {
    all.for_each([](Resident& part) { part.stream_steps()->give_up_all(); });
  }
  bool answer(uint32_t layer, uint32_t kv_head, uint32_t sequence, StateView& out) override {
    const auto p = all.at(layer);
    return steps(p).answer(p.layer, kv_head, sequence, out);
  }
  KvPieces host_copy(uint32_t layer) override {
    const auto p = all.at(layer);
    return steps(p).host_copy(p.layer);
  }
  uint32_t update_host_copy(uint32_t layer, const Published& published, std::byte* k,
                            std::byte* v) override {
    const auto p = all.at(layer);
    return steps(p).update_host_copy(p.layer, published, k, v);
  }
  void keep_newest_of_copy(uint32_t layer, uint32_t of, std::span<const uint32_t> kept) override {
    const auto p = all.at(layer);
    steps(p).keep_newest_of_copy(p.layer, of, kept);
  }
  KvPieces device_rows(uint32_t layer) override {
    const auto p = all.at(layer);
    return steps(p).device_rows(p.layer);
  }
  void synchronize(Stream stream) override { first().synchronize(stream); }
  Status failure(std::string& text) override {
    return all.first_failure([&](Resident& part) { return part.stream_steps()->failure(text); });
  }
  uint64_t wait_nanoseconds() const override {
    uint64_t sum = 0;
    all.for_each([&](Resident& part) { sum += part.stream_steps()->wait_nanoseconds(); });
    return sum;
  }
  uint64_t merges() const override {
    uint64_t sum = 0;
    all.for_each([&](Resident& part) { sum += part.stream_steps()->merges(); });
    return sum;
  }

  Parts<Resident> all;

 private:
  [[nodiscard]] static StreamSteps& steps(const Parts<Resident>::Found& p) {
    return *p->stream_steps();
  }
  [[nodiscard]] StreamSteps& first() const { return *all.parts.front()->stream_steps(); }
  /// `layer` is the model's number.
  [[nodiscard]] static Codes* part_of(Codes* codes, uint32_t layer) {
    return codes == nullptr ? nullptr : codes->of_layer(layer);
  }
  [[nodiscard]] static OnDevice part_of(OnDevice tokens, uint32_t layer) {
    tokens.codes = part_of(tokens.codes, layer);
    return tokens;
  }

  Resident* step_ = nullptr;  ///< of the step with tensors of the host that is under way
};

class MixedWindows final : public Windows {
 public:
  explicit MixedWindows(const WindowsShape& shape) : all(shape.shapes) {}

  void fill(uint32_t layer, uint32_t first, uint32_t n, const std::byte* k,
            const std::byte* v) override {
    const auto p = all.at(layer);
    p->fill(p.layer, first, n, k, v);
  }
  void keep(uint32_t layer, uint32_t first, uint32_t n) override {
    const auto p = all.at(layer);
    p->keep(p.layer, first, n);
  }
  void read(uint32_t layer, uint32_t first, uint32_t n, std::byte* k, std::byte* v) const override {
    const auto p = all.at(layer);
    p->read(p.layer, first, n, k, v);
  }
  void append(uint32_t layer, uint32_t first, uint32_t kept, const TensorView& k,
              const TensorView& v, Stream stream) override {
    const auto p = all.at(layer);
    p->append(p.layer, first, kept, k, v, stream);
  }
  bool are_finite(uint32_t layer, const TensorView& rows, DType as, Stream stream) override {
    const auto p = all.at(layer);
    return p->are_finite(p.layer, rows, as, stream);
  }
  void step(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
            const SeenDrafts& drafts, const TensorOut& out, float* lse, Stream stream) override {
    const auto p = all.at(layer);
    p->step(p.layer, q, k, v, drafts, out, lse, stream);
  }
  void begin(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
             Stream stream) override {
    const auto p = all.at(layer);
    p->begin(p.layer, q, k, v, stream);
  }
  void end(uint32_t layer, const TensorOut& out, float* lse, Stream stream) override {
    const auto p = all.at(layer);
    p->end(p.layer, out, lse, stream);
  }
  void keep_newest(std::span<const uint32_t> layers, uint32_t of, std::span<const uint32_t> kept,
                   Stream stream) override {
    all.for_layers(layers, [&](Windows& part, std::span<const uint32_t> own) {
      part.keep_newest(own, of, kept, stream);
    });
  }
  Status failure(std::string& text) override {
    return all.first_failure([&](Windows& part) { return part.failure(text); });
  }
  size_t bytes() const override {
    size_t sum = 0;
    all.for_each([&](const Windows& part) { sum += part.bytes(); });
    return sum;
  }

  Parts<Windows> all;
};

}  // namespace

std::unique_ptr<Resident> make_mixed_resident(const Device& device, const ResidentShape& shape,
                                              const std::shared_ptr<SessionOnDevice>& session) {
  auto mixed = std::make_unique<MixedResident>(shape);
  const std::vector<ResidentShape> parts = parts_of(shape);
  if (parts.empty()) throw Error(Status::invalid_argument, "no layer has resident tokens");
  for (size_t k = 0; k < parts.size(); ++k) {
    mixed->all.parts[k] = device.make_resident(parts[k], session);
  }
  return mixed;
}

std::unique_ptr<Windows> make_mixed_windows(const Device& device, Resident& resident,
                                            const WindowsShape& shape) {
  auto mixed = std::make_unique<MixedWindows>(shape);
  const std::vector<WindowsShape> parts = parts_of(shape);
  for (size_t k = 0; k < parts.size(); ++k) {
    mixed->all.parts[k] = device.make_windows(resident, parts[k]);
  }
  return mixed;
}

}  // namespace keyhole::gpu

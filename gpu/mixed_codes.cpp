#include <atomic>
#include <string>
#include <vector>

#include "gpu/mixed_parts.h"
#include "gpu/parts_of_kinds.h"

namespace keyhole::gpu {
namespace {

class MixedCodes final : public Codes {
 public:
  explicit MixedCodes(const CodesShape& shape)
      : all(shape.shapes), served_(all.kinds.count()), kv_heads_(all.kinds.count()) {
    for (uint32_t k = 0; k < kv_heads_.size(); ++k) {
      kv_heads_[k] = shape.shapes[all.kinds.layers(k).front()].kv_heads;
    }
  }

  void set_balance(uint32_t layer, uint32_t kv_head, const float* key_scale,
                   float value_scale) override {
    const auto p = coded(layer);
    p->set_balance(p.layer, kv_head, key_scale, value_scale);
  }
  void set_rows(uint32_t layer, const KvView& rows) override {
    const auto p = coded(layer);
    p->set_rows(p.layer, rows);
  }
  void encode(uint32_t layer, uint32_t first, uint32_t count, Stream stream) override {
    const auto p = coded(layer);
    p->encode(p.layer, first, count, stream);
  }
  void truncate(uint32_t layer, uint32_t blocks, Stream stream) override {
    const auto p = coded(layer);
    p->truncate(p.layer, blocks, stream);
  }
  uint32_t count(uint32_t layer) const override {
    if (!all.kinds.has(layer)) return 0;
    const auto p = all.at(layer);
    return p.part == nullptr ? 0 : p->count(p.layer);
  }
  [[nodiscard]] bool takes_lists(uint32_t layer) const override {
    if (!all.kinds.has(layer)) return false;
    const auto p = all.at(layer);
    return p.part != nullptr && p->takes_lists(p.layer);
  }
  bool make_lists(uint32_t layer, uint32_t begin, uint32_t rows) override {
    const auto p = coded(layer);
    return p->make_lists(p.layer, begin, rows);
  }
  void use_lists(uint32_t layer, Stream stream) override {
    const auto p = coded(layer);
    p->use_lists(p.layer, stream);
  }
  void stop_lists(uint32_t layer) override {
    const auto p = coded(layer);
    p->stop_lists(p.layer);
  }
  uint32_t made_lists(uint32_t layer) const override {
    if (!all.kinds.has(layer)) return 0;
    const auto p = all.at(layer);
    return p.part == nullptr ? 0 : p->made_lists(p.layer);
  }
  uint32_t listed(uint32_t layer) const override {
    if (!all.kinds.has(layer)) return 0;
    const auto p = all.at(layer);
    return p.part == nullptr ? 0 : p->listed(p.layer);
  }
  void copy_layer(uint32_t layer, Codes& from) override {
    const auto p = coded(layer);
    Codes* const there = from.of_layer(layer);
    if (there == nullptr) refuse(layer);
    p->copy_layer(p.layer, *there);
  }
  CodedRows coded_rows(uint32_t layer) const override {
    if (!all.kinds.has(layer)) return {};
    const auto p = all.at(layer);
    return p.part == nullptr ? CodedRows{} : p->coded_rows(p.layer);
  }
  void complete() override {
    all.for_each([](Codes& part) { part.complete(); });
  }
  Codes* of_layer(uint32_t layer) override { return all.at(layer).part; }

  // Steps of all layers are counted together: those of each part that were served.
  uint32_t serve_rows(uint32_t kv_head) override {
    uint32_t sum = 0;
    for (uint32_t k = 0; k < served_.size(); ++k) {
      if (all.parts[k] != nullptr && kv_head < kv_heads_[k]) {
        served_[k].store(all.parts[k]->serve_rows(kv_head), std::memory_order_relaxed);
      }
      // Of a part with fewer heads what another of its heads has come to: that head's own sum waits for it.
      sum += served_[k].load(std::memory_order_relaxed);
    }
    return sum;
  }
  void give_up_rows(uint32_t step) override {
    uint32_t sum = 0;
    for (const auto& served : served_) sum += served.load(std::memory_order_relaxed);
    // No part has more steps to come than all have together.
    for (uint32_t k = 0; k < served_.size(); ++k) {
      if (all.parts[k] == nullptr) continue;
      all.parts[k]->give_up_rows(served_[k].load(std::memory_order_relaxed) + (step - sum));
    }
  }
  uint32_t most_tokens(uint32_t layer) const override {
    const auto p = coded(layer);
    return p->most_tokens(p.layer);
  }
  void read(uint32_t layer, uint32_t kv_head, uint32_t block, std::byte* out) const override {
    const auto p = coded(layer);
    p->read(p.layer, kv_head, block, out);
  }
  size_t bytes() const override {
    size_t sum = 0;
    all.for_each([&](const Codes& part) { sum += part.bytes(); });
    return sum;
  }
  CodesDoubts doubts() const override {
    CodesDoubts sum;
    all.for_each([&](const Codes& part) { sum += part.doubts(); });
    return sum;
  }

  Parts<Codes> all;  ///< null: no layer of the kind has codes

 private:
  [[nodiscard]] Parts<Codes>::Found coded(uint32_t layer) const {
    const auto p = all.at(layer);
    if (p.part == nullptr) refuse(layer);
    return p;
  }
  [[noreturn]] static void refuse(uint32_t layer) {
    throw Error(Status::invalid_argument,
                "layer " + std::to_string(layer) + " is of a shape without codes on the device");
  }

  std::vector<std::atomic<uint32_t>> served_;  ///< [kind]
  std::vector<uint32_t> kv_heads_;             ///< [kind]
};

}  // namespace

std::unique_ptr<Codes> make_mixed_codes(const Device& device, Resident& resident,
                                        const CodesShape& shape) {
  auto mixed = std::make_unique<MixedCodes>(shape);
  std::vector<float> sinks;
  const std::vector<CodesShape> parts = parts_of(shape, sinks);
  for (uint32_t k = 0; k < parts.size(); ++k) {
    if (parts[k].layers == 0) continue;
    Resident& own = resident.of_layer(mixed->all.kinds.layers(k).front());
    mixed->all.parts[k] = device.make_codes(own, parts[k]);
  }
  return mixed;
}

}  // namespace keyhole::gpu

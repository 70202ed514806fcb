// Sessions of the card made of host memory: the library's own on the host, for which what lies on the card lies in
// their memory.
#include "tools/engines/llama.cpp/store.h"

#include <ggml.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/tools/engines/llama.cpp/host_card/attention.h"
#include "tests/tools/engines/llama.cpp/host_card/graphs.h"

namespace keyhole::llama_cpp {

// Those of tools/engines/llama.cpp/store.cpp, which has other names here.
std::unique_ptr<Store> make_library_store(const Settings& settings, const StoreShape& shape);
std::string library_refusal(const Settings& settings, const LayerShape& shape,
                            std::optional<uint32_t> device);

namespace {

Rows here(Rows rows) {
  rows.on_device = false;
  return rows;
}

class HostSession final : public Session {
 public:
  explicit HostSession(std::unique_ptr<Session> own) : own_(std::move(own)) {}
  [[nodiscard]] uint32_t tokens(uint32_t layer) const override { return own_->tokens(layer); }
  [[nodiscard]] Session* own() { return own_.get(); }
  void attend(uint32_t layer, const Rows& q, const Rows& k, const Rows& v,
              const Rows& out) override {
    if (host_capture() == 0) return own_->attend(layer, here(q), here(k), here(v), here(out));
    note_capture();
    keep_for_launches([=, this, graph = host_capture()] {
      check_announced(graph, layer);
      own_->attend(layer, here(q), here(k), here(v), here(out));
    });
  }
  void append(uint32_t layer, const Rows& k, const Rows& v) override {
    own_->append(layer, here(k), here(v));
  }
  void truncate(uint32_t tokens) override {
    check_launched();
    own_->truncate(tokens);
  }
  void read(uint32_t layer, uint32_t first, const Rows& k, const Rows& v) override {
    own_->read(layer, first, k, v);
  }
  void build() override { own_->build(); }
  [[nodiscard]] std::unique_ptr<Session> fork() override {
    return std::make_unique<HostSession>(own_->fork());
  }
  [[nodiscard]] std::string describe() const override { return own_->describe(); }

  /// As the library: of captures it knows the newest, and what is announced is launched before anything else happens.
  void note_capture() {
    if (graphs_.empty() || graphs_.back() != host_capture()) graphs_.push_back(host_capture());
    constexpr size_t kMost = 16;
    if (graphs_.size() > kMost) graphs_.erase(graphs_.begin());
  }
  [[nodiscard]] bool knows(uint64_t graph) const {
    return std::find(graphs_.begin(), graphs_.end(), graph) != graphs_.end();
  }
  [[nodiscard]] uint64_t graph() const override { return graphs_.empty() ? 0 : graphs_.back(); }
  [[nodiscard]] bool announce(uint64_t graph) override {
    check_launched();
    if (!knows(graph)) return false;
    announced_ = graph;
    served_.clear();
    return true;
  }
  /// A layer's step of a launch.
  void check_announced(uint64_t graph, uint32_t layer) {
    if (announced_ != graph || !served_.insert(layer).second) {
      throw std::runtime_error("a graph was launched that a session was not told of");
    }
  }

 private:
  void check_launched() const {
    if (announced_ != 0 && served_.empty()) {
      throw std::runtime_error("a session was told of a graph that was not launched");
    }
  }

  std::unique_ptr<Session> own_;
  std::vector<uint64_t> graphs_;
  uint64_t announced_ = 0;
  std::set<uint32_t> served_;  // layers of the launch announced last
};

class HostStore final : public Store {
 public:
  HostStore(std::unique_ptr<Store> own, std::vector<LayerShape> layers)
      : own_(std::move(own)), layers_(std::move(layers)) {}
  [[nodiscard]] std::unique_ptr<Session> make() override {
    return std::make_unique<HostSession>(own_->make());
  }
  void attend_together(uint32_t layer, std::span<Session* const> sessions,
                       std::span<const uint32_t> starts, const Rows& q, const Rows& k,
                       const Rows& v, const Rows& out) override {
    std::vector<Session*> own;
    for (Session* session : sessions) own.push_back(static_cast<HostSession*>(session)->own());
    if (host_capture() == 0) {
      return own_->attend_together(layer, own, starts, here(q), here(k), here(v), here(out));
    }
    for (HostSession* session : all(sessions)) session->note_capture();
    keep_for_launches([=, this, graph = host_capture(), members = all(sessions),
                       kept = std::vector<uint32_t>(starts.begin(), starts.end())] {
      for (HostSession* session : members) session->check_announced(graph, layer);
      own_->attend_together(layer, own, kept, here(q), here(k), here(v), here(out));
    });
  }
  [[nodiscard]] bool announce_together(std::span<Session* const> sessions,
                                       uint64_t graph) override {
    const std::vector<HostSession*> members = all(sessions);
    return std::all_of(members.begin(), members.end(),
                       [&](const HostSession* each) { return each->knows(graph); }) &&
           std::all_of(members.begin(), members.end(),
                       [&](HostSession* each) { return each->announce(graph); });
  }
  void attend_prompt(uint32_t layer, const Rows& q, const Rows& k, const Rows& v, const Rows& out,
                     void* /*stream*/) override {
    const LayerShape& shape = layers_[layer];
    const uint32_t group = shape.q_heads / shape.kv_heads;
    std::optional<PlainRows> rows;  // of a group's KV head
    std::vector<float> query(shape.head_dim);
    for (uint32_t h = 0; h < shape.q_heads; ++h) {
      if (h % group == 0) rows.emplace(k, v, h / group);
      for (int64_t row = 0; row < q.tokens; ++row) {
        const auto* from = static_cast<const std::byte*>(q.data) + row * q.token_stride +
                           int64_t{h} * q.head_stride;
        if (q.number == Number::kBf16) {
          ggml_bf16_to_fp32_row(reinterpret_cast<const ggml_bf16_t*>(from), query.data(),
                                shape.head_dim);
        } else {
          ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(from), query.data(),
                                shape.head_dim);
        }
        PlainHead head;
        head.query = query.data();
        head.scale = shape.scale;
        head.softcap = shape.softcap;
        if (!shape.sinks.empty()) head.sink = shape.sinks[h];
        auto* to = static_cast<std::byte*>(const_cast<void*>(out.data)) + row * out.token_stride +
                   int64_t{h} * out.head_stride;
        attend_plainly(head, *rows, k.tokens - q.tokens + row + 1, reinterpret_cast<float*>(to));
      }
    }
  }

 private:
  [[nodiscard]] static std::vector<HostSession*> all(std::span<Session* const> sessions) {
    std::vector<HostSession*> members;
    for (Session* session : sessions) members.push_back(static_cast<HostSession*>(session));
    return members;
  }

  std::unique_ptr<Store> own_;
  std::vector<LayerShape> layers_;
};

}  // namespace

std::unique_ptr<Store> make_store(const Settings& settings, const StoreShape& shape) {
  StoreShape on_host = shape;
  on_host.device.reset();
  on_host.stream = nullptr;
  return std::make_unique<HostStore>(make_library_store(settings, on_host), shape.layers);
}

std::string refusal(const Settings& settings, const LayerShape& shape,
                    std::optional<uint32_t> /*device*/) {
  return library_refusal(settings, shape, {});
}

}  // namespace keyhole::llama_cpp

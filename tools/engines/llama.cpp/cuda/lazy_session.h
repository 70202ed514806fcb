// Sessions that take nothing until they hold something: as long as llama.cpp attends, only lists of tokens are kept.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/session.h"

namespace keyhole::llama_cpp {

class LazySession final : public Session {
 public:
  using Make = std::function<std::unique_ptr<Session>()>;
  /// `make` makes the session when there are tokens for it.
  explicit LazySession(Make make) : make_(std::move(make)) {}

  [[nodiscard]] bool made() const { return session_ != nullptr; }
  /// From its own count: asking the session takes its lock.
  [[nodiscard]] uint32_t tokens(uint32_t layer) const override {
    return layer < held_.size() ? held_[layer] : 0;
  }
  void attend(uint32_t layer, const Rows& q, const Rows& k, const Rows& v,
              const Rows& out) override {
    own().attend(layer, q, k, v, out);
    add(layer, q.tokens);
  }
  /// The session itself, made where it was not.
  [[nodiscard]] Session& own() {
    if (!session_) session_ = make_();
    return *session_;
  }
  /// Others than this have given its layer tokens.
  void add(uint32_t layer, int64_t tokens) {
    if (layer >= held_.size()) held_.resize(layer + 1);
    held_[layer] += static_cast<uint32_t>(tokens);
  }
  /// A number that no other one has.
  [[nodiscard]] uint64_t serial() const { return serial_; }
  /// attend() while a graph is captured: it happens with each launch of it, of which launched() tells.
  void capture(uint32_t layer, const Rows& q, const Rows& k, const Rows& v, const Rows& out) {
    own().attend(layer, q, k, v, out);
  }
  void launched(uint32_t tokens) {
    for (uint32_t& held : held_) held += tokens;
  }
  void settle() override {
    if (session_) session_->settle();
  }
  [[nodiscard]] uint64_t graph() const override { return session_ ? session_->graph() : 0; }
  [[nodiscard]] bool announce(uint64_t graph) override {
    return session_ != nullptr && session_->announce(graph);
  }
  void append(uint32_t layer, const Rows& k, const Rows& v) override {
    own().append(layer, k, v);
    add(layer, k.tokens);
  }
  void truncate(uint32_t tokens) override {
    if (session_) session_->truncate(tokens);
    for (uint32_t& held : held_) held = std::min(held, tokens);
  }
  void read(uint32_t layer, uint32_t first, const Rows& k, const Rows& v) override {
    own().read(layer, first, k, v);
  }
  void build() override {
    if (session_) session_->build();
  }
  [[nodiscard]] std::unique_ptr<Session> fork() override {
    auto copy = std::make_unique<LazySession>(make_);
    if (session_) copy->session_ = session_->fork();
    copy->held_ = held_;
    return copy;
  }
  [[nodiscard]] std::string describe() const override {
    return session_ ? session_->describe() : "";
  }

 private:
  static uint64_t next_serial() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }

  Make make_;
  uint64_t serial_ = next_serial();
  std::unique_ptr<Session> session_;
  std::vector<uint32_t> held_;
};

/// Makes lazy sessions. `make` makes what they hold, and outlives them.
class LazySessions final : public SessionSource {
 public:
  explicit LazySessions(LazySession::Make make) : make_(std::move(make)) {}
  [[nodiscard]] std::unique_ptr<Session> make() override {
    return std::make_unique<LazySession>(make_);
  }

 private:
  LazySession::Make make_;
};

}  // namespace keyhole::llama_cpp

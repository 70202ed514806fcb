// What the opaque handles of the C API hold.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/home_process.h"
#include "runtime/engine/engine.h"
#include "runtime/parallel/spread_session.h"
#include "runtime/session/session.h"

struct keyhole_engine {
  std::shared_ptr<const keyhole::runtime::Engine> engine;
  keyhole::cpu::HomeProcess home;
};

struct keyhole_session {
  explicit keyhole_session(std::unique_ptr<keyhole::runtime::Session> s) : session(std::move(s)) {}
  /// One of ranks: its own tokens, and how many the whole text has in each layer.
  keyhole_session(std::unique_ptr<keyhole::runtime::Session> s, std::vector<uint32_t> tokens)
      : keyhole_session(std::move(s)) {
    spread = std::make_unique<keyhole::runtime::SpreadSession>(*session, std::move(tokens));
  }
  std::unique_ptr<keyhole::runtime::Session> session;
  std::unique_ptr<keyhole::runtime::SpreadSession> spread;  ///< null: not over several ranks
  keyhole::cpu::HomeProcess home;
  mutable std::atomic<bool> in_use = false;
  bool told_dtype =
      false;  ///< the log has said that K and V come in another 16-bit dtype than kv_dtype
};

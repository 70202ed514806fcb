// What the opaque handles of the C API hold.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "cpu/home_process.h"
#include "runtime/engine/engine.h"
#include "runtime/session/session_interface.h"

struct keyhole_engine {
  std::shared_ptr<const keyhole::runtime::Engine> engine;
  keyhole::cpu::HomeProcess home;
};

struct keyhole_session {
  explicit keyhole_session(std::unique_ptr<keyhole::runtime::SessionInterface> s)
      : session(std::move(s)) {}
  std::unique_ptr<keyhole::runtime::SessionInterface> session;
  keyhole::cpu::HomeProcess home;
  mutable std::atomic<bool> in_use = false;
  bool told_dtype =
      false;  ///< the log has said that K and V come in another 16-bit dtype than kv_dtype
};

// What the opaque handles of the C API hold.
#pragma once

#include <memory>
#include <utility>

#include "cpu/home_process.h"
#include "runtime/api/open_sessions.h"
#include "runtime/engine/engine.h"
#include "runtime/session/session_interface.h"

struct keyhole_engine {
  std::shared_ptr<const keyhole::runtime::Engine> engine;
  std::shared_ptr<keyhole::runtime::OpenSessions> sessions =
      std::make_shared<keyhole::runtime::OpenSessions>();
  keyhole::cpu::HomeProcess home;
};

struct keyhole_session {
  /// all: the sessions of its engine.
  keyhole_session(std::unique_ptr<keyhole::runtime::SessionInterface> s,
                  std::shared_ptr<keyhole::runtime::OpenSessions> all)
      : session(std::move(s)),
        engine(&session->engine()),
        sessions(std::move(all)),
        use(sessions->add(*session)) {}
  ~keyhole_session() { leave(); }
  keyhole_session(const keyhole_session&) = delete;
  keyhole_session& operator=(const keyhole_session&) = delete;
  /// Nobody else looks at the session from now on.
  void leave() noexcept {
    use->leave();
    sessions->remove(*use);
  }

  /// Another one takes the place of `session`, in a call.
  void replace(std::unique_ptr<keyhole::runtime::SessionInterface> other) {
    use->replace(*other);
    session = std::move(other);
  }

  /// May be replaced by another thread's call until a call has entered it.
  std::unique_ptr<keyhole::runtime::SessionInterface> session;
  const keyhole::runtime::Engine* engine;  ///< of whatever session is here: it never changes
  std::shared_ptr<keyhole::runtime::OpenSessions> sessions;
  std::shared_ptr<keyhole::runtime::SessionUse> use;
  keyhole::cpu::HomeProcess home;
  bool told_dtype =
      false;  ///< the log has said that K and V come in another 16-bit dtype than kv_dtype
};

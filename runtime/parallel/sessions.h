// Sessions of an engine, over its ranks where it has any: new ones and saved ones. With ranks both calls are
// collective.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "runtime/engine/engine.h"
#include "runtime/session/identity.h"
#include "runtime/session/session_interface.h"

namespace keyhole::runtime {

/// params: what it throws on any rank is thrown on all. Throws Error likewise.
[[nodiscard]] std::unique_ptr<SessionInterface> make_session(
    const std::shared_ptr<const Engine>& engine, const std::function<SessionParams()>& params);

/// What an ordinary session or one of any number of ranks has saved. Throws what load_session() throws.
[[nodiscard]] std::unique_ptr<SessionInterface> load_any_session(
    const std::shared_ptr<const Engine>& engine, const std::string& path,
    const ExpectedIdentity& expected);

/// Throws Error(unsupported) where the engine's sessions are spread over ranks, all of them: none is a batch's member.
void check_batches(const Engine& engine);

}  // namespace keyhole::runtime

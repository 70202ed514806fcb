#include "runtime/parallel/sessions.h"

#include <vector>

#include "runtime/parallel/spread_file.h"
#include "runtime/parallel/spread_session.h"

namespace keyhole::runtime {

std::unique_ptr<SessionInterface> make_session(const std::shared_ptr<const Engine>& engine,
                                               const std::function<SessionParams()>& params) {
  const auto make = [&] { return std::make_unique<Session>(engine, params()); };
  if (engine->communicator() == nullptr) return make();
  return std::make_unique<SpreadSession>(SpreadSession::make_own(*engine->communicator(), make),
                                         std::vector<uint32_t>(engine->model().layers));
}

std::unique_ptr<SessionInterface> load_any_session(const std::shared_ptr<const Engine>& engine,
                                                   const std::string& path,
                                                   const ExpectedIdentity& expected) {
  LoadedShare loaded = load_spread(engine, path, expected);
  if (engine->communicator() == nullptr) return std::move(loaded.own);
  return std::make_unique<SpreadSession>(std::move(loaded.own), std::move(loaded.tokens));
}

void check_batches(const Engine& engine) {
  if (engine.communicator() != nullptr) refuse_call("keyhole_session_extend_batch");
}

}  // namespace keyhole::runtime

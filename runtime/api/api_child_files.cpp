// Saved sessions that hold what is not in another one's file.
#include <string>
#include <vector>

#include "runtime/api/session_call.h"
#include "runtime/session/session_file.h"

using namespace keyhole;           // NOLINT: the C functions live outside the namespace
using namespace keyhole::runtime;  // NOLINT

namespace {

/// Appends the parents' paths.
void add_parents(const char* const* parents, uint32_t count, std::vector<std::string>& paths) {
  if (count != 0) require(parents, "parents");
  for (uint32_t i = 0; i < count; ++i) {
    if (parents[i] == nullptr) {
      throw Error(Status::invalid_argument, "parents[" + std::to_string(i) + "] is NULL");
    }
    paths.emplace_back(parents[i]);
  }
}

}  // namespace

keyhole_status keyhole_save_child(keyhole_session* session, const char* path,
                                  const char* const* parents, uint32_t count) {
  return with_session(session, Needs::copy, [&](Session& s) {
    require(path, "path");
    if (count == 0) throw Error(Status::invalid_argument, "count is 0, allowed: at least 1");
    refuse_spread(*session, "keyhole_save_child");
    std::vector<std::string> paths;
    add_parents(parents, count, paths);
    s.finish_audits();
    save_child(s, path, paths);
  });
}

keyhole_status keyhole_load_child(keyhole_engine* engine, const char* path,
                                  const char* const* parents, uint32_t count, const char* model,
                                  const int32_t* tokens, uint64_t token_count,
                                  keyhole_session** out) {
  return guarded([&] {
    require(out, "out");
    *out = nullptr;
    require(engine, "engine");
    require(path, "path");
    if (engine->engine->communicator() != nullptr) {
      throw Error(Status::unsupported, "keyhole_load_child with an engine of several ranks");
    }
    std::vector<std::string> paths{path};
    add_parents(parents, count, paths);
    *out = new keyhole_session(load_session(engine->engine, paths, {model, tokens, token_count}));
  });
}

#include "runtime/session/session_file.h"

#include <algorithm>
#include <ostream>
#include <system_error>

#include "runtime/files/new_file.h"
#include "runtime/save/checksum_io.h"
#include "runtime/save/settings_io.h"

namespace keyhole::runtime {
namespace {

constexpr char kSessionMagic[8] = {'K', 'E', 'Y', 'H', 'O', 'L', 'E', '\x1a'};
constexpr uint32_t kFormatVersion = 12;
// The oldest that is read. Before 12 all layers were alike.
constexpr uint32_t kOldestVersion = 11;
constexpr uint32_t kLayerShapesVersion = 12;

[[noreturn]] void corrupt(const std::string& text) { throw Error(Status::corrupt, text); }

void write_session(const Session& session, std::ostream& stream) {
  ChecksumWriter out(stream, &session.engine().pool());
  out.bytes(reinterpret_cast<const std::byte*>(kSessionMagic), sizeof kSessionMagic);
  out.value(kFormatVersion);
  save_shape(session.engine().model(), out);
  save_windows(session.engine().model(), out);
  save_layer_shapes(session.engine().model(), out);
  session.identity().save(out);
  out.value(session.most_tokens());
  save_params(session.params(), out);
  save_heads(session.head_params(), out);
  session.save(out);
  out.finish();
}

}  // namespace

void save_session(const Session& session, const std::string& path) {
  try {
    NewFile file(path, NewFile::Access::owner);
    write_session(session, file.stream());
    file.commit();
  } catch (const std::system_error& e) {
    throw Error(Status::io, e.what());
  }
}

std::unique_ptr<Session> load_session(const std::shared_ptr<const Engine>& engine,
                                      const ByteSource& source, const ExpectedIdentity& expected) {
  ChecksumReader in(source, &engine->pool());
  char magic[sizeof kSessionMagic];
  in.bytes(reinterpret_cast<std::byte*>(magic), sizeof magic, "magic");
  if (!std::equal(std::begin(magic), std::end(magic), std::begin(kSessionMagic))) {
    corrupt("not a saved session (wrong magic)");
  }
  const auto version = in.value<uint32_t>("format version");
  if (version < kOldestVersion || version > kFormatVersion) {
    throw Error(Status::version, "format version " + std::to_string(version) +
                                     ", this library reads " + std::to_string(kOldestVersion) +
                                     " and " + std::to_string(kFormatVersion));
  }
  check_shape(in, engine->model());
  check_windows(in, engine->model());
  check_layer_shapes(in, engine->model(), version >= kLayerShapesVersion);
  Identity identity = Identity::load(in);
  const auto held = in.value<uint32_t>("identity");
  expected.check(identity, held);
  const ModelShape& m = engine->model();
  SessionParams params = load_params(in, m);
  params.heads = load_heads(in, m.head_numbers().count());
  auto session = std::make_unique<Session>(engine, std::move(params));
  session->load(in);
  if (session->most_tokens() != held) {
    corrupt("it says that it holds " + std::to_string(held) + " tokens, it holds " +
            std::to_string(session->most_tokens()));
  }
  session->identity() = std::move(identity);
  return session;
}

std::unique_ptr<Session> load_session(const std::shared_ptr<const Engine>& engine,
                                      const std::string& path, const ExpectedIdentity& expected) {
  const FileSource source(path);
  try {
    return load_session(engine, source, expected);
  } catch (const Error& e) {
    // What the system says names the file already.
    throw e.status() == Status::io ? e : Error(e.status(), path + ": " + e.what());
  }
}

std::unique_ptr<Session> fork_session(const Session& session) {
  SessionParams params = session.params();
  for (const HeadParams* head : session.head_params()) params.heads.push_back(*head);
  auto copy = std::make_unique<Session>(session.shared_engine(), std::move(params), &session);
  copy->copy_from(session);
  return copy;
}

}  // namespace keyhole::runtime

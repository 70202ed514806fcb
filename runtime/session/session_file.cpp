#include "runtime/session/session_file.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "runtime/files/replace_file.h"
#include "runtime/plan/checksum_io.h"
#include "runtime/plan/settings_io.h"

namespace keyhole::runtime {
namespace {

constexpr char kMagic[8] = {'K', 'E', 'Y', 'H', 'O', 'L', 'E', '\x1a'};
constexpr uint32_t kFormatVersion = 8;

std::string errno_text() { return std::generic_category().message(errno); }

[[noreturn]] void corrupt(const std::string& text) { throw Error(Status::corrupt, text); }

}  // namespace

void save_session(const Session& session, const std::string& path) {
  const auto write = [&](std::ostream& file) {
    ChecksumWriter out(file);
    out.bytes(reinterpret_cast<const std::byte*>(kMagic), sizeof kMagic);
    out.value(kFormatVersion);
    save_shape(session.engine().model(), out);
    save_params(session.params(), out);
    save_heads(session.head_params(), out);
    session.save(out);
    out.finish();
  };
  try {
    replace_file(path, write, NewFile::Access::owner);
  } catch (const std::system_error& e) {
    throw Error(Status::io, e.what());
  }
}

std::unique_ptr<Session> load_session(const std::shared_ptr<const Engine>& engine,
                                      std::istream& bytes, uint64_t size) {
  ChecksumReader in(bytes, size);
  char magic[sizeof kMagic];
  in.bytes(reinterpret_cast<std::byte*>(magic), sizeof magic, "magic");
  if (!std::equal(std::begin(magic), std::end(magic), std::begin(kMagic))) {
    corrupt("not a saved session (wrong magic)");
  }
  const auto version = in.value<uint32_t>("format version");
  if (version != kFormatVersion) {
    throw Error(Status::version, "format version " + std::to_string(version) +
                                     ", this library reads " + std::to_string(kFormatVersion));
  }
  check_shape(in, engine->model());
  const ModelShape& m = engine->model();
  SessionParams params = load_params(in, m);
  params.heads = load_heads(in, size_t{m.layers} * m.kv_heads);
  auto session = std::make_unique<Session>(engine, std::move(params));
  session->load(in);
  return session;
}

std::unique_ptr<Session> load_session(const std::shared_ptr<const Engine>& engine,
                                      const std::string& path) {
  std::error_code error;
  const uint64_t size = std::filesystem::file_size(path, error);
  if (error) throw Error(Status::io, "cannot read " + path + ": " + error.message());
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(Status::io, "cannot read " + path + ": " + errno_text());
  try {
    return load_session(engine, file, size);
  } catch (const Error& e) {
    throw Error(e.status(), path + ": " + e.what());
  }
}

std::unique_ptr<Session> fork_session(const Session& session) {
  SessionParams params = session.params();
  for (const HeadParams* head : session.head_params()) params.heads.push_back(*head);
  auto copy = std::make_unique<Session>(session.shared_engine(), std::move(params));
  copy->copy_from(session);
  return copy;
}

}  // namespace keyhole::runtime

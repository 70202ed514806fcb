#include "runtime/session_file.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <span>
#include <system_error>

#include "index/types/factory.h"
#include "runtime/checksum_io.h"
#include "runtime/files/replace_file.h"

namespace keyhole::runtime {
namespace {

constexpr char kMagic[8] = {'K', 'E', 'Y', 'H', 'O', 'L', 'E', '\x1a'};
constexpr uint32_t kFormatVersion = 5;

std::string errno_text() { return std::generic_category().message(errno); }

[[noreturn]] void corrupt(const std::string& text) { throw Error(Status::corrupt, text); }

void write_budget(const Budget& b, ChecksumWriter& out) {
  out.value(b.top_k);
  out.value(static_cast<uint32_t>(b.attend));
  out.value(b.min_weight);
  out.value(static_cast<uint32_t>(b.tail));
  out.value(b.error_target);
  out.value(b.mass_target);
  out.value(b.min_keys);
  out.value(b.max_keys);
}

/// Throws Error(invalid_argument) for what no session has.
Budget read_budget(ChecksumReader& in) {
  keyhole_budget b;
  keyhole_budget_init(&b);
  b.top_k = in.value<uint32_t>("a budget");
  b.attend = static_cast<keyhole_attend_mode>(in.value<uint32_t>("a budget"));
  b.min_weight = in.value<float>("a budget");
  b.tail = static_cast<keyhole_tail_mode>(in.value<uint32_t>("a budget"));
  b.error_target = in.value<float>("a budget");
  b.mass_target = in.value<float>("a budget");
  b.min_keys = in.value<uint32_t>("a budget");
  b.max_keys = in.value<uint32_t>("a budget");
  return check_budget(b);
}

void write_params(const SessionParams& p, ChecksumWriter& out) {
  for (const uint32_t v : {p.max_tokens, p.sink, p.window, p.flush_block, p.tail_partition,
                           static_cast<uint32_t>(p.mode), p.append_block, p.training_queries,
                           static_cast<uint32_t>(p.append_mode)}) {
    out.value(v);
  }
  out.value(static_cast<uint64_t>(p.host_memory_limit));
  out.text(p.index);
  out.value(static_cast<uint64_t>(p.dense_layers.size()));
  for (const uint32_t l : p.dense_layers) out.value(l);
  out.value(p.audit_share);
  out.value(static_cast<uint32_t>(p.audit_action));
  out.value(p.audit_bound);
  write_budget(p.budget, out);
}

SessionParams read_params(ChecksumReader& in, const ModelShape& model) {
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  for (uint32_t* v : {&c.max_tokens, &c.sink, &c.window, &c.flush_block, &c.tail_partition}) {
    *v = in.value<uint32_t>("parameters");
  }
  c.mode = static_cast<keyhole_mode>(in.value<uint32_t>("parameters"));
  c.append_block = in.value<uint32_t>("parameters");
  c.training_queries = in.value<uint32_t>("parameters");
  c.append_mode = static_cast<keyhole_append_mode>(in.value<uint32_t>("parameters"));
  c.host_memory_limit = in.value<uint64_t>("parameters");
  const std::string index = in.text("index spec");
  c.index = index.c_str();
  const auto dense = in.array<uint32_t>(in.value<uint64_t>("dense layers"), "dense layers");
  c.dense_layers = dense.data();
  c.dense_layer_count = static_cast<uint32_t>(dense.size());
  c.audit_share = in.value<double>("parameters");
  c.audit_action = static_cast<keyhole_audit_action>(in.value<uint32_t>("parameters"));
  c.audit_bound = in.value<float>("parameters");
  try {
    SessionParams p = check_session(c, model);
    p.budget = read_budget(in);
    return p;
  } catch (const Error& e) {
    corrupt(std::string("parameters: ") + e.what());
  }
}

/// Index specs are few: each is written once, and heads name them by number.
void write_heads(std::span<const HeadParams* const> heads, ChecksumWriter& out) {
  std::vector<const std::string*> specs;
  std::vector<uint32_t> spec_of;
  for (const HeadParams* head : heads) {
    const auto found = std::find_if(specs.begin(), specs.end(),
                                    [&](const std::string* spec) { return *spec == head->index; });
    spec_of.push_back(static_cast<uint32_t>(found - specs.begin()));
    if (found == specs.end()) specs.push_back(&head->index);
  }
  out.value(static_cast<uint32_t>(specs.size()));
  for (const std::string* spec : specs) out.text(*spec);
  for (size_t i = 0; i < heads.size(); ++i) {
    out.value(spec_of[i]);
    out.value(static_cast<uint32_t>(heads[i]->dense));
    write_budget(heads[i]->budget, out);
  }
}

std::vector<HeadParams> read_heads(ChecksumReader& in, size_t heads) {
  const auto spec_count = in.value<uint32_t>("index specs");
  if (spec_count > heads) corrupt("it has more index specs than heads");
  std::vector<std::string> specs;
  std::vector<HeadParams> out;
  try {
    for (uint32_t i = 0; i < spec_count; ++i) {
      specs.push_back(in.text("index specs"));
      index::check_spec(specs.back());
    }
    for (size_t i = 0; i < heads; ++i) {
      const auto spec = in.value<uint32_t>("a head's parameters");
      const auto dense = in.value<uint32_t>("a head's parameters");
      if (spec >= specs.size() || dense > 1)
        corrupt("head " + std::to_string(i) + " is of no kind");
      out.push_back({specs[spec], read_budget(in), dense != 0});
    }
  } catch (const Error& e) {
    if (e.status() != Status::invalid_argument) throw;
    corrupt(std::string("parameters: ") + e.what());
  }
  return out;
}

void write_shape(const ModelShape& m, ChecksumWriter& out) {
  for (const uint32_t v :
       {m.layers, m.q_heads, m.kv_heads, m.head_dim, static_cast<uint32_t>(m.kv_dtype)}) {
    out.value(v);
  }
}

void check_shape(ChecksumReader& in, const ModelShape& m) {
  const auto check = [&](const char* field, uint32_t needed) {
    const auto seen = in.value<uint32_t>("shape");
    if (seen != needed) {
      throw Error(Status::invalid_argument, std::string("the file was saved with ") + field + " " +
                                                std::to_string(seen) + ", the engine has " +
                                                std::to_string(needed));
    }
  };
  check("layers", m.layers);
  check("q_heads", m.q_heads);
  check("kv_heads", m.kv_heads);
  check("head_dim", m.head_dim);
  check("kv_dtype", static_cast<uint32_t>(m.kv_dtype));
}

}  // namespace

void save_session(const Session& session, const std::string& path) {
  try {
    replace_file(path, [&](std::ostream& file) {
      ChecksumWriter out(file);
      out.bytes(reinterpret_cast<const std::byte*>(kMagic), sizeof kMagic);
      out.value(kFormatVersion);
      write_shape(session.engine().model(), out);
      write_params(session.params(), out);
      write_heads(session.head_params(), out);
      session.save(out);
      out.finish();
    });
  } catch (const std::system_error& e) {
    throw Error(Status::io, e.what());
  }
}

std::unique_ptr<Session> load_session(const std::shared_ptr<const Engine>& engine,
                                      const std::string& path) {
  std::error_code error;
  const uint64_t size = std::filesystem::file_size(path, error);
  if (error) throw Error(Status::io, "cannot read " + path + ": " + error.message());
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(Status::io, "cannot read " + path + ": " + errno_text());
  try {
    ChecksumReader in(file, size);
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
    SessionParams params = read_params(in, m);
    params.heads = read_heads(in, size_t{m.layers} * m.kv_heads);
    auto session = std::make_unique<Session>(engine, std::move(params));
    session->load(in);
    return session;
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

#include "runtime/session_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "index/factory.h"
#include "runtime/plan/settings_io.h"

namespace keyhole::runtime {
namespace {

constexpr char kMagic[8] = {'K', 'E', 'Y', 'H', 'O', 'L', 'E', '\x1a'};
constexpr uint32_t kFormatVersion = 5;

std::string errno_text() { return std::generic_category().message(errno); }

[[noreturn]] void corrupt(const std::string& text) { throw Error(Status::corrupt, text); }

}  // namespace

void SessionFile::write_audits(const Session& s, ChecksumWriter& out) {
  if (s.auditor_ == nullptr) return;
  const AuditSchedule& schedule = s.auditor_->schedule();
  for (const uint64_t step : schedule.steps()) out.value(step);
  for (const AuditSchedule::Reach& r : schedule.reaches()) {
    out.value(r.factor);
    out.value(static_cast<uint32_t>(r.exact));
    out.value(r.due);
  }
}

void SessionFile::read_audits(Session& s, ChecksumReader& in) {
  if (s.auditor_ == nullptr) return;
  AuditSchedule& schedule = s.auditor_->schedule();
  std::vector<uint64_t> steps(schedule.steps().size());
  std::vector<AuditSchedule::Reach> reaches(schedule.reaches().size());
  for (uint64_t& step : steps) step = in.value<uint64_t>("audit state");
  for (AuditSchedule::Reach& r : reaches) {
    r.factor = in.value<uint32_t>("audit state");
    const auto exact = in.value<uint32_t>("audit state");
    if (exact > 1) corrupt("audit state with a flag of " + std::to_string(exact));
    r.exact = exact != 0;
    r.due = in.value<uint64_t>("audit state");
  }
  if (!schedule.restore(std::move(steps), std::move(reaches))) {
    corrupt("audit state that no session has");
  }
}

void SessionFile::write_layer(const Session& s, uint32_t layer, ChecksumWriter& out) {
  const ModelShape& m = s.engine_->model();
  const uint32_t sink = s.resident_->sink_count(layer);
  const uint32_t rows = s.store_.rows(layer);
  const uint32_t window = s.resident_->window_count(layer);
  out.value(sink);
  out.value(rows);
  out.value(window);
  out.value(s.appends_[layer] == nullptr ? 0 : s.appends_[layer]->rows);
  const size_t bytes = size_t{sink + window} * m.kv_heads * m.row_bytes();
  std::vector<std::byte> k(bytes), v(bytes);
  s.resident_->read(layer, k.data(), v.data());
  out.bytes(k.data(), bytes);
  out.bytes(v.data(), bytes);
  for (uint32_t h = 0; h < m.kv_heads; ++h) {
    const KvView kv = s.store_.view(layer, h);
    out.bytes(kv.keys.data, rows * m.row_bytes());
    out.bytes(kv.values.data, rows * m.row_bytes());
    const Session::Head& hd = s.head(layer, h);
    out.value(hd.queries.stride());
    out.value(static_cast<uint64_t>(hd.queries.size()));
    out.bytes(reinterpret_cast<const std::byte*>(hd.queries.positions().data()),
              hd.queries.size() * sizeof(uint32_t));
    out.bytes(reinterpret_cast<const std::byte*>(hd.queries.rows().data()),
              hd.queries.size() * m.head_dim * sizeof(float));
    std::ostringstream index;
    if (hd.index != nullptr) hd.index->save(index);
    out.text(std::move(index).str());
    std::ostringstream tail;
    if (hd.tail != nullptr) {
      index::Writer writer(tail);
      hd.tail->save(writer);
      writer.finish();
    }
    out.value(static_cast<uint64_t>(hd.tail != nullptr ? hd.tail->count() : 0));
    out.text(std::move(tail).str());
  }
}

uint32_t SessionFile::read_layer(Session& s, uint32_t layer, ChecksumReader& in) {
  const ModelShape& m = s.engine_->model();
  const SessionParams& p = s.params_;
  const auto sink = in.value<uint32_t>("token counts");
  const auto rows = in.value<uint32_t>("token counts");
  const auto window = in.value<uint32_t>("token counts");
  const auto append_rows = in.value<uint32_t>("token counts");
  if (sink > p.sink || window > p.window + p.flush_block || (sink < p.sink && rows + window != 0) ||
      uint64_t{sink} + rows + window > p.max_tokens) {
    corrupt("layer " + std::to_string(layer) + " has token counts that no session has: sink " +
            std::to_string(sink) + ", offloaded " + std::to_string(rows) + ", window " +
            std::to_string(window));
  }
  if (append_rows > rows) {
    corrupt("layer " + std::to_string(layer) + " has a block up to row " +
            std::to_string(append_rows) + " of " + std::to_string(rows) + " on its way");
  }
  const size_t token = size_t{m.kv_heads} * m.row_bytes();
  const auto k = in.array<std::byte>(uint64_t{sink + window} * token, "resident keys");
  const auto v = in.array<std::byte>(uint64_t{sink + window} * token, "resident values");
  s.resident_->append_sink(layer, k.data(), v.data(), sink);
  s.resident_->append_window(layer, k.data() + sink * token, v.data() + sink * token, window);
  s.store_.prepare(layer, rows);
  s.store_.grow(layer, rows);
  for (uint32_t h = 0; h < m.kv_heads; ++h) {
    in.bytes(s.store_.key(layer, h, 0), rows * m.row_bytes(), "keys");
    in.bytes(s.store_.value(layer, h, 0), rows * m.row_bytes(), "values");
    const auto stride = in.value<uint32_t>("query sample");
    const auto count = in.value<uint64_t>("query sample");
    if (count > p.training_queries || stride == 0 || (stride & (stride - 1)) != 0) {
      corrupt("layer " + std::to_string(layer) + " has a query sample of " + std::to_string(count) +
              " with stride " + std::to_string(stride));
    }
    auto positions = in.array<uint32_t>(count, "query sample");
    auto queries = in.array<float>(count * m.head_dim, "query sample");
    s.head(layer, h).queries.restore(stride, std::move(positions), std::move(queries));
    const std::string index = in.text("index");
    if (!index.empty()) s.head(layer, h).index = load_index(s, layer, h, index);
    const auto tail_rows = in.value<uint64_t>("tail");
    const std::string tail = in.text("tail");
    if (tail.empty()) continue;
    if (tail_rows > rows) {
      corrupt("layer " + std::to_string(layer) + " has a tail of " + std::to_string(tail_rows) +
              " keys over " + std::to_string(rows) + " rows");
    }
    s.head(layer, h).tail = load_tail(s, layer, h, tail_rows, tail);
  }
  return append_rows;
}

std::unique_ptr<index::Index> SessionFile::load_index(const Session& s, uint32_t layer,
                                                      uint32_t kv_head, const std::string& bytes) {
  const ModelShape& m = s.engine_->model();
  auto index = index::make_index(s.head(layer, kv_head).params.index, m.head_dim, m.kv_dtype,
                                 s.engine_->index_context(layer, kv_head));
  std::istringstream in(bytes);
  index->load(in, s.store_.view(layer, kv_head).keys);
  if (index->count() > s.store_.rows(layer)) {
    corrupt("layer " + std::to_string(layer) + " has an index of " +
            std::to_string(index->count()) + " keys over " + std::to_string(s.store_.rows(layer)) +
            " rows");
  }
  return index;
}

std::unique_ptr<index::TailTree> SessionFile::load_tail(const Session& s, uint32_t layer,
                                                        uint32_t kv_head, size_t rows,
                                                        const std::string& bytes) {
  auto tail = s.make_tail(layer, kv_head);
  std::istringstream in(bytes);
  index::Reader reader(in);
  tail->load(reader, rows);
  reader.finish();
  return tail;
}

void SessionFile::save(const Session& s, const std::string& path) {
  const std::string temporary = path + ".tmp";
  try {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    if (!file) throw Error(Status::io, "cannot write " + temporary + ": " + errno_text());
    ChecksumWriter out(file);
    out.bytes(reinterpret_cast<const std::byte*>(kMagic), sizeof kMagic);
    out.value(kFormatVersion);
    save_shape(s.engine_->model(), out);
    save_params(s.params_, out);
    std::vector<const HeadParams*> heads;
    for (const Session::Head& head : s.heads_) heads.push_back(&head.params);
    save_heads(heads, out);
    write_audits(s, out);
    for (uint32_t l = 0; l < s.engine_->model().layers; ++l) write_layer(s, l, out);
    out.finish();
    file.close();
    if (!file) throw Error(Status::io, "writing " + temporary + " failed: " + errno_text());
    if (std::rename(temporary.c_str(), path.c_str()) != 0) {
      throw Error(Status::io, "cannot rename " + temporary + " to " + path + ": " + errno_text());
    }
  } catch (...) {
    (void)std::remove(temporary.c_str());
    throw;
  }
}

std::unique_ptr<Session> SessionFile::load(const std::shared_ptr<const Engine>& engine,
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
    SessionParams params = load_params(in, m);
    params.heads = load_heads(in, size_t{m.layers} * m.kv_heads);
    auto session = std::make_unique<Session>(engine, std::move(params));
    read_audits(*session, in);
    std::vector<uint32_t> append_rows;
    for (uint32_t l = 0; l < engine->model().layers; ++l) {
      append_rows.push_back(read_layer(*session, l, in));
    }
    in.finish();
    // Begun anew, so that it is taken in by the same step as in the session that was saved.
    for (uint32_t l = 0; l < engine->model().layers; ++l) session->begin_append(l, append_rows[l]);
    session->index_bytes_ = session->count_index_bytes();
    session->make_room(true);
    return session;
  } catch (const Error& e) {
    throw Error(e.status(), path + ": " + e.what());
  }
}

std::unique_ptr<Session> SessionFile::fork(const Session& from) {
  SessionParams params = from.params_;
  for (const Session::Head& head : from.heads_) params.heads.push_back(head.params);
  auto to = std::make_unique<Session>(from.engine_, std::move(params));
  if (to->auditor_ != nullptr) {
    const AuditSchedule& schedule = from.auditor_->schedule();
    (void)to->auditor_->schedule().restore(schedule.steps(), schedule.reaches());
  }
  const ModelShape& m = from.engine_->model();
  const size_t token = size_t{m.kv_heads} * m.row_bytes();
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    const uint32_t sink = from.resident_->sink_count(layer);
    const uint32_t window = from.resident_->window_count(layer);
    const uint32_t rows = from.store_.rows(layer);
    std::vector<std::byte> k((sink + window) * token), v(k.size());
    from.resident_->read(layer, k.data(), v.data());
    to->resident_->append_sink(layer, k.data(), v.data(), sink);
    to->resident_->append_window(layer, k.data() + sink * token, v.data() + sink * token, window);
    to->store_.prepare(layer, rows);
    to->store_.grow(layer, rows);
    for (uint32_t h = 0; h < m.kv_heads; ++h) {
      const KvView kv = from.store_.view(layer, h);
      std::copy_n(kv.keys.data, rows * m.row_bytes(), to->store_.key(layer, h, 0));
      std::copy_n(kv.values.data, rows * m.row_bytes(), to->store_.value(layer, h, 0));
      const Session::Head& source = from.head(layer, h);
      to->head(layer, h).queries = source.queries;
      if (source.tail != nullptr) {
        std::ostringstream saved;
        index::Writer writer(saved);
        source.tail->save(writer);
        writer.finish();
        to->head(layer, h).tail =
            load_tail(*to, layer, h, source.tail->count(), std::move(saved).str());
      }
      if (source.index == nullptr) continue;
      std::ostringstream bytes;
      source.index->save(bytes);
      to->head(layer, h).index = load_index(*to, layer, h, std::move(bytes).str());
    }
    if (from.appends_[layer] != nullptr) to->begin_append(layer, from.appends_[layer]->rows);
  }
  to->index_bytes_ = to->count_index_bytes();
  to->make_room(true);
  return to;
}

}  // namespace keyhole::runtime

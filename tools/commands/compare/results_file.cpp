#include "tools/commands/compare/results_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <sstream>
#include <system_error>
#include <utility>

#include "tools/commands/common/page_facts.h"
#include "tools/commands/compare/report.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

std::string line_of(const ordered_json& value) {
  return value.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

// The first field of the header in which the two differ, "machine.cpu", and both values.
std::string difference(const ordered_json& there, const ordered_json& here) {
  for (const auto& [part, fields] : here.items()) {
    for (const auto& [name, value] : fields.items()) {
      const ordered_json old = there.contains(part) && there[part].is_object()
                                   ? there[part].value(name, ordered_json(nullptr))
                                   : ordered_json(nullptr);
      if (old != value)
        return part + "." + name + " is " + old.dump() + " there and " + value.dump() + " here";
    }
  }
  return "";
}

}  // namespace

std::string row_key(const Measurement& m) {
  return m.index + "\n" + m.attend + "\n" + m.tail + "\n" + m.target + "\n" +
         std::to_string(m.layer) + "\n" + std::to_string(m.kv_head);
}

Measurement measurement_of(const ordered_json& row) {
  Measurement m;
  m.series = row.at("series");
  m.index = row.at("index");
  m.attend = row.at("attend");
  m.tail = row.at("tail");
  m.target = row.at("target");
  m.params = row.at("params");
  m.layer = row.at("layer");
  m.kv_head = row.at("kv_head");
  const auto figure = [&](const char* name) {
    (void)row.at(std::string(name).substr(0, std::string(name).find('.')));
    return figure_at(row, name);
  };
  if (!row.at("output_error").is_null()) {
    m.output_error.emplace();
    m.output_error->mean = figure("output_error");
    m.output_error->median = figure("output_error_median");
    m.output_error->p95 = figure("output_error_p95");
  }
  m.middle_mass = figure("middle_mass");
  m.read_share = figure("read_share");
  m.bytes_per_step = figure("bytes_per_step");
  m.latency_us.p50 = figure("latency_us.p50");
  m.latency_us.p95 = figure("latency_us.p95");
  m.latency_us.p99 = figure("latency_us.p99");
  m.missing_mass = figure("missing_mass");
  if (!row.at("estimated_missing_mass").is_null()) {
    m.missing.emplace();
    m.missing->estimated = figure("estimated_missing_mass");
    m.missing->estimate_error = figure("missing_mass_error");
    m.missing->bytes_per_step = figure("tail_bytes_per_step");
    m.missing->keys_opened = figure("keys_opened");
  }
  if (!row.at("held").is_null()) m.held = figure("held");
  m.recall = figure("recall");
  m.recovered_mass = figure("recovered_mass");
  m.scan_fraction = figure("scan_fraction");
  m.keys_attended = figure("keys_attended");
  m.build_seconds = figure("build_s");
  m.bytes_per_key = figure("bytes_per_key");
  m.tail_build_seconds = figure("tail_build_s");
  m.tail_bytes_per_key = figure("tail_bytes_per_key");
  m.sparsity = figure_at(row, "sparsity");  // files of before lack it
  m.diagnostics = row.at("diagnostics").dump();
  return m;
}

ResultsFile::ResultsFile(std::filesystem::path path, const ordered_json& header)
    : path_(std::move(path)) {
  file_ = open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file_ < 0) fail("cannot be opened");
  try {
    if (flock(file_, LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) fail("cannot be locked");
      throw UsageError("--resume " + path_.string() + ": another process is writing it");
    }
    read(header);
  } catch (...) {
    close(file_);
    throw;
  }
}

ResultsFile::~ResultsFile() { close(file_); }

void ResultsFile::fail(const char* what) const {
  throw std::system_error(errno, std::generic_category(), path_.string() + ": " + what);
}

void ResultsFile::read(const ordered_json& header) {
  std::string text;
  char buffer[65536];
  for (ssize_t n = 0; (n = ::read(file_, buffer, sizeof buffer)) != 0;) {
    if (n < 0) fail("cannot be read");
    text.append(buffer, static_cast<size_t>(n));
  }
  const std::string where = "--resume " + path_.string();
  const size_t whole = text.rfind('\n') == std::string::npos ? 0 : text.rfind('\n') + 1;
  if (whole == 0) {
    // The file holds nothing, or a header that was cut off; any other file without a line end belongs to somebody
    // else.
    const std::string first = line_of(header);
    if (first.compare(0, text.size(), text) != 0) {
      throw UsageError(where + " is no file of results: it does not begin with a line of JSON");
    }
    if (ftruncate(file_, 0) != 0) fail("cannot be written");
    write(first);
    return;
  }
  std::istringstream lines(text.substr(0, whole));
  std::string line;
  for (size_t number = 1; std::getline(lines, line); ++number) {
    const auto value = ordered_json::parse(line, nullptr, false);
    if (number == 1) {
      if (!value.is_object() || !value.contains("file") || value["file"] != header["file"]) {
        throw UsageError(
            where + " is no file of results of this version: its first line is not their header");
      }
      if (const std::string other = difference(value, header); !other.empty()) {
        throw UsageError(where + " holds another comparison: " + other +
                         "; give another file, or measure as before");
      }
      continue;
    }
    try {
      Measurement m = measurement_of(value);
      if (keys_.insert(row_key(m)).second) rows_.push_back(std::move(m));
    } catch (const ordered_json::exception& e) {
      throw UsageError(where + ": line " + std::to_string(number) + " is no row: " + e.what());
    }
  }
  // Only now is it known to be ours, so a row that was cut off is removed.
  if (whole != text.size() && ftruncate(file_, static_cast<off_t>(whole)) != 0)
    fail("cannot be written");
}

void ResultsFile::write(const std::string& text) {
  struct stat before {};
  if (fstat(file_, &before) != 0) fail("cannot be written");
  errno = 0;
  const ssize_t written = ::write(file_, text.data(), text.size());
  if (written == static_cast<ssize_t>(text.size()) && fdatasync(file_) == 0) return;
  const int error = errno == 0 ? ENOSPC : errno;
  (void)!ftruncate(file_, before.st_size);
  errno = error;
  fail("cannot be written");
}

void ResultsFile::append(const std::vector<Measurement>& rows) {
  std::string text;
  std::vector<const Measurement*> added;
  for (const Measurement& m : rows) {
    if (keys_.count(row_key(m)) != 0) continue;
    text += line_of(to_json(m));
    added.push_back(&m);
  }
  if (added.empty()) return;
  write(text);
  for (const Measurement* m : added) {
    keys_.insert(row_key(*m));
    rows_.push_back(*m);
  }
}

}  // namespace keyhole::tools

#include "tools/commands/bench_step/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "runtime/files/json.h"
#include "tools/commands/common/audit_report.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

std::string us(double microseconds) { return format_duration(1e-6 * microseconds); }

std::string fixed(double value, int digits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

double tokens_per_second(const StepTiming& t) { return t.token.mean > 0 ? 1e6 / t.token.mean : 0; }

double per_attend(double sum, const keyhole_statistics& s) {
  return s.attends == 0 ? 0 : sum / static_cast<double>(s.attends);
}

ordered_json to_json(const Latency& l) {
  return {{"mean", l.mean}, {"p50", l.p50}, {"p95", l.p95}, {"p99", l.p99}};
}

ordered_json to_json(const std::vector<RankMemory>& ranks) {
  ordered_json out = ordered_json::array();
  for (const RankMemory& rank : ranks) {
    out.push_back({{"host", rank.host},
                   {"index", rank.index},
                   {"device", rank.device},
                   {"pinned", rank.pinned}});
  }
  return out;
}

ordered_json to_json(const keyhole_statistics& s) {
  return {{"attends", s.attends},
          {"stream_steps", s.stream_steps},
          {"keys_scored", s.keys_scored},
          {"keys_offered", s.keys_offered},
          {"keys_attended", s.keys_attended},
          {"keys_opened", s.keys_opened},
          {"targets_missed", s.targets_missed},
          {"codes_doubted", s.codes_doubted},
          {"codes_given_up", s.codes_given_up},
          {"bytes_read", s.bytes_read},
          {"attend_seconds", s.attend_seconds},
          {"search_seconds", s.search_seconds},
          {"tail_seconds", s.tail_seconds},
          {"offload_seconds", s.offload_seconds},
          {"resident_seconds", s.resident_seconds},
          {"append_seconds", s.append_seconds},
          {"append_blocks", s.append_blocks},
          {"append_wait_seconds", s.append_wait_seconds},
          {"background_seconds", s.background_seconds},
          {"device_wait_seconds", s.device_wait_seconds},
          {"serve_seconds", s.serve_seconds},
          {"tokens", s.tokens},
          {"host_bytes", s.host_bytes},
          {"host_bytes_peak", s.host_bytes_peak},
          {"index_bytes", s.index_bytes},
          {"tail_bytes", s.tail_bytes},
          {"device_bytes", s.device_bytes},
          {"device_bytes_peak", s.device_bytes_peak},
          {"code_bytes", s.code_bytes},
          {"code_layers", s.code_layers},
          {"pinned_bytes", s.pinned_bytes},
          {"device", s.device == nullptr ? "" : s.device},
          {"signal", s.signal == nullptr ? "" : s.signal},
          {"threads", s.threads}};
}

std::string span_of(const std::vector<RankMemory>& ranks, uint64_t RankMemory::*bytes) {
  uint64_t least = UINT64_MAX, most = 0;
  for (const RankMemory& rank : ranks) {
    least = std::min(least, rank.*bytes);
    most = std::max(most, rank.*bytes);
  }
  return format_bytes(least) + (least == most ? "" : " to " + format_bytes(most));
}

// Memory of a rank beside the sums.
std::string ranks_text(const std::vector<RankMemory>& ranks) {
  if (ranks.empty()) return "";
  return "  of each of " + std::to_string(ranks.size()) + " ranks: host " +
         span_of(ranks, &RankMemory::host) + " (indexes " + span_of(ranks, &RankMemory::index) +
         "), device " + span_of(ranks, &RankMemory::device) + "\n";
}

std::string statistics_text(const keyhole_statistics& s, bool of_ranks) {
  std::string text = std::string("  of an attend") + (of_ranks ? ", all ranks" : "") + ": search " +
                     us(1e6 * per_attend(s.search_seconds, s)) + ", offloaded attention " +
                     us(1e6 * per_attend(s.offload_seconds, s)) + " of worker time";
  if (s.stream_steps != 0) {
    text += "; served in " + us(1e6 * per_attend(s.serve_seconds, s)) + ", the device waited " +
            us(1e6 * per_attend(s.device_wait_seconds, s));
  } else {
    text += "; resident " + us(1e6 * per_attend(s.resident_seconds, s));
  }
  text += "; read " +
          format_bytes(static_cast<uint64_t>(per_attend(static_cast<double>(s.bytes_read), s))) +
          "\n  memory" + (of_ranks ? " of all ranks" : "") + ": host " +
          format_bytes(s.host_bytes) + " (indexes " + format_bytes(s.index_bytes) + "), device " +
          format_bytes(s.device_bytes);
  if (s.device_bytes_peak != 0) text += " (peak " + format_bytes(s.device_bytes_peak) + ")";
  if (s.code_layers != 0) {
    text +=
        " with codes of " + std::to_string(s.code_layers) + " layers " + format_bytes(s.code_bytes);
  }
  if (s.pinned_bytes != 0) text += ", pinned " + format_bytes(s.pinned_bytes);
  return text + "\n";
}

std::string percentiles(const Latency& l) {
  return us(l.p50) + ", p95 " + us(l.p95) + ", p99 " + us(l.p99);
}

}  // namespace

std::string to_text(const StepResult& r) {
  std::string text = r.name + "\n";
  if (r.build_seconds != 0) text += "  built in " + format_duration(r.build_seconds);
  if (r.tail_seconds > 0.01) {
    text += (r.build_seconds != 0 ? ", " : "  ") + std::string("partitions in ") +
            format_duration(r.tail_seconds);
  }
  if (text.back() != '\n') text += "\n";
  if (r.timing) {
    const StepTiming& t = *r.timing;
    text += "  layer p50 " + percentiles(t.layer) + "\n  token p50 " + percentiles(t.token) +
            " = " + format_number(tokens_per_second(t)) + " tokens/s";
    if (t.token_on_device.mean > 0) text += "; on the device " + us(t.token_on_device.p50);
    if (t.layer_in_token > 0) text += ", " + us(t.layer_in_token) + " a layer";
    text += "\n";
    if (r.codes_floor) {
      text += "  codes of a layer at the speed of copies " + us(*r.codes_floor) + ", " +
              format_number(100 * *r.codes_floor / layer_time(t)) + " % of its time\n";
    }
    if (t.busy_bandwidth) {
      text += "  busy threads copied " + format_number(1e-9 * *t.busy_bandwidth) +
              " GB/s meanwhile, read and written\n";
    }
    if (t.statistics.attend_seconds > 0) {
      text += statistics_text(t.statistics, !t.ranks.empty()) + ranks_text(t.ranks);
    }
  }
  if (r.audit && r.audit->audits != 0) {
    const keyhole_audit& a = *r.audit;
    text += r.written_error ? "  audits: " : "  ";
    if (std::isfinite(a.error_median)) {  // not where ranks have put their audits together
      text += "output error median " + fixed(a.error_median, 4) + ", p95 " + fixed(a.error_p95, 4) +
              ", p99 " + fixed(a.error_p99, 4) + "; ";
    }
    text += "recall " + fixed(a.recall, 3) + ", mass " + fixed(a.mass_mean, 4) + " (" +
            format_count(a.audits) + " audits)\n";
  }
  if (r.written_error) {
    text += "  what the steps wrote in fp16: output error median " +
            fixed(r.written_error->p50, 4) + ", p95 " + fixed(r.written_error->p95, 4) + ", p99 " +
            fixed(r.written_error->p99, 4) + "\n";
  }
  if (!r.note.empty()) text += "  " + r.note + "\n";
  return text;
}

std::string to_table(const std::vector<StepResult>& results, const Style& style) {
  std::vector<Table::Column> columns;
  for (const char* title : kStepColumns) columns.push_back({title});
  columns.front().align = Table::Align::left;
  Table table(columns);
  for (const StepResult& r : results) {
    std::vector<std::string> cells = {r.name};
    const double build = shown_build(r.build_seconds, r.tail_seconds);
    cells.push_back(build == 0 ? "-" : format_duration(build));
    if (r.timing) {
      const StepTiming& t = *r.timing;
      for (const double figure :
           {t.layer.p50, t.layer.p95, t.layer.p99, t.token.p50, t.token.p95}) {
        cells.push_back(us(figure));
      }
      cells.push_back(format_number(tokens_per_second(t)));
      cells.push_back(format_bytes(static_cast<uint64_t>(
          per_attend(static_cast<double>(t.statistics.bytes_read), t.statistics))));
    } else {
      cells.insert(cells.end(), 7, "-");
    }
    const bool audited = r.audit && r.audit->audits != 0;
    if (r.written_error) {
      const Latency& error = *r.written_error;
      cells.insert(cells.end(), {fixed(error.p50, 4), fixed(error.p95, 4), fixed(error.p99, 4)});
    } else if (audited) {
      const keyhole_audit& a = *r.audit;
      cells.insert(cells.end(),
                   {fixed(a.error_median, 4), fixed(a.error_p95, 4), fixed(a.error_p99, 4)});
    } else {
      cells.insert(cells.end(), 3, "-");
    }
    cells.push_back(audited ? fixed(r.audit->recall, 3) : "-");
    cells.push_back(audited ? fixed(r.audit->mass_mean, 4) : "-");
    table.add_row(std::move(cells));
  }
  return table.text(style);
}

std::optional<double> codes_floor(const keyhole_statistics& statistics, uint32_t layers,
                                  double copy_bandwidth) {
  if (copy_bandwidth <= 0 || layers == 0 || statistics.code_layers != layers) return std::nullopt;
  return 1e6 * static_cast<double>(statistics.code_bytes) / layers / copy_bandwidth;
}

std::string to_text(const StepFloors& f) {
  std::string text;
  if (f.copy_bandwidth > 0) {
    text += f.device + ": copies within it " + format_number(1e-9 * f.copy_bandwidth) + " GB/s";
    if (f.dense) {
      const double seconds = 1e-6 * f.dense->p50;
      const double bandwidth = static_cast<double>(f.weight_bytes) / seconds;
      text += "; weights of " + format_bytes(f.weight_bytes) + " alone " +
              format_duration(seconds) + " a token, " + format_number(1e-9 * bandwidth) +
              " GB/s, " + format_number(100 * bandwidth / f.copy_bandwidth) + " % of that";
    }
    text += "\n";
  }
  return text;
}

ordered_json to_json(const StepResult& r) {
  ordered_json out = {{"name", r.name},
                      {"comparison", r.comparison},
                      {"floor", r.floor},
                      {"series", r.series},
                      {"index", r.index},
                      {"attend", r.attend},
                      {"tail", r.tail},
                      {"target", r.target},
                      {"min_keys", r.min_keys},
                      {"build_s", r.build_seconds},
                      {"tail_build_s", r.tail_seconds},
                      {"note", r.note},
                      {"layer_us", nullptr},
                      {"token_us", nullptr},
                      {"token_on_device_us", nullptr},
                      {"layer_in_token_us", nullptr},
                      {"codes_floor_us", nullptr},
                      {"share_of_codes_floor", nullptr},
                      {"tokens_per_second", nullptr},
                      {"busy_bytes_per_second", nullptr},
                      {"statistics", nullptr},
                      {"rank_bytes", nullptr},
                      {"audit", nullptr},
                      {"written_error", nullptr}};
  if (r.timing) {
    out["layer_us"] = to_json(r.timing->layer);
    out["token_us"] = to_json(r.timing->token);
    if (r.timing->token_on_device.mean > 0) {
      out["token_on_device_us"] = to_json(r.timing->token_on_device);
    }
    if (r.timing->layer_in_token > 0) out["layer_in_token_us"] = r.timing->layer_in_token;
    if (r.codes_floor) {
      out["codes_floor_us"] = *r.codes_floor;
      out["share_of_codes_floor"] = *r.codes_floor / layer_time(*r.timing);
    }
    out["tokens_per_second"] = tokens_per_second(*r.timing);
    if (r.timing->busy_bandwidth) out["busy_bytes_per_second"] = *r.timing->busy_bandwidth;
    if (r.timing->statistics.attends != 0) out["statistics"] = to_json(r.timing->statistics);
    if (!r.timing->ranks.empty()) out["rank_bytes"] = to_json(r.timing->ranks);
  }
  if (r.audit) out["audit"] = audit_json(*r.audit);
  if (r.written_error) out["written_error"] = to_json(*r.written_error);
  return out;
}

ordered_json to_json(const StepFloors& f) {
  const auto known = [](double value) {
    return value > 0 ? ordered_json(value) : ordered_json(nullptr);
  };
  return {{"device", f.device},
          {"layer_bytes", f.layer_bytes},
          {"weight_bytes", f.weight_bytes},
          {"copy_bytes_per_second", known(f.copy_bandwidth)},
          {"host_copy_bytes_per_second", known(f.host_copy_bandwidth)},
          {"dense_us", f.dense ? to_json(*f.dense) : ordered_json(nullptr)}};
}

}  // namespace keyhole::tools

#include "tools/commands/compare/other_results.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "tools/commands/compare/answer_files.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

double product(const float* a, const float* b, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += double{a[i]} * b[i];
  return sum;
}

bool is_hdf5(const std::filesystem::path& path) {
  return path.extension() == ".hdf5" || path.extension() == ".h5";
}

std::vector<std::filesystem::path> files_of(const std::string& path) {
  if (!std::filesystem::is_directory(path)) return {path};
  std::vector<std::filesystem::path> out;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    if (entry.is_regular_file() && is_hdf5(entry.path())) out.push_back(entry.path());
  }
  if (out.empty()) throw UsageError("--ann-results " + path + ": holds no .hdf5 and no .h5 file");
  std::sort(out.begin(), out.end());
  return out;
}

std::string listed(const std::set<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

// One result beside the truth of its head.
class Judged {
 public:
  Judged(const OtherResult& other, const Trace& trace, const TraceHead& head,
         const HeadTruth& truth, const std::vector<size_t>& queries)
      : other_(other), result_(other.result), truth_(truth), head_(head) {
    place_rows(trace, queries);
    check_distance();
  }

  [[nodiscard]] Measurement measure() const {
    // What others searched is the trace's own elements: nothing was rounded.
    const RowJudge judge(truth_, KEYHOLE_F32, false);
    StepSums sums;
    std::vector<double> microseconds(truth_.rows() / truth_.group, 0.0);
    for (size_t row = 0; row < truth_.rows(); ++row) {
      const std::vector<uint32_t> ids = judge.distinct(neighbours(row));
      const FoundRows found = judge.look_at(row, ids);
      sums.recall += judge.share(found.hits);
      sums.mass += found.mass + judge.resident_mass(row);
      sums.attended += static_cast<double>(ids.size()) / static_cast<double>(truth_.group);
      if (!truth_.output.empty()) sums.errors.push_back(error_of(row, ids));
      microseconds[row / truth_.group] += 1e6 * result_.seconds[rows_[row]];
    }
    Measurement m = other_.way();
    m.layer = head_.layer;
    m.kv_head = head_.kv_head;
    const auto keys = static_cast<double>(truth_.offloaded.count());
    put_means(std::move(sums), truth_, keys, m);
    m.latency_us = percentiles(std::move(microseconds));
    m.build_seconds = result_.build_seconds;
    m.bytes_per_key = 1024 * result_.index_kib / keys;
    m.read_share = m.bytes_per_step = m.scan_fraction = AnnResult::kUnknown;
    return m;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw UsageError("--ann-results " + other_.where() + ": " + what);
  }

  // Where the rows of the truth lie among those of the file.
  void place_rows(const Trace& trace, const std::vector<size_t>& queries) {
    const std::vector<int64_t> wanted = test_rows(queries, truth_.group);
    if (result_.queries.empty()) {
      const size_t all = trace.query_positions().size() * truth_.group;
      if (result_.rows() != all) {
        refuse("it has " + std::to_string(result_.rows()) + " queries, and the data set has " +
               std::to_string(all));
      }
      rows_.assign(wanted.begin(), wanted.end());
      return;
    }
    std::map<int64_t, size_t> places;
    for (size_t i = 0; i < result_.queries.size(); ++i) places.emplace(result_.queries[i], i);
    for (const int64_t row : wanted) {
      const auto at = places.find(row);
      if (at == places.end()) {
        refuse("it holds no answer to query " + std::to_string(row) + ", only to " +
               std::to_string(result_.rows()) + " others; give its --queries");
      }
      rows_.push_back(at->second);
    }
  }

  // Offloaded keys that the file names for a row of the truth. Resident tokens are attended anyway.
  [[nodiscard]] std::vector<uint32_t> neighbours(size_t row) const {
    const auto tokens = static_cast<int64_t>(truth_.keys.size() / truth_.dim);
    const auto begin = static_cast<int64_t>(truth_.offloaded.begin);
    const auto end = static_cast<int64_t>(truth_.offloaded.end);
    std::vector<uint32_t> out;
    for (size_t i = 0; i < result_.count; ++i) {
      const int64_t id = result_.neighbours[rows_[row] * result_.count + i];
      if (id < -1 || id >= tokens) {
        refuse("query " + std::to_string(rows_[row]) + " has the neighbour " + std::to_string(id) +
               "; allowed: 0.." + std::to_string(tokens - 1) + ", and -1 for none");
      }
      if (id >= begin && id < end) out.push_back(static_cast<uint32_t>(id - begin));
    }
    return out;
  }

  // Checks that the distances of the file are those of its neighbours to our queries: ids may begin at 1, or be those
  // of other keys.
  void check_distance() const {
    const std::string& kind = result_.distance;
    const bool products = kind.empty() || kind == "ip";
    if (!products && kind != "normalized" && kind != "angular" && kind != "cosine" &&
        kind != "euclidean") {
      refuse("its distance is \"" + kind +
             "\", and attention is by inner products; allowed: ip, and angular, cosine, normalized "
             "or euclidean among keys of one length");
    }
    if (!products) expect_one_length(kind);
    if (result_.distances.empty() || kind.empty()) return;
    constexpr size_t kLooks = 100;
    for (size_t row = 0; row < std::min(truth_.rows(), kLooks); ++row) {
      for (size_t i = 0; i < result_.count; ++i) {
        const size_t at = rows_[row] * result_.count + i;
        const int64_t id = result_.neighbours[at];
        if (id < 0 || id >= static_cast<int64_t>(truth_.keys.size() / truth_.dim)) continue;
        const double there = result_.distances[at];
        if (fits(kind, row, static_cast<size_t>(id), there)) continue;
        refuse("neighbour " + std::to_string(id) + " of query " + std::to_string(rows_[row]) +
               " has the distance " + std::to_string(there) +
               " there, which is not that of this key; is it a result over other keys or queries, "
               "or do its ids begin at 1?");
      }
    }
  }

  [[nodiscard]] bool fits(const std::string& kind, size_t row, size_t id, double there) const {
    const float* q = truth_.query(row);
    const float* k = truth_.keys.data() + id * truth_.dim;
    const double qk = product(q, k, truth_.dim);
    const double qq = product(q, q, truth_.dim);
    const double kk = product(k, k, truth_.dim);
    const double size = std::sqrt(qq * kk);
    // Their sums are fp32, or those of fp16 numbers that they searched.
    const auto near = [&](double here, double scale) {
      return std::abs(there - here) <= 5e-3 * scale;
    };
    if (kind == "ip") return near(-qk, size) || near(qk, size) || near(1 - qk, 1 + size);
    if (kind == "euclidean") {
      const double squared = std::max(qq + kk - 2 * qk, 0.0);
      return near(std::sqrt(squared), std::sqrt(qq + kk)) || near(squared, qq + kk);
    }
    const double cosine = size > 0 ? qk / size : 0;
    return near(1 - cosine, 1) || near(std::sqrt(std::max(2 - 2 * cosine, 0.0)), 1);
  }

  // Among keys of one length the nearest by any of these distances are those of the largest inner products.
  void expect_one_length(const std::string& kind) const {
    double least = std::numeric_limits<double>::infinity();
    double most = 0;
    for (size_t id = truth_.offloaded.begin; id < truth_.offloaded.end; ++id) {
      const float* k = truth_.keys.data() + id * truth_.dim;
      const double length = std::sqrt(product(k, k, truth_.dim));
      least = std::min(least, length);
      most = std::max(most, length);
    }
    if (most <= 1.001 * least) return;
    refuse("its distance is \"" + kind + "\", and these keys have lengths from " +
           std::to_string(least) + " to " + std::to_string(most) +
           ": the nearest are not those of the largest inner products, which attention is about");
  }

  // The error of exact attention to these keys, beside the resident tokens.
  [[nodiscard]] double error_of(size_t row, const std::vector<uint32_t>& ids) const {
    std::vector<double> logits;
    double top = -std::numeric_limits<double>::infinity();
    for (const uint32_t id : ids) {
      logits.push_back(
          truth_.logit(product(truth_.query(row), truth_.offloaded_key(id), truth_.dim)));
      top = std::max(top, logits.back());
    }
    double sum = 0;
    std::vector<double> mean(truth_.dim, 0.0);
    for (size_t i = 0; i < ids.size(); ++i) {
      const double weight = std::exp(logits[i] - top);
      const float* value = truth_.values.data() + (truth_.offloaded.begin + ids[i]) * truth_.dim;
      sum += weight;
      for (size_t x = 0; x < truth_.dim; ++x) mean[x] += weight * value[x];
    }
    std::vector<float> o(truth_.dim, 0.0F);
    for (size_t x = 0; x < truth_.dim && sum > 0; ++x) o[x] = static_cast<float>(mean[x] / sum);
    return output_error(truth_, row, o.data(), sum > 0 ? top + std::log(sum) : top);
  }

  const OtherResult& other_;
  const AnnResult& result_;
  const HeadTruth& truth_;
  const TraceHead& head_;
  std::vector<size_t> rows_;  // of the file, by row of the truth
};

}  // namespace

std::string OtherResult::where() const {
  return path.string() + (result.group.empty() ? "" : ", group " + result.group);
}

std::string OtherResult::label() const {
  std::string out = result.algo.empty() ? path.stem().string() : result.algo;
  if (!result.name.empty() && result.name != out) out += ": " + result.name;
  if (!result.group.empty() && result.group != result.name) out += " " + result.group;
  return out;
}

Measurement OtherResult::way() const {
  Measurement m;
  m.series = result.algo.empty() ? path.stem().string() : result.algo;
  m.index = label();
  m.attend = "topk:" + std::to_string(result.count);
  m.tail = m.target = "none";
  m.params = "as " + path.filename().string() + " says";
  m.diagnostics = "{}";
  return m;
}

bool is_of_head(const OtherResult& other, const std::string& trace_path, const Trace& trace,
                const TraceHead& head) {
  const std::string& dataset = other.result.dataset;
  return dataset == dataset_name(trace_path, trace, head.layer, head.kv_head) ||
         (dataset.empty() && trace.heads().size() == 1);
}

std::vector<OtherResult> read_other_results(const std::vector<std::string>& paths,
                                            const std::string& trace_path, const Trace& trace,
                                            size_t k) {
  std::vector<OtherResult> out;
  std::map<std::string, std::string> seen;  // by data set and label: where
  for (const std::string& path : paths) {
    const size_t before = out.size();
    std::set<std::string> datasets;
    for (const std::filesystem::path& file : files_of(path)) {
      for (AnnResult& result : read_ann_results(file)) {
        OtherResult other{file, std::move(result)};
        datasets.insert(other.result.dataset.empty() ? "one without a name" : other.result.dataset);
        if (std::none_of(trace.heads().begin(), trace.heads().end(), [&](const TraceHead& head) {
              return is_of_head(other, trace_path, trace, head);
            })) {
          continue;
        }
        if (other.result.count < k) {
          throw UsageError("--ann-results " + other.where() + ": it has " +
                           std::to_string(other.result.count) +
                           " neighbours of each query, and recall is of the " + std::to_string(k) +
                           " best: give --k " + std::to_string(other.result.count) + " or less");
        }
        const auto [at, is_new] =
            seen.emplace(other.result.dataset + "\n" + other.label(), other.where());
        if (!is_new) {
          throw UsageError("--ann-results " + other.where() + ": \"" + other.label() + "\" is in " +
                           at->second + " too; give one of them");
        }
        out.push_back(std::move(other));
      }
    }
    if (out.size() == before) {
      const TraceHead& first = trace.heads().front();
      throw UsageError("--ann-results " + path + ": its results are of the data set " +
                       listed(datasets) + ", and this one is called " +
                       dataset_name(trace_path, trace, first.layer, first.kv_head) +
                       (trace.heads().size() == 1 ? "" : " and the like") +
                       ", by the name of its file");
    }
  }
  // Lines of a page go from setting to setting, so results are sorted by system and growing time; names of files do
  // not tell the order.
  const auto seconds = [](const OtherResult& o) {
    return std::accumulate(o.result.seconds.begin(), o.result.seconds.end(), 0.0) /
           static_cast<double>(o.result.rows());
  };
  std::stable_sort(out.begin(), out.end(), [&](const OtherResult& a, const OtherResult& b) {
    return std::tuple(a.way().series, seconds(a)) < std::tuple(b.way().series, seconds(b));
  });
  return out;
}

Measurement measure_other(const OtherResult& other, const Trace& trace, const TraceHead& head,
                          const HeadTruth& truth, const std::vector<size_t>& queries) {
  return Judged(other, trace, head, truth, queries).measure();
}

}  // namespace keyhole::tools

#include "tools/commands/compare/answer_files.h"

#include <cctype>
#include <numeric>
#include <utility>

#include "tools/io/ann_result.h"
#include "tools/rivals/rivals.h"

namespace keyhole::tools {
namespace {

std::string algorithm_of(const Measurement& m) {
  const std::string type = m.index.substr(0, m.index.find(':'));
  for (const RivalType* rival : rival_types()) {
    if (rival->name == type) return type;
  }
  return "keyhole-" + type;
}

// The parts of a way beside its index, as text: "topk:100", " tail=second:16", ...
std::string budget_of(const Measurement& m) {
  return " attend=" + m.attend + " tail=" + m.tail + " target=" + m.target;
}

// Replaces characters that a file's name cannot have by '_', and keeps those that tell numbers apart.
std::string file_name(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const bool stays = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '-';
    if (stays) {
      out += c;
    } else if (!out.empty() && out.back() != '_') {
      out += '_';
    }
  }
  return out;
}

}  // namespace

std::string dataset_name(const std::string& trace_path, const Trace& trace, uint32_t layer,
                         uint32_t kv_head) {
  const std::string stem = std::filesystem::path(trace_path).stem();
  if (trace.heads().size() == 1) return stem;
  return stem + "-layer" + std::to_string(layer) + "-kv" + std::to_string(kv_head);
}

std::vector<int64_t> test_rows(const std::vector<size_t>& queries, size_t group) {
  std::vector<int64_t> out;
  for (const size_t query : queries) {
    for (size_t j = 0; j < group; ++j) out.push_back(static_cast<int64_t>(query * group + j));
  }
  return out;
}

AnswerFiles::AnswerFiles(std::filesystem::path folder, Layout layout, const std::string& trace_path,
                         const Trace& trace, size_t count, std::vector<size_t> queries)
    : folder_(std::move(folder)),
      layout_(layout),
      trace_path_(trace_path),
      trace_(trace),
      count_(count),
      queries_(std::move(queries)) {
  check_has_hdf5("--ann-hdf5");
  std::filesystem::create_directories(folder_);
}

std::filesystem::path AnswerFiles::path_of(const Measurement& m) const {
  return folder_ / file_name(dataset_name(trace_path_, trace_, m.layer, m.kv_head)) /
         std::to_string(count_) / algorithm_of(m) / (file_name(m.index + budget_of(m)) + ".hdf5");
}

void AnswerFiles::write(const Measurement& m, const HeadTruth& truth,
                        const HeadAnswers& answers) const {
  AnnResult out;
  out.algo = algorithm_of(m);
  out.name = m.index + budget_of(m);
  out.dataset = dataset_name(trace_path_, trace_, m.layer, m.kv_head);
  out.distance = "ip";
  out.build_seconds = m.build_seconds + m.tail_build_seconds;
  out.index_kib = (m.bytes_per_key + m.tail_bytes_per_key) *
                  static_cast<double>(truth.offloaded.count()) / 1024;
  out.candidates = answers.found;
  out.count = answers.count;
  // A step answers all heads of the group at once: each is told its share of the time.
  for (const double us : answers.step_us) {
    out.seconds.insert(out.seconds.end(), truth.group,
                       1e-6 * us / static_cast<double>(truth.group));
  }
  out.best_search_seconds = std::accumulate(out.seconds.begin(), out.seconds.end(), 0.0) /
                            static_cast<double>(out.rows());
  out.neighbours = answers.neighbours;
  for (int64_t& id : out.neighbours) {
    if (id >= 0) id += static_cast<int64_t>(truth.offloaded.begin);
  }
  // VIBE's distance for inner products: the least is the best.
  for (const float product : answers.products) out.distances.push_back(-product);
  if (queries_.size() != trace_.query_positions().size()) {
    out.queries = test_rows(queries_, truth.group);
  }
  if (layout_ == Layout::vibe) out.group = file_name(m.index + budget_of(m));
  const std::filesystem::path path = path_of(m);
  std::filesystem::create_directories(path.parent_path());
  write_ann_result(path, out);
}

}  // namespace keyhole::tools

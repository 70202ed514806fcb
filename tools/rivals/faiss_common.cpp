#include "tools/rivals/faiss_common.h"

#include <faiss/impl/io.h>
#include <faiss/index_io.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

struct CountingWriter : faiss::IOWriter {
  uint64_t bytes = 0;
  size_t operator()(const void* /*data*/, size_t size, size_t items) override {
    bytes += uint64_t{size} * items;
    return items;
  }
};

}  // namespace

FaissThreads::FaissThreads(unsigned threads) : former_(omp_get_max_threads()) {
  omp_set_num_threads(static_cast<int>(threads));
}

FaissThreads::~FaissThreads() { omp_set_num_threads(former_); }

uint64_t faiss_bytes(const faiss::Index& index) {
  CountingWriter writer;
  faiss::write_index(&index, &writer);
  return writer.bytes;
}

void FaissSearch::run(const faiss::Index& index, const float* query, size_t k,
                      std::vector<uint32_t>& ids) {
  scores_.resize(k);
  labels_.resize(k);
  index.search(1, query, static_cast<int64_t>(k), scores_.data(), labels_.data());
  ids.clear();
  for (const int64_t label : labels_) {
    if (label >= 0) ids.push_back(static_cast<uint32_t>(label));  // -1: fewer were found
  }
}

void faiss_fill(faiss::IndexIVF& index, const RivalData& data) {
  index.cp.min_points_per_centroid = 1;  // or it warns on stderr
  const auto n = static_cast<int64_t>(data.shape.rows);
  index.train(n, data.keys);
  index.add(n, data.keys);
}

size_t faiss_lists(int64_t lists, size_t rows) {
  if (lists != 0) return static_cast<size_t>(lists);
  const auto chosen = static_cast<size_t>(4 * std::sqrt(static_cast<double>(rows)));
  return std::clamp<size_t>(chosen, 1, rows);
}

void check_faiss_lists(int64_t lists, size_t rows) {
  if (static_cast<size_t>(lists) > rows) {
    throw UsageError("lists=" + std::to_string(lists) + ": only " + std::to_string(rows) +
                     " keys are offloaded, and a list needs one to begin with");
  }
}

}  // namespace keyhole::tools

// faiss-ivfpq: Faiss's IndexIVFPQFastScan with inner products, searched by one query head at a time, ranked again by
// the exact keys.
//
// Andre et al., "Quicker ADC", TPAMI 2021, in the form of Faiss (arXiv 2401.08281): lists of product codes of 4 bits,
// scored by tables that fit registers. The `refine` times k best by codes are ranked by the keys that the session has
// anyway, where Faiss's own IndexRefineFlat would keep another copy of them.
#include <faiss/IndexFlat.h>
#include <faiss/IndexIVFPQFastScan.h>

#include <algorithm>

#include "tools/rivals/faiss_common.h"
#include "tools/rivals/faiss_params.h"
#include "tools/rivals/rivals.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

constexpr size_t kBits = 4;
constexpr size_t kCodewords = size_t{1} << kBits;

class FaissIvfPq : public Rival {
 public:
  explicit FaissIvfPq(const RivalSpec& spec) : spec_(spec) {}

  void build(const RivalData& data) override {
    dim_ = data.shape.dim;
    stored_ = data.stored;
    const FaissThreads threads(data.threads);
    const size_t lists = faiss_lists(spec_[FaissIvfPqParams::lists], data.shape.rows);
    const size_t parts =
        spec_[FaissIvfPqParams::m] != 0 ? spec_.size(FaissIvfPqParams::m) : (dim_ + 1) / 2;
    coarse_ = std::make_unique<faiss::IndexFlatIP>(dim_);
    index_ = std::make_unique<faiss::IndexIVFPQFastScan>(coarse_.get(), dim_, lists, parts, kBits,
                                                         faiss::METRIC_INNER_PRODUCT);
    index_->pq.cp.min_points_per_centroid = 1;  // or it warns on stderr
    faiss_fill(*index_, data);
    bytes_ = faiss_bytes(*index_);
    set_spec(spec_);
  }
  void set_spec(const RivalSpec& spec) override {
    spec_ = spec;
    index_->nprobe = std::min(spec.size(FaissIvfPqParams::probe), index_->nlist);
  }

  void search(const float* queries, size_t group, size_t k, RivalAnswer& answer) override {
    const FaissThreads one(1);
    const size_t before = faiss::indexIVF_stats.ndis;
    const size_t wanted =
        std::min(k * spec_.size(FaissIvfPqParams::refine), static_cast<size_t>(index_->ntotal));
    uint64_t dropped = 0;
    for (size_t j = 0; j < group; ++j) {
      std::vector<uint32_t>& rows = answer.heads[j].rows;
      search_.run(*index_, queries + j * dim_, wanted, rows);
      dropped += rank_again(queries + j * dim_, k, rows);
    }
    answer.keys_scored = faiss::indexIVF_stats.ndis - before;
    answer.bytes_read = group * index_->nlist * dim_ * sizeof(float) +
                        answer.keys_scored * index_->code_size +
                        dropped * stored_->keys.row_bytes();
  }

  [[nodiscard]] uint64_t bytes() const override { return bytes_; }

 private:
  // Keeps the k rows of the largest exact scores; returns how many others were scored. Rows that are kept are
  // attended, and counted there.
  size_t rank_again(const float* query, size_t k, std::vector<uint32_t>& rows) {
    if (rows.size() <= k) return 0;
    ranked_.clear();
    for (const uint32_t row : rows) {
      float score = 0;
      stored_->keys.products(query, row, row + size_t{1}, &score);
      ranked_.emplace_back(-score, row);
    }
    std::nth_element(ranked_.begin(), ranked_.begin() + static_cast<ptrdiff_t>(k), ranked_.end());
    const size_t dropped = rows.size() - k;
    rows.resize(k);
    for (size_t i = 0; i < k; ++i) rows[i] = ranked_[i].second;
    return dropped;
  }

  RivalSpec spec_;
  size_t dim_ = 0;
  uint64_t bytes_ = 0;
  const StoredRows* stored_ = nullptr;
  std::unique_ptr<faiss::IndexFlatIP> coarse_;
  std::unique_ptr<faiss::IndexIVFPQFastScan> index_;
  FaissSearch search_;
  std::vector<std::pair<float, uint32_t>> ranked_;
};

void check_ivfpq(const RivalSpec& spec, const RivalShape& shape) {
  check_faiss_lists(spec[FaissIvfPqParams::lists], shape.rows);
  const size_t parts = spec.size(FaissIvfPqParams::m);
  if (parts != 0 && shape.dim % parts != 0) {
    throw UsageError("m=" + std::to_string(parts) + ": parts of equal size are wanted, and " +
                     std::to_string(shape.dim) + " components cannot be cut into so many");
  }
  if (parts == 0 && shape.dim % 2 != 0) {
    throw UsageError("m=0 cuts keys into pairs of components, and there are " +
                     std::to_string(shape.dim) + ": give m=");
  }
  if (shape.rows < kCodewords) {
    throw UsageError("4-bit codes are trained on " + std::to_string(kCodewords) +
                     " keys at least; only " + std::to_string(shape.rows) + " are offloaded");
  }
}

}  // namespace

const RivalType kFaissIvfPq = {.name = "faiss-ivfpq",
                               .meaning = kFaissIvfPqMeaning,
                               .params = FaissIvfPqParams::kTable,
                               .asks_for_k = true,
                               .check = check_ivfpq,
                               .make = [](const RivalSpec& spec) -> std::unique_ptr<Rival> {
                                 return std::make_unique<FaissIvfPq>(spec);
                               }};

}  // namespace keyhole::tools

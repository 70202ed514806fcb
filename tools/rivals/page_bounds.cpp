#include "tools/rivals/page_bounds.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "tools/rivals/blocks_of_rows.h"
#include "tools/rivals/rivals.h"

namespace keyhole::tools {

PageBounds::PageBounds(ElementType type, const float* keys, size_t rows, size_t dim,
                       size_t page_size)
    : dim_(dim), positive_(dim), negative_(dim) {
  const size_t pages = (rows + page_size - 1) / page_size;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> least(pages * dim, kInfinity);
  std::vector<float> largest(pages * dim, -kInfinity);
  for (size_t row = 0; row < rows; ++row) {
    float* low = least.data() + row / page_size * dim;
    float* high = largest.data() + row / page_size * dim;
    for (size_t c = 0; c < dim; ++c) {
      low[c] = std::min(low[c], keys[row * dim + c]);
      high[c] = std::max(high[c], keys[row * dim + c]);
    }
  }
  least_ = StoredMatrix(type, least.data(), pages, dim);
  largest_ = StoredMatrix(type, largest.data(), pages, dim);
  products_.resize(pages);
}

void PageBounds::of(const float* query, float* out) {
  // max(q * least, q * largest) is q * largest where q > 0 and q * least elsewhere: two products with matrices.
  for (size_t c = 0; c < dim_; ++c) {
    positive_[c] = std::max(query[c], 0.0F);
    negative_[c] = std::min(query[c], 0.0F);
  }
  largest_.products(positive_.data(), 0, pages(), out);
  least_.products(negative_.data(), 0, pages(), products_.data());
  add(products_.data(), pages(), out);
}

namespace {

enum Param : size_t { kSize, kBudget };
constexpr RivalParam kParams[] = {
    {"size", RivalStage::build, 16, 1, 4096, "tokens of a page"},
    {"budget", RivalStage::search, 1024, 1, 1 << 30,
     "keys that each head takes, in whole pages (at least one)"},
};

class Pages : public Rival {
 public:
  explicit Pages(const RivalSpec& spec) : spec_(spec) {}

  void build(const RivalData& data) override {
    rows_ = data.shape.rows;
    bounds_ =
        PageBounds(data.stored->keys.type(), data.keys, rows_, data.shape.dim, spec_.size(kSize));
    scores_.resize(bounds_.pages());
  }
  void set_spec(const RivalSpec& spec) override { spec_ = spec; }

  void search(const float* queries, size_t group, size_t /*k*/, RivalAnswer& answer) override {
    const BlocksOfRows blocks{rows_, spec_.size(kSize)};
    const size_t dim = bounds_.dim();
    for (size_t j = 0; j < group; ++j) {
      bounds_.of(queries + j * dim, scores_.data());
      blocks.best(scores_, spec_.size(kBudget), order_, answer.heads[j].rows);
    }
    answer.bytes_read = bounds_.bytes();  // once for all heads
  }

  [[nodiscard]] uint64_t bytes() const override { return bounds_.bytes(); }

 private:
  RivalSpec spec_;
  size_t rows_ = 0;
  PageBounds bounds_;
  std::vector<float> scores_;
  std::vector<uint32_t> order_;
};

}  // namespace

const RivalType kPageBounds = {
    .name = "pages",
    .meaning = "pages of the largest upper bounds of their keys' scores (Quest, arXiv 2406.10774)",
    .params = kParams,
    .make = [](const RivalSpec& spec) -> std::unique_ptr<Rival> {
      return std::make_unique<Pages>(spec);
    }};

}  // namespace keyhole::tools

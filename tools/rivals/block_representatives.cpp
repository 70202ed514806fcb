#include "tools/rivals/block_representatives.h"

#include <algorithm>
#include <numeric>

#include "tools/rivals/blocks_of_rows.h"
#include "tools/rivals/rivals.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {

std::vector<float> representative_scores(const RivalData& data, size_t local) {
  const size_t d = data.shape.dim;
  const std::span<const uint32_t> positions = data.training_positions;
  // The mean of inner products is the inner product with the mean query: sums of all queries before each position give
  // the mean of any run of them.
  const size_t steps = positions.empty() ? 1 : positions.size();
  const size_t per_step = data.shape.training_rows / steps;
  std::vector<double> sums((steps + 1) * d);
  for (size_t t = 0; t < steps; ++t) {
    double* sum = sums.data() + (t + 1) * d;
    std::copy_n(sum - d, d, sum);
    for (size_t r = t * per_step; r < (t + 1) * per_step; ++r) {
      for (size_t c = 0; c < d; ++c) sum[c] += data.training[r * d + c];
    }
  }
  std::vector<float> out(data.shape.rows);
  for (size_t row = 0; row < out.size(); ++row) {
    size_t first = 0;
    size_t last = steps;
    if (!positions.empty()) {
      const size_t token = data.first_token + row;
      const auto place = [&](size_t position) {
        return static_cast<size_t>(std::upper_bound(positions.begin(), positions.end(), position) -
                                   positions.begin());
      };
      first = place(token);
      last = place(token + local);
      if (first == last) last = steps;
      if (first == last) first = 0;
    }
    const double* from = sums.data() + first * d;
    const double* to = sums.data() + last * d;
    const float* key = data.keys + row * d;
    double score = 0;
    for (size_t c = 0; c < d; ++c) score += (to[c] - from[c]) * key[c];
    out[row] = static_cast<float>(score / static_cast<double>((last - first) * per_step));
  }
  return out;
}

namespace {

enum Param : size_t { kSize, kRepresentatives, kLocal, kBudget };
constexpr RivalParam kParams[] = {
    {"size", RivalStage::build, 128, 1, 65536, "tokens of a block"},
    {"representatives", RivalStage::build, 4, 1, 65536, "keys of each block that stand for it"},
    {"local", RivalStage::build, 4096, 1, 1 << 30,
     "tokens behind a key whose queries say how much attention it receives"},
    {"budget", RivalStage::search, 1024, 1, 1 << 30,
     "keys that a step takes for all of its heads, in whole blocks (at least one)"},
};

class Blocks : public Rival {
 public:
  explicit Blocks(const RivalSpec& spec) : spec_(spec) {}

  void build(const RivalData& data) override {
    dim_ = data.shape.dim;
    blocks_ = {data.shape.rows, spec_.size(kSize)};
    const std::vector<float> scores = representative_scores(data, spec_.size(kLocal));
    std::vector<float> chosen;
    std::vector<uint32_t> members;
    for (size_t block = 0; block < blocks_.count(); ++block) {
      const size_t begin = block * blocks_.size;
      members.resize(std::min(blocks_.size, blocks_.rows - begin));
      std::iota(members.begin(), members.end(), static_cast<uint32_t>(begin));
      const size_t kept = std::min(members.size(), spec_.size(kRepresentatives));
      std::partial_sort(members.begin(), members.begin() + static_cast<ptrdiff_t>(kept),
                        members.end(), [&](uint32_t a, uint32_t b) {
                          return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
                        });
      for (size_t i = 0; i < kept; ++i) {
        const float* key = data.keys + members[i] * dim_;
        chosen.insert(chosen.end(), key, key + dim_);
        block_of_.push_back(static_cast<uint32_t>(block));
      }
    }
    representatives_ =
        StoredMatrix(data.stored->keys.type(), chosen.data(), block_of_.size(), dim_);
    products_.resize(block_of_.size());
    relevance_.resize(blocks_.count());
  }
  void set_spec(const RivalSpec& spec) override { spec_ = spec; }

  void search(const float* queries, size_t group, size_t /*k*/, RivalAnswer& answer) override {
    // Relevances add over heads, and inner products are linear in the query.
    query_.assign(queries, queries + dim_);
    for (size_t j = 1; j < group; ++j) add(queries + j * dim_, dim_, query_.data());
    representatives_.products(query_.data(), 0, block_of_.size(), products_.data());
    std::fill(relevance_.begin(), relevance_.end(), 0.0F);
    for (size_t i = 0; i < products_.size(); ++i) relevance_[block_of_[i]] += products_[i];
    // A last block that is shorter than `representatives` would lose by having fewer of them.
    relevance_.back() *= static_cast<float>(representatives_of(0)) /
                         static_cast<float>(representatives_of(blocks_.count() - 1));

    std::vector<uint32_t>& rows = answer.heads[0].rows;
    blocks_.best(relevance_, spec_.size(kBudget), order_, rows);
    for (size_t j = 1; j < group; ++j) answer.heads[j].rows = rows;
    // Representatives are scored, and everything in the blocks taken; those that are both count once.
    size_t scored = block_of_.size() + rows.size();
    for (const uint32_t row : rows) {
      if (row % blocks_.size == 0) scored -= representatives_of(row / blocks_.size);
    }
    answer.keys_scored = scored * group;
    answer.bytes_read = representatives_.bytes();
  }

  [[nodiscard]] uint64_t bytes() const override { return representatives_.bytes(); }

 private:
  [[nodiscard]] size_t representatives_of(size_t block) const {
    return std::min(
        {spec_.size(kRepresentatives), blocks_.size, blocks_.rows - block * blocks_.size});
  }

  RivalSpec spec_;
  size_t dim_ = 0;
  BlocksOfRows blocks_;
  StoredMatrix representatives_;    // `[blocks * representatives, d]`, by block
  std::vector<uint32_t> block_of_;  // of each representative, ascending
  std::vector<float> query_, products_, relevance_;
  std::vector<uint32_t> order_;
};

void check_blocks(const RivalSpec& spec, const RivalShape& shape) {
  if (shape.training_rows == 0) {
    throw UsageError(
        "blocks chooses representatives by training queries, and the trace has none; record one "
        "with "
        "--training, or give --training-file");
  }
  if (spec[kRepresentatives] > spec[kSize]) {
    throw UsageError("representatives=" + std::to_string(spec[kRepresentatives]) +
                     ": a block of size=" + std::to_string(spec[kSize]) + " has fewer keys");
  }
}

}  // namespace

const RivalType kBlockRepresentatives = {
    .name = "blocks",
    .meaning =
        "blocks found by the keys of each that receive the most attention (InfLLM, arXiv "
        "2402.04617)",
    .params = kParams,
    .check = check_blocks,
    .make = [](const RivalSpec& spec) -> std::unique_ptr<Rival> {
      return std::make_unique<Blocks>(spec);
    }};

}  // namespace keyhole::tools

#include "tools/tasks/ruler/samples.h"

#include <algorithm>
#include <utility>

#include "tools/terminal/errors.h"

namespace keyhole::tools::ruler {
namespace {

// Draws of one size differ by a few tokens. Where so many of the smallest one are too long, none will fit.
constexpr int kMostDraws = 100;

[[noreturn]] void refuse(size_t tokens, size_t budget) {
  throw UsageError("the prompt with the smallest haystack has " + std::to_string(tokens) +
                   " tokens; allowed: " + std::to_string(budget) +
                   ", the length without the tokens of an answer");
}

}  // namespace

size_t find_units(Generator& generator, size_t budget, const Samples::CountTokens& count) {
  const SizeSearch search = generator.size_search();
  const double tokens_per_unit =
      static_cast<double>(std::max<size_t>(1, count(generator.draw_probe(search.probe)))) /
      static_cast<double>(search.probe);
  size_t low = search.step;
  size_t high = std::max(
      static_cast<size_t>(static_cast<double>(budget) / tokens_per_unit) * search.margin, 2 * low);
  size_t best = 0;
  while (low <= high) {
    const size_t middle = (low + high) / 2;
    if (count(generator.draw(0, middle)) <= budget) {
      best = middle;
      low = middle + 1;
    } else {
      high = middle - 1;
    }
  }
  return best;
}

Samples::Samples(std::unique_ptr<Generator> generator, size_t budget, CountTokens count)
    : generator_(std::move(generator)), budget_(budget), count_(std::move(count)) {
  units_ = find_units(*generator_, budget_, count_);
  if (units_ == 0) refuse(count_(generator_->draw(0, generator_->size_search().step)), budget_);
}

Sample Samples::next() {
  const size_t step = generator_->size_search().step;
  size_t units = units_;
  size_t tokens = 0;
  for (int i = 0; i < kMostDraws; ++i) {
    Sample sample = generator_->draw(drawn_, units);
    tokens = count_(sample);
    if (tokens <= budget_) {
      ++drawn_;
      return sample;
    }
    // Only draws of the smallest haystack count as tries.
    if (units > step) {
      units = units > 2 * step ? units - step : step;
      i = -1;
    }
  }
  refuse(tokens, budget_);
}

}  // namespace keyhole::tools::ruler

#include "runtime/engine/prefill_pattern.h"

#include <algorithm>
#include <array>

#include "index/spec.h"
#include "runtime/plan/budget_file.h"

namespace keyhole::runtime {
namespace {

using index::integer;
using index::ParamDecl;
using index::Stage;
using index::TypeDecl;

constexpr int64_t kMostRows = int64_t{65535} * 64;
constexpr float kPerMille = 1000.0F;
constexpr std::string_view kBudgets = "budgets:";

constexpr TypeDecl kDense = {"dense", "all that a query sees", {}};

constexpr std::array kAShapeParams = {
    integer("first", Stage::search, 1024, 0, kMostRows,
            "tokens at the beginning, in whole blocks of 64"),
    integer("near", Stage::search, 4096, 0, kMostRows,
            "tokens before each query, in whole blocks of 64"),
};
constexpr TypeDecl kAShape = {"a-shape", "the first tokens and the newest ones", kAShapeParams};

// What `auto` stands for: bench/RESULTS.md has answers and times beside dense attention.
constexpr std::array kSampledParams = {
    integer("mass", Stage::search, 950, 0, 1000, "of the sampled queries' weight, in thousandths"),
    integer("stride", Stage::search, 16, 1, 128, "one query in so many is sampled"),
    integer("lookups", Stage::search, 50, 0, 1000,
            "query heads are dense that look up single tokens with more than so many thousandths "
            "of their weight"),
    integer("first", Stage::search, 64, 0, kMostRows,
            "tokens at the beginning that are always attended"),
    integer("near", Stage::search, 256, 0, kMostRows,
            "tokens before each query that are always attended"),
    integer("from", Stage::search, 16384, 0, kMostRows, "tokens up to which attention is dense"),
};
constexpr TypeDecl kSampled = {
    "sampled", "the blocks that hold the weight of some queries of each tile", kSampledParams};
constexpr TypeDecl kAuto = {"auto", "sampled, with its defaults", {}};

constexpr std::array<const TypeDecl*, 4> kTypes = {&kDense, &kAShape, &kSampled, &kAuto};

gpu::PromptPattern sampled(const index::Spec& spec) {
  gpu::PromptPattern p;
  p.dense = false;
  p.mass = static_cast<float>(spec[0]) / kPerMille;
  p.stride = static_cast<uint32_t>(spec[1]);
  p.lookups = static_cast<float>(spec[2]) / kPerMille;
  p.first_rows = static_cast<uint32_t>(spec[3]);
  p.near_rows = static_cast<uint32_t>(spec[4]);
  p.dense_rows = static_cast<uint32_t>(spec[5]);
  return p;
}

}  // namespace

gpu::PromptPattern parse_prefill_pattern(std::string_view text) {
  const index::Spec spec = index::Spec::parse(text, kTypes);
  if (&spec.type() == &kSampled) return sampled(spec);
  if (&spec.type() == &kAuto) return sampled(index::Spec(kSampled));
  gpu::PromptPattern p;
  if (&spec.type() == &kDense) return p;
  p.dense = false;
  p.first_rows = static_cast<uint32_t>(spec[0]);
  p.near_rows = static_cast<uint32_t>(spec[1]);
  return p;
}

std::vector<gpu::PromptPattern> parse_head_patterns(std::string_view text,
                                                    const ModelShape& model) {
  std::vector<gpu::PromptPattern> all(size_t{model.layers} * model.q_heads);
  if (!text.starts_with(kBudgets)) {
    std::fill(all.begin(), all.end(), parse_prefill_pattern(text));
    return all;
  }
  const std::string path(text.substr(kBudgets.size()));
  if (path.empty()) {
    throw Error(Status::invalid_argument,
                "the pattern is \"budgets:\", allowed: \"budgets:\" and a path");
  }
  with_budgets(path, model, [&](const BudgetsFile& file) {
    for (size_t i = 0; i < file.heads.size(); ++i) {
      const BudgetsFile::Entry& entry = file.heads[i];
      if (!entry.pattern) continue;
      try {
        const gpu::PromptPattern pattern = parse_prefill_pattern(*entry.pattern);
        for (uint32_t layer = 0; layer < model.layers; ++layer) {
          for (uint32_t h = 0; h < model.q_heads; ++h) {
            if (entry.layer.value_or(layer) != layer || entry.q_head.value_or(h) != h) continue;
            all[size_t{layer} * model.q_heads + h] = pattern;
          }
        }
      } catch (const Error& e) {
        throw Error(e.status(), "heads[" + std::to_string(i) + "].pattern: " + e.what());
      }
    }
  });
  return all;
}

const std::string& prefill_pattern_help() {
  static const std::string text = [] {
    std::string s;
    for (const TypeDecl* type : kTypes) {
      s += std::string(type->name) + ": " + std::string(type->meaning) + "\n";
      for (const ParamDecl& p : type->params) {
        s += "    " + std::string(p.name) + "=" + index::value_text(p, p.fallback) + "  (" +
             index::allowed_text(p) + ") " + std::string(p.meaning) + "\n";
      }
    }
    s +=
        "budgets:PATH: of each (layer, query head) what a file of budgets says; others are dense\n";
    return s;
  }();
  return text;
}

}  // namespace keyhole::runtime

#include "runtime/prefill/prefill_pattern.h"

#include <algorithm>
#include <array>

#include "index/spec.h"
#include "runtime/plan/budget_file.h"

namespace keyhole::runtime {
namespace {

using index::choice;
using index::integer;
using index::ParamDecl;
using index::Stage;
using index::TypeDecl;

constexpr int64_t kMostRows = int64_t{65535} * 64;
constexpr float kPerMille = 1000.0F;
constexpr std::string_view kBudgets = "budgets:";

// Parameters that several types have.
constexpr ParamDecl kMass =
    integer("mass", Stage::search, 950, 0, 1000, "of the estimated weight, in thousandths");
constexpr ParamDecl kFirst = integer("first", Stage::search, 64, 0, kMostRows,
                                     "tokens at the beginning that are always attended");
constexpr ParamDecl kNear = integer("near", Stage::search, 256, 0, kMostRows,
                                    "tokens before each query that are always attended");
constexpr ParamDecl kFrom =
    integer("from", Stage::search, 16384, 0, kMostRows, "tokens up to which attention is dense");
constexpr ParamDecl kSkip = integer(
    "skip", Stage::search, 0, 0, 64,
    "blocks are passed over whose weights are less than 2^-skip of the largest so far; 0: none");

constexpr std::array<std::string_view, 2> kBlockRows = {"64", "128"};
constexpr ParamDecl kBlock =
    choice("block", Stage::search, 0, kBlockRows, "tokens that are attended or not together");

constexpr std::array kDenseParams = {kSkip};
constexpr TypeDecl kDense = {"dense", "all that a query sees", kDenseParams};

constexpr std::array kAShapeParams = {
    integer("first", Stage::search, 1024, 0, kMostRows,
            "tokens at the beginning, in whole blocks of 64"),
    integer("near", Stage::search, 4096, 0, kMostRows,
            "tokens before each query, in whole blocks of 64"),
    kSkip,
};
constexpr TypeDecl kAShape = {"a-shape", "the first tokens and the newest ones", kAShapeParams};

// What `auto` stands for: bench/RESULTS.md has answers and times beside dense attention.
constexpr std::array kSampledParams = {
    integer("mass", Stage::search, 950, 0, 1000, "of the sampled queries' weight, in thousandths"),
    integer("stride", Stage::search, 16, 1, 128, "one query in so many is sampled"),
    integer("lookups", Stage::search, 50, 0, 1000,
            "query heads are dense that look up single tokens with more than so many thousandths "
            "of their weight"),
    kFirst,
    kNear,
    kFrom,
    kBlock,
    kSkip,
};
constexpr TypeDecl kSampled = {
    "sampled", "the blocks that hold the weight of some queries of each tile", kSampledParams};
// MInference's vertical-slash and block-sparse heads.
constexpr std::array kVerticalSlashParams = {
    integer("columns", Stage::search, 1024, 0, 16384, "tokens that all queries of a head attend"),
    integer("slashes", Stage::search, 1024, 0, 16384,
            "distances at which all queries of a head attend, in blocks of 64"),
    integer("queries", Stage::search, 64, 1, 64, "the last ones of a call, which choose both"),
    kFirst,
    kNear,
    kFrom,
    kSkip,
};
constexpr TypeDecl kVerticalSlash = {
    "vertical-slash", "the columns and diagonals that the last queries of a call attend most",
    kVerticalSlashParams};

constexpr std::array kPooledParams = {
    kMass,
    integer("blocks", Stage::search, 0, 0, 65535,
            "in place of the mass: so many blocks for each 128 queries; 0: the mass"),
    kFirst,
    kNear,
    kFrom,
    kBlock,
    kSkip,
};
constexpr TypeDecl kPooled = {"pooled", "blocks by the means of 64 queries and of 64 keys",
                              kPooledParams};

constexpr std::array kCodesParams = {
    integer(
        "blocks", Stage::search, 64, 3, 65535,
        "blocks of 256 tokens for each 128 query rows of a KV head, of which two are the newest"),
    kFrom,
    kSkip,
};
constexpr TypeDecl kCodes = {"codes",
                             "in sessions, over their codes on a device, the blocks whose mean "
                             "keys weigh most; elsewhere all",
                             kCodesParams};

constexpr TypeDecl kAuto = {"auto", "sampled, with its defaults", {}};

constexpr std::array<const TypeDecl*, 7> kTypes = {&kDense,  &kAShape, &kSampled, &kVerticalSlash,
                                                   &kPooled, &kCodes,  &kAuto};

/// The value of a parameter of the spec's type.
int64_t value_of(const index::Spec& spec, std::string_view name) {
  const auto params = spec.type().params;
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i].name == name) return spec[i];
  }
  throw Error(Status::internal, "a pattern without parameter " + std::string(name));
}

gpu::PromptPattern pattern_of(const index::Spec& spec) {
  const auto number = [&](std::string_view name) {
    return static_cast<uint32_t>(value_of(spec, name));
  };
  const auto per_mille = [&](std::string_view name) {
    return static_cast<float>(value_of(spec, name)) / kPerMille;
  };
  const TypeDecl* const type = &spec.type();
  gpu::PromptPattern p;
  p.dense = type == &kDense || type == &kCodes;
  p.skip = static_cast<float>(value_of(spec, "skip"));
  if (type == &kCodes) {
    p.coded_blocks = number("blocks");
    p.dense_rows = number("from");
  }
  if (p.dense) return p;
  p.first_rows = number("first");
  p.near_rows = number("near");
  if (type == &kAShape) return p;
  p.dense_rows = number("from");
  if (type == &kVerticalSlash) {
    p.choice = gpu::PromptChoice::vertical_slash;
    p.columns = number("columns");
    p.slashes = number("slashes");
    p.queries = number("queries");
    return p;
  }
  p.mass = per_mille("mass");
  p.block_rows = value_of(spec, "block") == 0 ? 64 : 128;
  if (type == &kSampled) {
    p.stride = number("stride");
    p.lookups = per_mille("lookups");
  } else {
    p.choice = gpu::PromptChoice::pooled;
    p.blocks = number("blocks");
  }
  return p;
}

}  // namespace

gpu::PromptPattern parse_prefill_pattern(std::string_view text) {
  const index::Spec spec = index::Spec::parse(text, kTypes);
  return pattern_of(&spec.type() == &kAuto ? index::Spec(kSampled) : spec);
}

std::vector<gpu::PromptPattern> parse_head_patterns(std::string_view text,
                                                    const ModelShape& model) {
  std::vector<gpu::PromptPattern> all(model.first_q_head(model.layers));
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
        if (entry.layer && entry.q_head && *entry.q_head >= model.of(*entry.layer).q_heads) {
          throw Error(Status::invalid_argument,
                      "q_head is " + std::to_string(*entry.q_head) + ", layer " +
                          std::to_string(*entry.layer) + " has 0.." +
                          std::to_string(model.of(*entry.layer).q_heads - 1));
        }
        for (uint32_t layer = 0; layer < model.layers; ++layer) {
          for (uint32_t h = 0; h < model.of(layer).q_heads; ++h) {
            if (entry.layer.value_or(layer) != layer || entry.q_head.value_or(h) != h) continue;
            all[model.first_q_head(layer) + h] = pattern;
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

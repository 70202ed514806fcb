#include "tools/llama/rope_config.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <string_view>

#include "runtime/files/json.h"
#include "tools/llama/config_fields.h"

namespace keyhole::tools {
namespace {

constexpr double kLargestTheta = 1e12;

uint32_t original_context(const Fields& fields, const Fields& root,
                          std::optional<uint32_t> fallback) {
  const char* const name = "original_max_position_embeddings";
  if (fields.find(name) == nullptr && root.find(name) != nullptr) return root.count(name, 1U << 31);
  return fields.count(name, 1U << 31, fallback);
}

void parse_llama3(const Fields& fields, const Fields& root, RopeScaling& scaling) {
  scaling.kind = RopeScaling::Kind::llama3;
  scaling.factor = fields.number("factor", 1e-3, 1e6);
  scaling.low_freq_factor = fields.number("low_freq_factor", 1e-6, 1e6);
  scaling.high_freq_factor = fields.number("high_freq_factor", 1e-6, 1e6);
  scaling.original_context = original_context(fields, root, {});
  if (scaling.high_freq_factor <= scaling.low_freq_factor) {
    fields.fail("high_freq_factor", shown(scaling.high_freq_factor),
                "more than low_freq_factor, which is " + shown(scaling.low_freq_factor));
  }
}

/// YaRN (arXiv:2309.00071): as transformers reads it, with the fields that DeepSeek added.
void parse_yarn(const Fields& fields, const Fields& root, uint32_t max_context,
                RopeScaling& scaling) {
  scaling.kind = RopeScaling::Kind::yarn;
  scaling.original_context = original_context(fields, root, max_context);
  scaling.factor = fields.number("factor", 1e-3, 1e6,
                                 static_cast<double>(max_context) / scaling.original_context);
  scaling.beta_fast = fields.number("beta_fast", 1e-6, 1e6, 32.0);
  scaling.beta_slow = fields.number("beta_slow", 1e-6, 1e6, 1.0);
  scaling.whole_pairs = fields.flag("truncate", true);
  if (scaling.beta_fast <= scaling.beta_slow) {
    fields.fail("beta_fast", shown(scaling.beta_fast),
                "more than beta_slow, which is " + shown(scaling.beta_slow));
  }
  const auto magnitude = [&](double mscale) {
    return scaling.factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(scaling.factor) + 1.0;
  };
  const double mscale = fields.number("mscale", 0.0, 1e6, 0.0);
  const double mscale_all = fields.number("mscale_all_dim", 0.0, 1e6, 0.0);
  const double inferred =
      mscale > 0.0 && mscale_all > 0.0 ? magnitude(mscale) / magnitude(mscale_all) : magnitude(1.0);
  scaling.attention_factor = fields.number("attention_factor", 1e-3, 1e3, inferred);
}

std::vector<double> pair_factors(const Fields& fields, const char* name, uint32_t pairs) {
  const nlohmann::json* list = fields.find(name);
  const std::string allowed = "a list of " + std::to_string(pairs) + " numbers above 0";
  if (list == nullptr) fields.fail(name, "missing", allowed);
  if (!list->is_array() || list->size() != pairs) fields.fail(name, list->dump(), allowed);
  std::vector<double> factors;
  for (const nlohmann::json& factor : *list) {
    if (!factor.is_number() || !(factor.get<double>() > 0.0))
      fields.fail(name, factor.dump(), allowed);
    factors.push_back(factor.get<double>());
  }
  return factors;
}

/// LongRoPE (arXiv:2402.13753), as Phi-3 has it.
void parse_longrope(const Fields& fields, const Fields& root, const RopeRules& rules, uint32_t dims,
                    RopeScaling& scaling) {
  for (const char* name : {"short_mscale", "long_mscale"}) {
    if (const auto* value = fields.find(name)) fields.fail(name, value->dump(), "no such field");
  }
  scaling.kind = RopeScaling::Kind::longrope;
  scaling.short_factors = pair_factors(fields, "short_factor", dims / 2);
  scaling.long_factors = pair_factors(fields, "long_factor", dims / 2);
  scaling.original_context = original_context(
      fields, root, rules.original_context != 0 ? rules.original_context : rules.max_context);
  scaling.factor = fields.number("factor", 1e-3, 1e6,
                                 static_cast<double>(rules.max_context) / scaling.original_context);
  const double inferred =
      scaling.factor <= 1.0
          ? 1.0
          : std::sqrt(1.0 + std::log(scaling.factor) / std::log(scaling.original_context));
  scaling.attention_factor = fields.number("attention_factor", 1e-3, 1e3, inferred);
}

RopeScaling parse_scaling(const Fields& fields, const Fields& root, const RopeRules& rules,
                          uint32_t dims) {
  // "type" is what files older than "rope_type" say.
  const std::string kind = fields.text("rope_type", fields.text("type", "default"));
  RopeScaling scaling;
  if (kind == "default") return scaling;
  if (kind == "longrope" || rules.only_longrope) {
    parse_longrope(fields, root, rules, dims, scaling);
  } else if (kind == "linear") {
    scaling.kind = RopeScaling::Kind::linear;
    scaling.factor = fields.number("factor", 1e-3, 1e6);
  } else if (kind == "llama3") {
    parse_llama3(fields, root, scaling);
  } else if (kind == "yarn") {
    parse_yarn(fields, root, rules.max_context, scaling);
  } else {
    fields.fail(
        "rope_type", '"' + kind + '"',
        "\"default\", \"linear\", \"llama3\", \"yarn\", \"longrope\" (others are not implemented)");
  }
  return scaling;
}

/// Adds the fields that no scaling of this kind reads, as transformers counts them.
void note_unread(const Fields& fields, RopeScaling::Kind kind, std::vector<std::string>& unread) {
  using Kind = RopeScaling::Kind;
  // "finetuned" says how a model was made.
  std::vector<std::string_view> read = {"rope_type",
                                        "type",
                                        "rope_theta",
                                        "partial_rotary_factor",
                                        "original_max_position_embeddings",
                                        "finetuned"};
  const auto add = [&](std::initializer_list<std::string_view> names) {
    read.insert(read.end(), names);
  };
  if (kind != Kind::none) add({"factor"});
  if (kind == Kind::llama3) add({"low_freq_factor", "high_freq_factor"});
  if (kind == Kind::yarn) add({"beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"});
  if (kind == Kind::longrope) add({"short_factor", "long_factor"});
  if (kind == Kind::yarn || kind == Kind::longrope) add({"attention_factor"});
  for (const std::string& name : fields.names()) {
    if (std::find(read.begin(), read.end(), name) != read.end()) continue;
    if (std::find(unread.begin(), unread.end(), name) == unread.end()) unread.push_back(name);
  }
}

RopeSettings parse_one(const Fields& fields, const Fields& root, const RopeRules& rules,
                       double theta, std::vector<std::string>& unread) {
  RopeSettings rope;
  rope.theta = fields.number("rope_theta", 1.0, kLargestTheta, theta);
  const double share = fields.number("partial_rotary_factor", 0.0, 1.0,
                                     root.number("partial_rotary_factor", 0.0, 1.0, 1.0));
  if (share != 1.0 && !rules.partial) fields.fail("partial_rotary_factor", shown(share), "1");
  rope.dims = static_cast<uint32_t>(rules.head_dim * share);
  if (rope.dims == 0 || rope.dims % 2 != 0) {
    fields.fail("partial_rotary_factor", shown(share),
                "an even number of the head's " + std::to_string(rules.head_dim) +
                    " components (RoPE turns pairs), but these are " + std::to_string(rope.dims));
  }
  rope.scaling = parse_scaling(fields, root, rules, rope.dims);
  note_unread(fields, rope.scaling.kind, unread);
  return rope;
}

}  // namespace

Ropes parse_ropes(const Fields& root, const RopeRules& rules) {
  const double theta = root.number("rope_theta", 1.0, kLargestTheta, rules.theta);
  const bool two = rules.sliding_theta > 0.0;
  const double sliding_theta =
      two ? root.number("rope_local_base_freq", 1.0, kLargestTheta, rules.sliding_theta) : theta;
  const nlohmann::json nothing = nlohmann::json::object();
  const Fields none(nothing, root.source());

  const std::optional<Fields> parameters = root.object("rope_parameters");
  if (parameters && (parameters->has("full_attention") || parameters->has("sliding_attention"))) {
    const std::optional<Fields> full = parameters->object("full_attention");
    const std::optional<Fields> sliding = parameters->object("sliding_attention");
    Ropes ropes;
    ropes.full = parse_one(full ? *full : none, root, rules, theta, ropes.unread);
    ropes.sliding = parse_one(sliding ? *sliding : none, root, rules, sliding_theta, ropes.unread);
    return ropes;
  }
  const std::optional<Fields> scaling = parameters ? parameters : root.object("rope_scaling");
  Ropes ropes;
  ropes.full = parse_one(scaling ? *scaling : none, root, rules, theta, ropes.unread);
  ropes.sliding = two ? parse_one(none, root, rules, sliding_theta, ropes.unread) : ropes.full;
  return ropes;
}

}  // namespace keyhole::tools

#include "tools/commands/plan/card_report.h"

#include <algorithm>
#include <string_view>

#include "tools/commands/plan/speed.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

uint64_t element_bytes(const keyhole_engine_config& engine) {
  return engine.kv_dtype == KEYHOLE_F32 ? sizeof(float) : sizeof(uint16_t);
}

/// Of K and V of one token and KV head, on the card.
uint64_t row_bytes(const CardQuestion& question) {
  return uint64_t{2} * question.engine.head_dim * element_bytes(question.engine);
}

CardLayer layer_of(const CardQuestion& question) {
  constexpr uint64_t kUsual = 640;
  CardLayer layer;
  layer.q_heads = question.engine.q_heads;
  layer.kv_heads = question.engine.kv_heads;
  layer.head_dim = question.engine.head_dim;
  layer.exact_rows = question.exact_rows;
  layer.row_bytes =
      question.int8_on_host ? uint64_t{2} * question.engine.head_dim : row_bytes(question);
  layer.kv_bytes = question.context * layer.kv_heads * row_bytes(question);
  layer.resident_bytes =
      (std::max(question.resident, kUsual) - kUsual) * layer.kv_heads * row_bytes(question);
  return layer;
}

CardEstimate sum_up(const CardQuestion& question, const std::string& index, bool fits,
                    double layer) {
  CardEstimate estimate{index, fits, "", layer, layer * question.full_layers, 0.0};
  if (question.weights != 0) {
    estimate.token = estimate.attention + seconds_of_weights(question.card, question.weights);
  }
  return estimate;
}

std::string share_text(double share) { return format_number(100.0 * share) + " %"; }

std::string rate(double bytes_a_second) {
  constexpr double kGb = 1e9;
  return format_number(bytes_a_second / kGb, 4) + " GB/s";
}

std::string assumptions(const CardQuestion& question) {
  constexpr double kMicro = 1e6;
  const CardShares shares;
  const double components = static_cast<double>(question.engine.q_heads) /
                            question.engine.kv_heads * question.engine.head_dim;
  std::string text =
      "taken for granted: copies within the card at " + share_text(shares.copies) +
      " of its bandwidth, codes of 4 and 2 bits at " + share_text(shares.codes_4) + " and " +
      share_text(shares.codes_2) + " of these, full attention at " + share_text(shares.full) +
      "; a layer " +
      format_number((shares.fixed + shares.fixed_per_component * components) * kMicro) +
      " us beside them, and " + std::to_string(question.exact_rows) +
      " rows of each KV head over the bus at " + rate(question.card.bus) + "; codes in lists at " +
      share_text(shares.lists) + " of copies, a KV head's mean keys at " +
      rate(shares.lists_scored) + ", a layer " +
      format_number((shares.lists_fixed + shares.lists_fixed_per_component * components) * kMicro) +
      " us beside them, 12 % of the lists' rows being read. ";
  text += question.weights == 0
              ? "Without --weights there is no time of a whole token. "
              : "Weights, " + format_bytes(question.weights) + " a token, at " +
                    share_text(shares.weights) +
                    " of copies, as products in 16 bits reach; 4-bit weights of other engines "
                    "reach less. ";
  if (question.engine.layers != question.full_layers) {
    text += std::to_string(question.engine.layers - question.full_layers) +
            " layers with a sliding window are not counted. ";
  }
  return text + "The shares were measured on an H100 and an H200.\n";
}

}  // namespace

CardEstimate estimate_codes(const CardQuestion& question, const std::string& index,
                            const keyhole_memory_plan& plan) {
  const auto none = [&](const char* why) {
    return CardEstimate{index, plan.fits != 0, why, 0.0, 0.0, 0.0};
  };
  if (plan.code_layers < question.full_layers || question.full_layers == 0) {
    return none("not all layers' codes are on the card");
  }
  if (plan.rows_by_host != 0) return none("rows that the host reads are not estimated");
  CardLayer layer = layer_of(question);
  layer.code_bytes = plan.code_bytes / plan.code_layers;
  const std::string_view spec = plan.index;
  if (spec.find("lists=") != std::string_view::npos) {
    // The plan's bytes are those of codes and lists, and a step reads a part of the lists.
    layer.code_bits = spec.find("k=2") != std::string_view::npos ? 2.0 : 4.0;
    constexpr double kFactorBytes = 6.0;  // of a row, with its part of a block's means
    const double of_row = layer.code_bits * layer.head_dim / 4.0 + kFactorBytes;
    layer.code_bytes =
        static_cast<uint64_t>(static_cast<double>(question.context) * layer.kv_heads * of_row);
    return sum_up(question, index, plan.fits != 0, seconds_of_lists(question.card, layer));
  }
  constexpr double kBitsOfByte = 8.0;
  const double components = 2.0 * static_cast<double>(question.context) * question.engine.kv_heads *
                            question.engine.head_dim;
  layer.code_bits = kBitsOfByte * static_cast<double>(layer.code_bytes) / components;
  return sum_up(question, index, plan.fits != 0, seconds_of_codes(question.card, layer));
}

CardEstimate estimate_full(const CardQuestion& question) {
  const CardLayer layer = layer_of(question);
  const bool fits = question.all_weights + question.full_layers * layer.kv_bytes <= question.memory;
  return sum_up(question, "full attention", fits, seconds_of_full(question.card, layer));
}

std::string card_text(const CardQuestion& question, const std::vector<CardEstimate>& estimates,
                      const Style& style) {
  Table table({{"estimate", Table::Align::left},
               {"attention of a layer"},
               {"of a token"},
               {"tokens/s"},
               {"of its speed without a context"}});
  for (const CardEstimate& e : estimates) {
    if (!e.why_not.empty()) {
      table.add_row({e.index + ": " + e.why_not, "-", "-", "-", "-"});
      continue;
    }
    const bool whole = e.token > 0.0;
    table.add_row({e.index + (e.fits ? "" : " (does not fit)"), format_duration(e.layer),
                   format_duration(e.attention), whole ? format_number(1.0 / e.token) : "-",
                   whole ? share_text((e.token - e.attention) / e.token) : "-"});
  }
  return question.card.name + ": " + format_bytes(question.card.memory) + " at " +
         rate(question.card.bandwidth) + "\n" + table.text(style) + assumptions(question);
}

ordered_json card_json(const CardQuestion& question, const std::vector<CardEstimate>& estimates) {
  const CardShares shares;
  ordered_json rows = ordered_json::array();
  for (const CardEstimate& e : estimates) {
    if (!e.why_not.empty()) {
      rows.push_back({{"index", e.index}, {"fits", e.fits}, {"why_not", e.why_not}});
      continue;
    }
    rows.push_back({{"index", e.index},
                    {"fits", e.fits},
                    {"layer_s", e.layer},
                    {"attention_s", e.attention},
                    {"token_s", e.token > 0.0 ? ordered_json(e.token) : ordered_json(nullptr)}});
  }
  return {{"card", question.card.name},
          {"memory", question.card.memory},
          {"bandwidth", question.card.bandwidth},
          {"bus", question.card.bus},
          {"weights_read", question.weights},
          {"exact_rows", question.exact_rows},
          {"shares",
           {{"copies", shares.copies},
            {"weights", shares.weights},
            {"full", shares.full},
            {"codes_4", shares.codes_4},
            {"codes_2", shares.codes_2},
            {"fixed_s", shares.fixed},
            {"fixed_per_component_s", shares.fixed_per_component},
            {"full_fixed_s", shares.full_fixed},
            {"lists", shares.lists},
            {"lists_scored", shares.lists_scored},
            {"lists_fixed_s", shares.lists_fixed},
            {"lists_fixed_per_component_s", shares.lists_fixed_per_component}}},
          {"estimates", rows}};
}

}  // namespace keyhole::tools

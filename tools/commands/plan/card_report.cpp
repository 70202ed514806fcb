#include "tools/commands/plan/card_report.h"

#include "tools/commands/plan/speed.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

uint64_t element_bytes(const keyhole_engine_config& engine) {
  return engine.kv_dtype == KEYHOLE_F32 ? sizeof(float) : sizeof(uint16_t);
}

/// Of K and V of one token and KV head.
uint64_t row_bytes(const CardQuestion& question) {
  return static_cast<uint64_t>(2.0 * question.engine.head_dim *
                               static_cast<double>(element_bytes(question.engine)) *
                               question.host_row_share);
}

AttentionShape shape_of(const CardQuestion& question) {
  AttentionShape shape;
  shape.q_heads = question.engine.q_heads;
  shape.kv_heads = question.engine.kv_heads;
  shape.head_dim = question.engine.head_dim;
  shape.exact_rows = question.exact_rows;
  shape.row_bytes = row_bytes(question);
  return shape;
}

CardEstimate sum_up(const CardQuestion& question, const std::string& index, double layer) {
  CardEstimate estimate{index, "", layer, layer * question.full_layers, 0.0};
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
      " rows of each KV head over the bus at " + rate(question.card.bus) + ". ";
  text += question.weights == 0
              ? "Without --weights there is no time of a whole token. "
              : "Weights, " + format_bytes(question.weights) + " a token, at " +
                    share_text(shares.weights) +
                    " of copies, as products in 16 bits reach; 4-bit weights of other engines "
                    "reach less. ";
  return text + "Measured on an H100 and an H200, not on this card.\n";
}

}  // namespace

CardEstimate estimate_codes(const CardQuestion& question, const std::string& index,
                            const keyhole_memory_plan& plan) {
  if (plan.code_layers < question.full_layers) {
    return {index, "not all layers' codes are on the card", 0.0, 0.0, 0.0};
  }
  AttentionShape shape = shape_of(question);
  shape.code_bytes = plan.code_bytes / plan.code_layers;
  constexpr double kBitsOfByte = 8.0;
  const double components = 2.0 * static_cast<double>(question.context) * question.engine.kv_heads *
                            question.engine.head_dim;
  shape.code_bits = kBitsOfByte * static_cast<double>(shape.code_bytes) / components;
  return sum_up(question, index, seconds_of_codes(question.card, shape));
}

CardEstimate estimate_full(const CardQuestion& question, uint64_t kv_bytes) {
  AttentionShape shape = shape_of(question);
  shape.kv_bytes = kv_bytes;
  const std::string name = question.weights + question.full_layers * kv_bytes > question.card.memory
                               ? "full attention (does not fit the card)"
                               : "full attention";
  return sum_up(question, name, seconds_of_full(question.card, shape));
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
    table.add_row({e.index, format_duration(e.layer), format_duration(e.attention),
                   whole ? format_number(1.0 / e.token) : "-",
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
      rows.push_back({{"index", e.index}, {"why_not", e.why_not}});
      continue;
    }
    rows.push_back({{"index", e.index},
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
            {"codes_2", shares.codes_2}}},
          {"estimates", rows}};
}

}  // namespace keyhole::tools

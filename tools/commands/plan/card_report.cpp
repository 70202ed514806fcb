#include "tools/commands/plan/card_report.h"

#include <algorithm>
#include <set>
#include <string>

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

/// What a pass over all codes reads: a plan counts their work space, too.
uint64_t code_bytes(const CardQuestion& question, const CardLayer& layer) {
  return static_cast<uint64_t>(static_cast<double>(question.context) * layer.kv_heads *
                               code_row_bytes(layer.code_bits, layer.head_dim));
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
  layer.code_bytes = code_bytes(question, layer);
  layer.resident_bytes =
      (std::max(question.resident, kUsual) - kUsual) * layer.kv_heads * row_bytes(question);
  return layer;
}

CardEstimate sum_up(const CardQuestion& question, const std::string& index, bool fits,
                    double layer) {
  CardEstimate estimate;
  estimate.index = index;
  estimate.fits = fits;
  estimate.layer = layer;
  estimate.attention = layer * question.full_layers;
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

/// Less than this of shared memory takes other ways of some shapes; GPUs for desktops have 99 KiB.
constexpr uint64_t kUsualShared = uint64_t{100} << 10U;

/// How often a step of one token reads the codes: in 99 KiB a thread block has 8 query heads of 512 components at most.
uint64_t passes_of(const CardQuestion& question) {
  constexpr uint32_t kHeadsOfPass = 8;
  const uint32_t group = question.engine.q_heads / question.engine.kv_heads;
  const bool divides =
      question.engine.head_dim > 256 && question.card.shared_bytes() < kUsualShared;
  return divides ? (group + kHeadsOfPass - 1) / kHeadsOfPass : 1;
}

/// Rows that are read exactly where budgets files say it: " (budgets.json: 64)"; empty where there is no file.
std::string rows_of_files(const std::vector<CardEstimate>& estimates) {
  std::string text;
  for (const CardEstimate& e : estimates) {
    if (!e.exact_rows) continue;
    text += (text.empty() ? " (" : ", ") + e.index + ": " + std::to_string(*e.exact_rows);
  }
  return text.empty() ? text : text + ")";
}

/// The shares that steps read of lists: "12 %", "10 % and 12 %".
std::string list_shares(const std::vector<CardEstimate>& estimates) {
  std::set<double> shares;
  for (const CardEstimate& e : estimates) {
    if (e.list_share > 0.0) shares.insert(e.list_share);
  }
  std::string text;
  for (const double share : shares) text += (text.empty() ? "" : " and ") + share_text(share);
  return text;
}

/// What is taken for granted of lists; empty where no estimate has some.
std::string of_lists(const Card& card, const CardLayer& shape,
                     const std::vector<CardEstimate>& estimates) {
  if (std::none_of(estimates.begin(), estimates.end(),
                   [](const CardEstimate& e) { return e.asks_for_lists; })) {
    return {};
  }
  constexpr double kMicro = 1e6;
  const uint32_t wanted = multiprocessors_of_lists(card, shape);
  if (is_too_small_for_lists(card, shape)) {
    return "; no codes in lists: they want " + std::to_string(wanted) +
           " multiprocessors on this card, 8 for each KV head, and it has " +
           std::to_string(card.multiprocessors) + ", so that all codes are read";
  }
  const std::string read = list_shares(estimates);
  if (read.empty()) return {};
  CardLayer of_4_bits = shape;
  of_4_bits.code_bits = 4.0;
  const uint32_t passes = passes_of_lists(card, of_4_bits);
  return "; of codes in lists " + read + " are read" +
         (passes > 1 ? ", with 4 bits " + std::to_string(passes) + " times" : std::string()) +
         ", more in heads that look at everything, and a KV head's mean keys at " +
         rate(rate_of_mean_keys(card, shape)) + ", a layer " +
         format_number(fixed_seconds_of_lists(card, shape) * kMicro) + " us beside them" +
         (wanted != 0 && card.multiprocessors == 0
              ? ", if the card has 8 multiprocessors for each KV head"
              : "");
}

std::string assumptions(const CardQuestion& question, const std::vector<CardEstimate>& estimates) {
  constexpr double kMicro = 1e6;
  const CardShares shares;
  const double components = static_cast<double>(question.engine.q_heads) /
                            question.engine.kv_heads * question.engine.head_dim;
  const uint32_t dim = question.engine.head_dim;
  std::string text =
      "taken for granted: copies within the card at " + share_text(shares.copies) +
      " of its bandwidth, full attention at " + share_text(shares.full) +
      " of these, codes of 4 and 2 bits at " + rate(rate_of_codes(question.card, 4.0, dim)) +
      " and " + rate(rate_of_codes(question.card, 2.0, dim)) + "; a layer " +
      format_number(fixed_seconds_of_codes(question.card, components) * kMicro) +
      " us beside them, and " + std::to_string(question.exact_rows) + " rows of each KV head" +
      rows_of_files(estimates) + " over the bus at " + rate(question.card.bus) +
      of_lists(question.card, layer_of(question), estimates) + ". ";
  text += question.weights == 0
              ? "Without --weights there is no time of a whole token. "
              : "Weights, " + format_bytes(question.weights) + " a token, at " +
                    share_text(shares.weights) +
                    " of copies, as products in 16 bits reach; 4-bit weights of other engines "
                    "reach less. ";
  if (passes_of(question) > 1) {
    text += "In " + std::to_string(question.card.shared_bytes() >> 10U) +
            " KiB of shared memory codes are read " + std::to_string(passes_of(question)) +
            " times, for 8 query heads of a KV head each. ";
  }
  if (question.engine.layers != question.full_layers) {
    text += std::to_string(question.engine.layers - question.full_layers) +
            " layers with a sliding window are not counted. ";
  }
  return text + "The shares were measured on an H100 and an H200.\n";
}

}  // namespace

CardEstimate estimate_codes(const CardQuestion& question, const std::string& index,
                            const keyhole_memory_plan& plan, const CardCodes& codes) {
  const auto none = [&](const std::string& why) {
    CardEstimate estimate;
    estimate.index = index;
    estimate.fits = plan.fits != 0;
    estimate.why_not = why;
    return estimate;
  };
  if (!codes.any) return none("no codes, by which the card would attend");
  if (plan.code_layers < question.full_layers || question.full_layers == 0) {
    return none("not all layers' codes are on the card");
  }
  if (plan.rows_by_host != 0) return none("rows that the host reads are not estimated");
  CardLayer layer = layer_of(question);
  layer.code_bits = codes.bits;
  layer.exact_rows = codes.exact_rows.value_or(question.exact_rows);
  layer.list_rows = codes.list_rows;
  layer.list_share = codes.list_share;
  layer.code_bytes = passes_of(question) * code_bytes(question, layer);
  CardEstimate estimate = sum_up(question, index, plan.fits != 0,
                                 codes.lists ? seconds_of_lists(question.card, layer)
                                             : seconds_of_codes(question.card, layer));
  estimate.exact_rows = codes.exact_rows;
  estimate.lists_lack_room = codes.lists_lack_room;
  estimate.asks_for_lists = codes.list_rows != 0;
  if (codes.lists) estimate.list_share = codes.list_share;
  return estimate;
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
    table.add_row(
        {e.index + (e.fits ? e.lists_lack_room ? " (lists do not fit)" : "" : " (does not fit)"),
         format_duration(e.layer), format_duration(e.attention),
         whole ? format_number(1.0 / e.token) : "-",
         whole ? share_text((e.token - e.attention) / e.token) : "-"});
  }
  return question.card.name + ": " + format_bytes(question.card.memory) + " at " +
         rate(question.card.bandwidth) + "\n" + table.text(style) +
         assumptions(question, estimates);
}

ordered_json card_json(const CardQuestion& question, const std::vector<CardEstimate>& estimates) {
  const CardShares shares;
  ordered_json rows = ordered_json::array();
  for (const CardEstimate& e : estimates) {
    if (!e.why_not.empty()) {
      rows.push_back({{"index", e.index}, {"fits", e.fits}, {"why_not", e.why_not}});
      continue;
    }
    rows.push_back(
        {{"index", e.index},
         {"fits", e.fits},
         {"layer_s", e.layer},
         {"attention_s", e.attention},
         {"exact_rows", e.exact_rows.value_or(question.exact_rows)},
         {"list_share", e.list_share > 0.0 ? ordered_json(e.list_share) : ordered_json(nullptr)},
         {"token_s", e.token > 0.0 ? ordered_json(e.token) : ordered_json(nullptr)}});
  }
  return {{"card", question.card.name},
          {"memory", question.card.memory},
          {"bandwidth", question.card.bandwidth},
          {"bus", question.card.bus},
          {"compute_capability", question.card.capability()},
          {"shared_memory", question.card.shared_bytes()},
          {"multiprocessors", question.card.multiprocessors != 0
                                  ? ordered_json(question.card.multiprocessors)
                                  : ordered_json(nullptr)},
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
            {"single_per_component_s", shares.single_per_component},
            {"full_fixed_s", shares.full_fixed},
            {"others_4", shares.others_4},
            {"others_2", shares.others_2},
            {"wide_4", shares.wide_4},
            {"wide_2", shares.wide_2},
            {"lists_scored", shares.lists_scored},
            {"lists_fixed_s", shares.lists_fixed},
            {"lists_fixed_per_component_s", shares.lists_fixed_per_component},
            {"lone_lists_fixed_s", shares.lone_lists_fixed},
            {"lone_lists_fixed_per_component_s", shares.lone_lists_fixed_per_component},
            {"grid_lists_scored", shares.grid_lists_scored}}},
          {"estimates", rows}};
}

}  // namespace keyhole::tools

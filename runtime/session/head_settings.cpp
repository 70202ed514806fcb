#include "runtime/session/head_settings.h"

#include <algorithm>

#include "index/types/factory.h"
#include "runtime/plan/auto_index.h"

namespace keyhole::runtime {
namespace {

uint32_t largest_top_k(const std::vector<Budget>& budgets) {
  uint32_t top_k = 0;
  for (const Budget& budget : budgets) top_k = std::max(top_k, budget.top_k);
  return top_k;
}

}  // namespace

template <class Check>
void HeadSettings::check_heads(const std::vector<Budget>& budgets, const Check& check) const {
  const HeadNumbers& numbers = keeper_->numbers();
  for (size_t i = 0; i < budgets.size(); ++i) {
    try {
      check(budgets[i]);
    } catch (const Error& e) {
      const uint32_t layer = numbers.layer_of(i);
      throw Error(e.status(), "layer " + std::to_string(layer) + ", KV head " +
                                  std::to_string(i - numbers.at(layer, 0)) + ": " + e.what());
    }
  }
}

void HeadSettings::check_budgets(const Settings& settings) const {
  check_heads(settings.heads, [](const Budget& budget) { (void)check_budget(budget); });
  (void)check_budget(settings.common);
}

void HeadSettings::set_index(const std::string& wanted) {
  if (wanted != kExactIndex) return set_type(wanted);
  const keyhole_mode before = params_->mode;
  params_->mode = KEYHOLE_MODE_EXACT;
  try {
    steps_->reserve(false);
    set_type(std::string(kExactType));
  } catch (...) {
    params_->mode = before;
    codes_->place_again();
    throw;
  }
  if (before != KEYHOLE_MODE_EXACT) stream_->invalidate_graphs();
}

void HeadSettings::set_type(const std::string& wanted) {
  std::string spec = wanted;
  Budget common = params_->budget;
  resolve_auto(spec, common, *params_, engine_->model(), codes_->room_of_all());
  check_index(spec);
  check_undone(spec, engine_->model().has_rope);
  // Budgets that were left to the index type are those of the new one; so are those that it cannot have. The others get
  // what "auto" gives to the budget of a config.
  const bool has_codes = index::has_codes(spec);
  const auto with = [&](const Budget& budget) {
    const Budget kept = budget.reads_codes() && !has_codes ? Budget() : budget;
    return completed(has_codes && wanted == kAutoIndex ? with_code_tail(kept) : kept, spec);
  };
  std::vector<Budget> budgets;
  std::vector<HeadParams> heads;
  for (const HeadIndex& h : keeper_->heads()) {
    budgets.push_back(with(h.params.budget));
    heads.push_back(h.params);
    heads.back().index = spec;
    heads.back().budget = budgets.back();
  }
  if (has_codes && wanted == kAutoIndex) {
    check_heads(budgets, [&](const Budget& budget) { check_code_tail(budget, spec); });
  }
  std::vector<const HeadParams*> planned;
  for (const HeadParams& head : heads) planned.push_back(&head);
  common = with(params_->budget);
  audits_->reserve(largest_top_k(budgets));
  try {
    codes_->plan(planned);
    keeper_->set_index(spec);
  } catch (...) {
    codes_->place_again();
    throw;
  }
  // From here on nothing can fail.
  for (size_t i = 0; i < budgets.size(); ++i) (void)keeper_->set_budget(i, budgets[i]);
  params_->index = std::move(spec);
  params_->budget = common;
  codes_->place();
  for (size_t i = 0; i < keeper_->heads().size(); ++i) audits_->reset_widening(i);
}

HeadSettings::Settings HeadSettings::settings() const {
  Settings now{params_->mode, params_->budget, {}};
  for (const HeadIndex& h : keeper_->heads()) now.heads.push_back(h.params.budget);
  return now;
}

void HeadSettings::change(const Settings& settings, bool anew) {
  const Settings before = this->settings();
  const auto put = [this](const Settings& s) {
    params_->mode = s.mode;
    params_->budget = s.common;
    for (size_t i = 0; i < s.heads.size(); ++i) (void)keeper_->set_budget(i, s.heads[i]);
  };
  audits_->reserve(largest_top_k(settings.heads));
  put(settings);
  try {
    steps_->reserve(anew);
  } catch (...) {
    put(before);
    codes_->place_again();
    throw;
  }
  if (settings.mode != before.mode) stream_->invalidate_graphs();
  for (size_t i = 0; i < settings.heads.size(); ++i) {
    if (settings.heads[i] == before.heads[i]) continue;
    audits_->reset_widening(i);
  }
}

void HeadSettings::set_mode(keyhole_mode mode, uint32_t top_k) {
  check_mode(mode);
  if (top_k > params_->max_tokens) {
    throw Error(Status::invalid_argument, "top_k is " + std::to_string(top_k) + ", allowed: 1.." +
                                              std::to_string(params_->max_tokens) +
                                              " (max_tokens), or 0 to keep it");
  }
  Settings next = settings();
  next.mode = mode;
  if (top_k != 0) {
    next.common.top_k = top_k;
    for (Budget& budget : next.heads) budget.top_k = top_k;
  }
  check_budgets(next);
  change(next, false);
}

void HeadSettings::set_attend(keyhole_attend_mode attend, float min_weight) {
  check_attend(attend);
  Settings next = settings();
  next.common.min_weight = check_min_weight(min_weight, next.common.min_weight);
  bool other = next.common.attend != attend;
  next.common.attend = attend;
  for (Budget& budget : next.heads) {
    if (min_weight != 0.0F) budget.min_weight = min_weight;
    other = other || budget.attend != attend;
    budget.attend = attend;
  }
  check_budgets(next);
  change(next, other);  // scratch of another shape
}

std::vector<size_t> HeadSettings::named_heads(uint32_t layer, uint32_t kv_head) const {
  const ModelShape& m = engine_->model();
  const auto check = [](const char* field, uint32_t value, uint32_t end) {
    if (value == KEYHOLE_ALL || value < end) return;
    throw Error(Status::invalid_argument, std::string(field) + " is " + std::to_string(value) +
                                              ", allowed: 0.." + std::to_string(end - 1) +
                                              " or KEYHOLE_ALL");
  };
  check("layer", layer, m.layers);
  check("kv_head", kv_head, layer == KEYHOLE_ALL ? m.largest().kv_heads : m.of(layer).kv_heads);
  std::vector<size_t> out;
  for (uint32_t l = layer == KEYHOLE_ALL ? 0 : layer; l < m.layers; ++l) {
    for (uint32_t h = kv_head == KEYHOLE_ALL ? 0 : kv_head; h < m.of(l).kv_heads; ++h) {
      out.push_back(keeper_->numbers().at(l, h));
      if (kv_head != KEYHOLE_ALL) break;
    }
    if (layer != KEYHOLE_ALL) break;
  }
  return out;
}

void HeadSettings::set_budget(uint32_t layer, uint32_t kv_head, const Budget& budget) {
  const std::vector<size_t> named = named_heads(layer, kv_head);
  for (const size_t i : named) check_codes(budget, keeper_->heads()[i].params.index);
  Settings next = settings();
  // A budgets file may give all heads codes, and the session's own index have none: then its own budget, which none of
  // them has, stays one that goes with that index.
  const bool goes_with_index = !budget.reads_codes() || index::has_codes(params_->index);
  if (layer == KEYHOLE_ALL && kv_head == KEYHOLE_ALL && goes_with_index) next.common = budget;
  bool other = false;
  for (const size_t i : named) {
    other = other || next.heads[i].attend != budget.attend;
    next.heads[i] = budget;
  }
  change(next, other);
}

Budget HeadSettings::budget(uint32_t layer, uint32_t kv_head) const {
  const std::vector<size_t> named = named_heads(layer, kv_head);
  const Budget& first = keeper_->heads()[named.front()].params.budget;
  for (const size_t i : named) {
    if (keeper_->heads()[i].params.budget == first) continue;
    throw Error(Status::invalid_argument,
                "the heads that KEYHOLE_ALL names have different budgets: ask for one of them");
  }
  return first;
}

}  // namespace keyhole::runtime

// Settings that a session changes while it lives: index, mode, what is attended, budgets of heads;
// and the memory that searches with them need.
#include <algorithm>
#include <bit>
#include <string>

#include "index/types/factory.h"
#include "runtime/plan/auto_index.h"
#include "runtime/session/session.h"

namespace keyhole::runtime {
namespace {

uint32_t largest_top_k(const std::vector<Budget>& budgets) {
  uint32_t top_k = 0;
  for (const Budget& budget : budgets) top_k = std::max(top_k, budget.top_k);
  return top_k;
}

}  // namespace

void Session::set_index(const std::string& wanted) {
  CodeRoom room = engine_->code_room(params_.device_memory_limit);
  if (room && codes_ != nullptr) {
    room = [this](const gpu::ResidentShape& shape) { return code_room(shape, codes_->bytes()); };
  }
  std::string spec = wanted;
  Budget common = params_.budget;
  resolve_auto(spec, common, params_, engine_->model(), room);
  index::check_spec(spec);
  // Budgets that were left to the index type are those of the new one; so are those that it cannot have. The others get
  // what "auto" gives to the budget of a config.
  const bool has_codes = index::has_codes(spec);
  const auto with = [&](const Budget& budget) {
    const Budget kept = budget.reads_codes() && !has_codes ? Budget() : budget;
    return completed(has_codes && wanted == kAutoIndex ? with_code_tail(kept) : kept, spec);
  };
  std::vector<Budget> budgets;
  std::vector<HeadParams> heads;
  for (const HeadIndex& h : keeper_.heads()) {
    budgets.push_back(with(h.params.budget));
    heads.push_back(h.params);
    heads.back().index = spec;
    heads.back().budget = budgets.back();
  }
  std::vector<const HeadParams*> planned;
  for (const HeadParams& head : heads) planned.push_back(&head);
  common = with(params_.budget);
  audits_.reserve(largest_top_k(budgets));
  try {
    if (codes_ != nullptr) codes_->plan(planned);
    keeper_.set_index(spec);
  } catch (...) {
    place_codes_again();
    throw;
  }
  // From here on nothing can fail.
  for (size_t i = 0; i < budgets.size(); ++i) (void)keeper_.set_budget(i, budgets[i]);
  params_.index = std::move(spec);
  params_.budget = common;
  place_codes();
  for (size_t i = 0; i < keeper_.heads().size(); ++i) audits_.reset_widening(i);
}

Session::Settings Session::settings() const {
  Settings now{params_.mode, params_.budget, {}};
  for (const HeadIndex& h : keeper_.heads()) now.heads.push_back(h.params.budget);
  return now;
}

void Session::change(const Settings& settings, bool anew) {
  const Settings before = this->settings();
  const auto put = [this](const Settings& s) {
    params_.mode = s.mode;
    params_.budget = s.common;
    for (size_t i = 0; i < s.heads.size(); ++i) (void)keeper_.set_budget(i, s.heads[i]);
  };
  audits_.reserve(largest_top_k(settings.heads));
  put(settings);
  try {
    reserve_searches(anew);
  } catch (...) {
    put(before);
    place_codes_again();
    throw;
  }
  if (settings.mode != before.mode && stream_ != nullptr) stream_->invalidate_graphs();
  for (size_t i = 0; i < settings.heads.size(); ++i) {
    if (settings.heads[i] == before.heads[i]) continue;
    audits_.reset_widening(i);
  }
}

void Session::set_mode(keyhole_mode mode, uint32_t top_k) {
  check_mode(mode);
  if (top_k > params_.max_tokens) {
    throw Error(Status::invalid_argument, "top_k is " + std::to_string(top_k) + ", allowed: 1.." +
                                              std::to_string(params_.max_tokens) +
                                              " (max_tokens), or 0 to keep it");
  }
  Settings next = settings();
  next.mode = mode;
  if (top_k != 0) {
    next.common.top_k = top_k;
    for (Budget& budget : next.heads) budget.top_k = top_k;
  }
  change(next, false);
}

void Session::set_attend(keyhole_attend_mode attend, float min_weight) {
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
  change(next, other);  // scratch of another shape
}

std::vector<size_t> Session::named_heads(uint32_t layer, uint32_t kv_head) const {
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
      out.push_back(keeper_.numbers().at(l, h));
      if (kv_head != KEYHOLE_ALL) break;
    }
    if (layer != KEYHOLE_ALL) break;
  }
  return out;
}

void Session::set_budget(uint32_t layer, uint32_t kv_head, const Budget& budget) {
  const std::vector<size_t> named = named_heads(layer, kv_head);
  for (const size_t i : named) check_codes(budget, keeper_.heads()[i].params.index);
  Settings next = settings();
  if (layer == KEYHOLE_ALL && kv_head == KEYHOLE_ALL) next.common = budget;
  bool other = false;
  for (const size_t i : named) {
    other = other || next.heads[i].attend != budget.attend;
    next.heads[i] = budget;
  }
  change(next, other);
}

Budget Session::budget(uint32_t layer, uint32_t kv_head) const {
  const std::vector<size_t> named = named_heads(layer, kv_head);
  const Budget& first = keeper_.heads()[named.front()].params.budget;
  for (const size_t i : named) {
    if (keeper_.heads()[i].params.budget == first) continue;
    throw Error(Status::invalid_argument,
                "the heads that KEYHOLE_ALL names have different budgets: ask for one of them");
  }
  return first;
}

void Session::reserve_searches(bool anew) {
  place_codes();  // budgets may have changed
  host_bytes_peak_ = std::max(host_bytes_peak_, host_bytes());
  // Of each spec, and dimension of keys, the largest index: another one's scratch is not always large enough for it. Of its
  // trees the one with most rows and the one with most partitions: a tree that has grown in many small blocks has more of
  // them.
  std::vector<Selection::Use> uses;
  std::vector<const std::string*> specs;
  std::vector<const index::TailTree*> finest;  // [specs]
  const auto partitions = [](const index::TailTree* tree) {
    return tree == nullptr ? 0 : tree->coarse().count() + tree->fine().count();
  };
  uint32_t needed = 0;
  uint32_t k = 0;
  uint32_t code_rows = 0;  // that a token's step over codes reads exactly
  for (size_t i = 0; i < keeper_.heads().size(); ++i) {
    const HeadIndex& h = keeper_.heads()[i];
    if (h.indexed() == 0) continue;
    const Budget& budget = h.params.budget;
    const uint32_t top_k = audits_.widened_top_k(i, budget.top_k);
    needed = std::max(needed, std::min(top_k, h.indexed()));
    // For what the index will hold soon, so that a k which covers everything does not allocate at
    // every block.
    k = std::max(k, std::min(top_k, std::bit_ceil(h.indexed())));
    if (budget.reads_codes())
      code_rows = std::max(code_rows, std::min(top_k, index::kMostExactRows));
    size_t at = 0;
    while (at < specs.size() &&
           (*specs[at] != h.params.index || uses[at].index->dim() != h.index->dim())) {
      ++at;
    }
    if (at == specs.size()) {
      specs.push_back(&h.params.index);
      finest.push_back(h.full_tail());
      uses.push_back({h.index.get(), budget.attend, h.full_tail(),
                      budget.reads_codes() ? index::CodedRows::of(*h.index) : index::CodedRows()});
      continue;
    }
    if (budget.reads_codes()) uses[at].codes = index::CodedRows::of(*h.index);
    if (h.indexed() > uses[at].index->count()) uses[at].index = h.index.get();
    const index::TailTree* tail = h.full_tail();
    if (tail != nullptr && (uses[at].tail == nullptr || tail->count() > uses[at].tail->count())) {
      uses[at].tail = tail;
    }
    if (partitions(tail) > partitions(finest[at])) finest[at] = tail;
    if (uses[at].attend == KEYHOLE_ATTEND_TOPK || uses[at].attend == KEYHOLE_ATTEND_NONE)
      uses[at].attend = budget.attend;
  }
  if (uses.empty()) return;
  for (size_t at = 0; at < specs.size(); ++at) {
    if (finest[at] == uses[at].tail) continue;
    Selection::Use use = uses[at];
    use.tail = finest[at];
    uses.push_back(use);
  }
  const auto reserve = [anew](DecodeStep& step, std::span<const Selection::Use> of, uint32_t least,
                              uint32_t most) {
    const bool has_all =
        std::all_of(of.begin(), of.end(), [&](const Selection::Use& u) { return step.fits(u); });
    if (anew || !has_all || step.capacity_k() < least) step.reserve(of, most);
  };
  reserve(step_, uses, needed, k);
  if (joint_step_ != nullptr) {
    std::erase_if(uses, [](const Selection::Use& u) {
      return !u.index->finds_per_head() || u.tail != nullptr;
    });
    const uint32_t rows = std::min(code_rows * joint_step_->most_tokens(), index::kMostExactRows);
    try {
      reserve(*joint_step_, uses, std::max(needed, rows), std::max(k, rows));
    } catch (const std::bad_alloc&) {
      joint_step_.reset();  // one token at a time needs none of it
    }
  }
  count_step_bytes();
}

}  // namespace keyhole::runtime

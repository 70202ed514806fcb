#include "runtime/session/host_steps.h"

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "runtime/plan/planner.h"

namespace keyhole::runtime {

HostSteps::HostSteps(const Engine& engine, const SessionParams& params, Sequence& sequence,
                     const IndexKeeper& keeper, const SessionAudits& audits, CodePlacement& codes,
                     HostMemory& memory)
    : engine_(&engine),
      params_(&params),
      sequence_(&sequence),
      keeper_(&keeper),
      audits_(&audits),
      codes_(&codes),
      memory_(&memory),
      one_(engine),
      bytes_(one_.bytes()) {}

DecodeStep* HostSteps::joint(uint32_t layer) {
  const LayerShape shape = engine_->model().of(layer);
  // An audit's record is of one token.
  if (kJointHeads / shape.group() < 2 || audits_->on()) return nullptr;
  // The window of a sliding layer moves on from token to token.
  if (sequence_->layer(layer).reach() != 0) return nullptr;
  if (sequence_->resident().contiguous_rows(layer, 0).keys.data == nullptr) return nullptr;
  for (uint32_t h = 0; h < shape.kv_heads && params_->mode == KEYHOLE_MODE_INDEXED; ++h) {
    const HeadIndex& head = keeper_->head(layer, h);
    if (keeper_->is_dense(layer, h) || head.index == nullptr) continue;
    // A target is met, and partitions are chosen, for the heads of a group together.
    if (!head.index->finds_per_head() || head.params.budget.needs_partitions()) return nullptr;
  }
  if (joint_ != nullptr) return joint_.get();
  try {
    joint_ = std::make_unique<DecodeStep>(*engine_, DecodeStep::Tokens::several);
    reserve(false);
    count_bytes();
    memory_->check(0, "several tokens in one step");
  } catch (const std::exception&) {
    joint_.reset();
    count_bytes();
  }
  return joint_.get();
}

void HostSteps::share_pass(uint32_t layer, std::span<DecodeStep* const> steps,
                           const CommonPass::CommonRows& common_rows) {
  try {
    if (common_pass_ == nullptr) common_pass_ = std::make_unique<CommonPass>(*engine_);
    common_pass_->run(layer, steps, common_rows);
    count_bytes();
    memory_->check(0, "what copies have in common");
  } catch (const std::exception&) {
    // Each does all by itself, where it was not done.
    common_pass_.reset();
    count_bytes();
  }
}

// ---- Memory for searches -------------------------------------------------------------------------

uint64_t HostSteps::first_search_bytes() const {
  // Counted when the first index begins: a step that asks must not allocate.
  if (one_.capacity_k() != 0) return 0;
  if (keeper_->has_first_under_way() && promised_search_bytes_ != 0) return promised_search_bytes_;
  SessionParams with_heads = *params_;
  for (const HeadParams* head : keeper_->head_params()) with_heads.heads.push_back(*head);
  uint32_t rows = 0;
  for (uint32_t l = 0; l < engine_->model().layers; ++l) {
    rows = std::max(rows, sequence_->rows(l));
  }
  promised_search_bytes_ =
      estimate_search_bytes(engine_->model(), with_heads, rows, engine_->pool().threads());
  return promised_search_bytes_;
}

void HostSteps::try_to_reserve(uint32_t layer, const char* for_what) {
  try {
    reserve(false);
  } catch (const std::exception& e) {
    engine_->log()(KEYHOLE_LOG_WARNING,
                   "layer " + std::to_string(layer) + ": " + for_what + ": " + e.what());
  }
}

void HostSteps::reserve(bool anew) {
  codes_->place();  // budgets may have changed
  memory_->note_peak();
  // Of each spec, and dimension of keys, the largest index: another one's scratch is not always large enough for it. Of
  // its trees the one with most rows and the one with most partitions: a tree that has grown in many small blocks has
  // more of them.
  std::vector<Selection::Use> uses;
  std::vector<const std::string*> specs;
  std::vector<const index::TailTree*> finest;  // [specs]
  const auto partitions = [](const index::TailTree* tree) {
    return tree == nullptr ? 0 : tree->coarse().count() + tree->fine().count();
  };
  uint32_t needed = 0;
  uint32_t k = 0;
  uint32_t code_rows = 0;  // that a token's step over codes reads exactly
  for (size_t i = 0; i < keeper_->heads().size(); ++i) {
    const HeadIndex& h = keeper_->heads()[i];
    if (h.indexed() == 0) continue;
    const Budget& budget = h.params.budget;
    const uint32_t top_k = audits_->widened_top_k(i, budget.top_k);
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
  reserve(one_, uses, needed, k);
  if (joint_ != nullptr) {
    std::erase_if(uses, [](const Selection::Use& u) {
      return !u.index->finds_per_head() || u.tail != nullptr;
    });
    const uint32_t rows = std::min(code_rows * joint_->most_tokens(), index::kMostExactRows);
    try {
      reserve(*joint_, uses, std::max(needed, rows), std::max(k, rows));
    } catch (const std::bad_alloc&) {
      joint_.reset();  // one token at a time needs none of it
    }
  }
  count_bytes();
}

}  // namespace keyhole::runtime

#include "runtime/plan/budget_file.h"

#include <algorithm>

#include "index/types/factory.h"
#include "runtime/files/mapped_file.h"

namespace keyhole::runtime {
namespace {

void check_shape(const BudgetsFile& file, const ModelShape& model) {
  const auto check = [](const char* field, uint32_t seen, uint32_t needed) {
    if (seen == needed) return;
    throw Error(Status::invalid_argument, std::string("it is of a model with ") + field + " " +
                                              std::to_string(seen) + ", the engine has " +
                                              std::to_string(needed));
  };
  // Sliding layers have no budgets: a file may leave out those at the end.
  uint32_t layers = model.layers;
  while (layers > file.layers && model.slides(layers - 1)) --layers;
  check("layers", file.layers, layers == file.layers ? layers : model.layers);
  const LayerShape most = model.largest();
  check("q_heads", file.q_heads, most.q_heads);
  check("kv_heads", file.kv_heads, most.kv_heads);
  check("head_dim", file.head_dim, most.head_dim);
}

void apply(const BudgetsFile::Entry& entry, HeadParams& head) {
  keyhole_budget budget = head.budget;
  entry.budget.apply_to(budget);
  head.budget = check_budget(budget);
  if (entry.index) head.index = *entry.index;
  if (entry.dense) head.dense = *entry.dense;
}

std::vector<HeadParams> heads_of(const BudgetsFile& file, const ModelShape& model,
                                 const SessionParams& params) {
  const HeadNumbers numbers = model.head_numbers();
  std::vector<HeadParams> heads(numbers.count(), HeadParams{params.index, params.budget});
  std::vector<char> named(heads.size());   // [head] some entry names a field of its budget,
  std::vector<char> tailed(heads.size());  // and its tail
  for (size_t i = 0; i < file.heads.size(); ++i) {
    const BudgetsFile::Entry& entry = file.heads[i];
    if (entry.pattern) continue;  // of prompts
    try {
      if (entry.index) index::check_spec(*entry.index);
      const uint32_t first_layer = entry.layer.value_or(0);
      const uint32_t end_layer = entry.layer ? first_layer + 1 : model.layers;
      const uint32_t first_head = entry.kv_head.value_or(0);
      if (entry.layer && first_head >= numbers.of(first_layer)) {
        throw Error(Status::invalid_argument, "kv_head is " + std::to_string(first_head) +
                                                  ", layer " + std::to_string(first_layer) +
                                                  " has 0.." +
                                                  std::to_string(numbers.of(first_layer) - 1));
      }
      for (uint32_t layer = first_layer; layer < end_layer; ++layer) {
        // An entry of all layers is of those that have the head.
        const uint32_t end_head = entry.kv_head ? first_head + 1 : numbers.of(layer);
        for (uint32_t h = first_head; h < std::min(end_head, numbers.of(layer)); ++h) {
          const size_t head = numbers.at(layer, h);
          apply(entry, heads[head]);
          if (!entry.budget.empty()) named[head] = 1;
          if (entry.budget.get(&keyhole_budget::tail)) tailed[head] = 1;
        }
      }
    } catch (const Error& e) {
      throw Error(e.status(), "heads[" + std::to_string(i) + "]: " + e.what());
    }
  }
  // What an entry names is meant, also where it is as an init function leaves it. A head with an index without codes
  // has no tail of codes if no entry names one: it is that of the session's own index.
  for (size_t head = 0; head < heads.size(); ++head) {
    HeadParams& h = heads[head];
    if (tailed[head] == 0 && h.budget.reads_codes() && !index::has_codes(h.index)) {
      h.budget = h.budget == default_for_codes() ? Budget() : h.budget;
      h.budget.tail = KEYHOLE_TAIL_NONE;
    }
    if (named[head] == 0) h.budget = completed(h.budget, h.index);
    check_codes(h.budget, h.index);
  }
  return heads;
}

}  // namespace

void with_budgets(const std::string& path, const ModelShape& model,
                  const std::function<void(const BudgetsFile&)>& use) {
  try {
    const BudgetsFile file = read_budgets(path);
    try {
      check_shape(file, model);
      use(file);
    } catch (const Error& e) {
      throw Error(e.status(), path + ": " + e.what());
    }
  } catch (const CannotRead& e) {
    throw Error(Status::io, e.what());
  } catch (const AnotherFormat& e) {
    throw Error(Status::version, e.what());
  } catch (const Error&) {
    throw;
  } catch (const std::runtime_error& e) {
    throw Error(Status::corrupt, e.what());
  }
}

void apply_budgets(const std::string& path, const ModelShape& model, SessionParams& params) {
  with_budgets(path, model, [&](const BudgetsFile& file) {
    params.heads = heads_of(file, model, params);
    if (file.tail_partition) params.tail_partition = *file.tail_partition;
    params.budgets = path;
  });
}

}  // namespace keyhole::runtime

#include "tools/commands/plan/budgets_codes.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <utility>
#include <vector>

#include "tools/commands/common/budget_choice.h"
#include "tools/terminal/json.h"

namespace keyhole::tools {
namespace {

/// What the file says of one KV head.
struct HeadOfFile {
  std::string index;
  keyhole_budget budget{};
  bool has_budget = false;
  bool dense = false;

  [[nodiscard]] bool has_codes() const {
    return !dense && tools::has_codes(index) && (!has_budget || budget.tail == KEYHOLE_TAIL_CODES);
  }
};

/// `[layers, kv_heads]`
std::vector<HeadOfFile> heads_of_file(const BudgetsFile& file, const std::string& others) {
  HeadOfFile first;
  first.index = others;
  keyhole_budget_init(&first.budget);
  std::vector<HeadOfFile> heads(size_t{file.layers} * file.kv_heads, first);
  for (const BudgetsFile::Entry& entry : file.heads) {
    if (entry.pattern) continue;
    for (size_t i = 0; i < heads.size(); ++i) {
      if (entry.layer && *entry.layer != i / file.kv_heads) continue;
      if (entry.kv_head && *entry.kv_head != i % file.kv_heads) continue;
      HeadOfFile& head = heads[i];
      if (entry.index) head.index = *entry.index;
      if (entry.dense) head.dense = *entry.dense;
      entry.budget.apply_to(head.budget);
      head.has_budget |= !entry.budget.empty();
    }
  }
  return heads;
}

}  // namespace

CardCodes codes_of(const BudgetsFile& file, const std::string& others, uint32_t rows) {
  CardCodes codes;
  uint64_t heads = 0, exact_rows = 0;
  for (const HeadOfFile& head : heads_of_file(file, others)) {
    if (!head.has_codes()) continue;
    const CardCodes own = codes_of(head.index);
    if (heads == 0) codes = own;
    const bool alike = own.list_rows == codes.list_rows && own.list_share == codes.list_share;
    if (!alike) codes.list_rows = 0;
    ++heads;
    if (!head.has_budget) {
      exact_rows += rows;
    } else if (head.budget.attend != KEYHOLE_ATTEND_NONE) {
      exact_rows += head.budget.top_k;
    }
  }
  if (heads != 0) codes.exact_rows = static_cast<uint32_t>((exact_rows + heads / 2) / heads);
  return codes;
}

BudgetsFile without_lists(BudgetsFile file) {
  for (BudgetsFile::Entry& entry : file.heads) {
    if (!entry.index) continue;
    if (std::string less = without_lists(*entry.index); !less.empty()) {
      entry.index = std::move(less);
    }
  }
  return file;
}

TemporaryBudgets::TemporaryBudgets(const BudgetsFile& file)
    : path_((std::filesystem::temp_directory_path() / "keyhole_budgets_XXXXXX").string()) {
  const int made = mkstemp(path_.data());
  if (made < 0) throw std::runtime_error(path_ + ": a file for budgets cannot be made");
  close(made);
  try {
    write_text(path_, budgets_text(file));
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
    throw;
  }
}

TemporaryBudgets::~TemporaryBudgets() {
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
}

}  // namespace keyhole::tools

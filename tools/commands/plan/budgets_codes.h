// The codes of a budgets file: what a plan for a card needs to know beside the memory that the library tells.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/files/budgets.h"
#include "tools/commands/plan/card_codes.h"

namespace keyhole::tools {

/// The codes of the file's heads. others: the index of heads to which it gives none; rows: exact rows of heads to which
/// it gives no budget. Bits are those of the first head with codes; lists are those that all such heads have, none
/// where they differ; exact rows are their mean.
[[nodiscard]] CardCodes codes_of(const BudgetsFile& file, const std::string& others, uint32_t rows);

/// The file with "lists=0" in every spec that asks for lists.
[[nodiscard]] BudgetsFile without_lists(BudgetsFile file);

/// A file for as long as the object lives, for calls that take a path.
class TemporaryBudgets {
 public:
  /// Throws std::runtime_error where it cannot be written.
  explicit TemporaryBudgets(const BudgetsFile& file);
  ~TemporaryBudgets();
  TemporaryBudgets(const TemporaryBudgets&) = delete;
  TemporaryBudgets& operator=(const TemporaryBudgets&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace keyhole::tools

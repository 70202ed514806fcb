// Budgets of a model's heads from a file; its format is described in runtime/files/budgets.h.
#pragma once

#include <functional>
#include <string>

#include "runtime/files/budgets.h"
#include "runtime/plan/config.h"

namespace keyhole::runtime {

/// Reads and checks the file and calls `use` with its content. Throws Error(io) where it cannot be read,
/// Error(corrupt) where it is no budgets file, Error(version) for another format, Error(invalid_argument) where it is
/// of another model; and what `use` throws. Every text begins with the path.
void with_budgets(const std::string& path, const ModelShape& model,
                  const std::function<void(const BudgetsFile&)>& use);

/// Gives every head of `params` (whose index and budget are the defaults) what the file says of it, and takes the
/// file's tail_partition. Budgets of which the file names no field are completed(). Throws as with_budgets(), and
/// Error(invalid_argument) where the file names something that no session may have; then nothing has changed.
void apply_budgets(const std::string& path, const ModelShape& model, SessionParams& params);

}  // namespace keyhole::runtime

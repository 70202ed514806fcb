// The whole of CLI11, included here alone. A header that passes an application on includes
// tools/commands/common/cli_fwd.h. Reading this takes a compiler two seconds, so the commands precompile it.
#pragma once

#include <CLI/CLI.hpp>

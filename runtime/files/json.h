// The whole JSON library, included here alone. A source that only passes values on includes <nlohmann/json_fwd.hpp>.
// Reading it takes a compiler a second, so it is among the headers that parts precompile
// (cmake/compile_faster.cmake).
#pragma once

#include <nlohmann/json.hpp>

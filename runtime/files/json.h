// JSON, whole: the one place where its library is included. A source that passes values on includes <nlohmann/json_fwd.hpp>.
// Reading this takes a compiler a second, so it is among the headers that parts precompile (cmake/compile_faster.cmake).
#pragma once

#include <nlohmann/json.hpp>

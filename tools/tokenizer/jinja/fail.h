// The errors of templates.
#pragma once

#include <stdexcept>
#include <string>

namespace keyhole::tools::jinja {

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

}  // namespace keyhole::tools::jinja

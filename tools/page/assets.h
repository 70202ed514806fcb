// The style sheet and the script of a page: page.css and page.js, compiled in.
#pragma once

#include <string>

namespace keyhole::tools {

[[nodiscard]] std::string page_style();
[[nodiscard]] std::string page_script();

}  // namespace keyhole::tools

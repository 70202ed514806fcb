// Which ggml the backend was built for, and which one has loaded it: the structs of its internal header change between
// versions, while the number that it checks itself (GGML_BACKEND_API_VERSION) stays.
#pragma once

#include <string>
#include <string_view>

namespace keyhole::llama_cpp {

/// What is wrong with a ggml of version `running` ("0.25.3") where the backend was built for `built_for`; "": nothing,
/// or it is not known what it was built for ("").
[[nodiscard]] std::string version_error(std::string_view built_for, std::string_view running);

}  // namespace keyhole::llama_cpp

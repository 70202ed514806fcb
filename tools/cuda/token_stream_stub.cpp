// Builds without CUDA.
#include <stdexcept>

#include "tools/cuda/token_stream.h"

namespace keyhole::tools {

std::unique_ptr<TokenStream> make_token_stream(const TokenStreamShape&) {
  throw std::runtime_error("a CUDA stream: this build has no CUDA in it");
}

}  // namespace keyhole::tools

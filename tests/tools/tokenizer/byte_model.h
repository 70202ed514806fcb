// The tokens of a model that reads bytes.
#pragma once

#include "tools/tokenizer/byte_tokenizer.h"

namespace keyhole::tools {

inline const ModelTokens kByteModel{.vocab_size = 264, .bos = 256, .end_tokens = {257}};

}  // namespace keyhole::tools

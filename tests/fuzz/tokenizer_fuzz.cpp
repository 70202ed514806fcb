// libFuzzer: any bytes are either a tokenizer, which encodes and decodes, or refused by an exception with a text.
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "runtime/files/json.h"
#include "tools/tokenizer/tokenizer_json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace keyhole::tools;
  try {
    const auto root = parse_json({reinterpret_cast<const char*>(data), size}, "fuzz");
    const JsonTokenizer tokenizer(JsonPart(root, "fuzz: "),
                                  {.vocab_size = 1024, .bos = {}, .end_tokens = {}});
    const auto ids =
        tokenizer.encode_prompt("abc  abd<s>\n\xE2\x96\x81 e\xCC\x81\xFF", Specials::parsed);
    (void)tokenizer.decode(ids);
  } catch (const std::runtime_error& e) {
    if (*e.what() == '\0') std::abort();
  }
  return 0;
}

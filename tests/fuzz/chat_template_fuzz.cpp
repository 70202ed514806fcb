// libFuzzer: any bytes are either a chat template, which writes a text or fails with a text, or refused by an
// exception with one.
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "tools/tokenizer/jinja/interpreter.h"
#include "tools/tokenizer/unicode.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace keyhole::tools;
  try {
    const jinja::Template source(to_utf8({reinterpret_cast<const char*>(data), size}), "fuzz");
    const jinja::List messages{
        jinja::Dict{{"role", "system"}, {"content", "Be brief."}},
        jinja::Dict{{"role", "user"}, {"content", jinja::Text(" hi\n", true)}}};
    const jinja::Text text = source.render(
        {{"messages", messages}, {"add_generation_prompt", true}, {"bos_token", "<s>"}});
    if (text.bytes.size() != text.said.size()) std::abort();
  } catch (const std::runtime_error& e) {
    if (*e.what() == '\0') std::abort();
  }
  return 0;
}

// llama.cpp's own test of all its architectures (tests/test-llama-archs.cpp there), once backends outside of it are
// loaded, which it does not do by itself.
#include <ggml-backend.h>

/// Its main(), which is compiled under this name.
int llama_archs_main(int argc, char** argv);

int main(int argc, char** argv) {
  ggml_backend_load_all();
  return llama_archs_main(argc, argv);
}

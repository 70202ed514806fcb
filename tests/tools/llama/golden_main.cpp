// The programs that compare whole models with golden values begin here.
#include <gtest/gtest.h>

#include "tools/llama/blas.h"

/// Thousands of tokens of prefill: with OpenBLAS's kernels for this CPU, as the command has them.
int main(int argc, char** argv) {
  keyhole::tools::restart_with_matching_blas_kernels(argv);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

# All dependencies come from distribution packages through find_package.
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
# Debian's faiss 1.7.3 exports target `faiss`, which names OpenMP::OpenMP_CXX without finding it.
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(faiss CONFIG REQUIRED)
# hnswlib has no CMake package in Debian 12; its one header is included in one source file only.
find_path(HNSWLIB_INCLUDE_DIR hnswlib/hnswlib.h REQUIRED)
if(KEYHOLE_TOOLS)
  find_package(OpenBLAS CONFIG REQUIRED)
  find_package(CLI11 CONFIG REQUIRED)
  find_package(HDF5 COMPONENTS C) # optional: reading ann-benchmarks files
endif()
if(KEYHOLE_TOOLS OR KEYHOLE_TESTS)
  find_package(nlohmann_json CONFIG REQUIRED)
endif()
if(KEYHOLE_TESTS)
  find_package(GTest CONFIG REQUIRED)
  include(GoogleTest)
endif()
if(KEYHOLE_BENCH)
  find_package(benchmark CONFIG REQUIRED)
endif()

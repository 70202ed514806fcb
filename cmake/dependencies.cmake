# Every dependency is a distribution package, found through find_package: Debian 12 and later, Ubuntu
# 25.04 and later (24.04 has no Faiss). What differs between them is settled here, so that the rooms need
# not know.
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

# Debian's Faiss 1.7.3 exports the target `faiss`, which names OpenMP::OpenMP_CXX without finding it.
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(faiss CONFIG REQUIRED)

# hnswlib has no CMake package in Debian 12, and is one directory of headers everywhere.
find_path(HNSWLIB_INCLUDE_DIR hnswlib/hnswlib.h REQUIRED)
mark_as_advanced(HNSWLIB_INCLUDE_DIR)

if(KEYHOLE_TOOLS)
  # OpenBLAS::OpenBLAS, whoever describes it: a CMake package (Debian's has no target), or pkg-config.
  find_package(OpenBLAS CONFIG QUIET)
  if(OpenBLAS_FOUND AND NOT TARGET OpenBLAS::OpenBLAS)
    add_library(OpenBLAS::OpenBLAS INTERFACE IMPORTED)
    target_include_directories(OpenBLAS::OpenBLAS INTERFACE ${OpenBLAS_INCLUDE_DIRS})
    target_link_libraries(OpenBLAS::OpenBLAS INTERFACE ${OpenBLAS_LIBRARIES})
  elseif(NOT OpenBLAS_FOUND)
    find_package(PkgConfig REQUIRED)
    pkg_check_modules(openblas REQUIRED IMPORTED_TARGET openblas)
    add_library(OpenBLAS::OpenBLAS ALIAS PkgConfig::openblas)
  endif()
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

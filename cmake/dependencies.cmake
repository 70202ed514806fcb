# Every dependency is a distribution package, found through find_package: Debian 12 and later, Ubuntu
# 24.04 and later. What differs between them is settled here, so that the rooms need not know.
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

# Checksums of files. One header, compiled in; Debian and Ubuntu have no CMake package for it.
find_path(XXHASH_INCLUDE_DIR xxhash.h REQUIRED)
mark_as_advanced(XXHASH_INCLUDE_DIR)

find_package(nlohmann_json CONFIG REQUIRED)

# Optional: libkeyhole_mpi, and the command under mpirun.
set(KEYHOLE_MPI AUTO CACHE STRING "Build libkeyhole_mpi: AUTO (where MPI is found), ON or OFF")
set_property(CACHE KEYHOLE_MPI PROPERTY STRINGS AUTO ON OFF)
if(KEYHOLE_MPI STREQUAL "AUTO")
  find_package(MPI COMPONENTS C QUIET)
elseif(KEYHOLE_MPI)
  find_package(MPI REQUIRED COMPONENTS C)
endif()

# Optional: libkeyhole_nccl. The CUDA Toolkit has no NCCL; packages of Python have the header and libnccl.so.2, without a libnccl.so.
set(KEYHOLE_NCCL AUTO CACHE STRING "Build libkeyhole_nccl: AUTO (with KEYHOLE_CUDA, where NCCL is found), ON or OFF")
set_property(CACHE KEYHOLE_NCCL PROPERTY STRINGS AUTO ON OFF)
set(KEYHOLE_NCCL_FOUND FALSE)
if(KEYHOLE_NCCL AND KEYHOLE_CUDA)
  set(NCCL_ROOT "" CACHE PATH "Where NCCL is: include/nccl.h and lib/libnccl.so or libnccl.so.2 below it")
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${NCCL_ROOT} PATH_SUFFIXES include)
  find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${NCCL_ROOT} PATH_SUFFIXES lib lib64)
  mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)
  if(NCCL_INCLUDE_DIR AND NCCL_LIBRARY)
    set(KEYHOLE_NCCL_FOUND TRUE)
    add_library(NCCL::NCCL INTERFACE IMPORTED)
    set_target_properties(NCCL::NCCL PROPERTIES
      INTERFACE_LINK_LIBRARIES ${NCCL_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${NCCL_INCLUDE_DIR})
  endif()
endif()
if(KEYHOLE_NCCL AND NOT KEYHOLE_NCCL STREQUAL "AUTO" AND NOT KEYHOLE_NCCL_FOUND)
  message(FATAL_ERROR "KEYHOLE_NCCL is ON, and needs KEYHOLE_CUDA and NCCL (nccl.h, libnccl): set NCCL_ROOT")
endif()

if(KEYHOLE_TOOLS)
  # Not OpenBLAS's own CMake package: Debian's has no target, and Ubuntu 26.04's names a library that is
  # not there. openblas_config.h lies beside the cblas.h that belongs to the library.
  set(BLA_VENDOR OpenBLAS)
  find_package(BLAS REQUIRED)
  unset(BLA_VENDOR)
  find_path(OPENBLAS_INCLUDE_DIR openblas_config.h REQUIRED
    PATH_SUFFIXES openblas openblas-pthread openblas-openmp openblas-serial)
  mark_as_advanced(OPENBLAS_INCLUDE_DIR)
  add_library(OpenBLAS::OpenBLAS INTERFACE IMPORTED)
  set_target_properties(OpenBLAS::OpenBLAS PROPERTIES
    INTERFACE_LINK_LIBRARIES BLAS::BLAS INTERFACE_INCLUDE_DIRECTORIES ${OPENBLAS_INCLUDE_DIR})
  find_package(CLI11 CONFIG REQUIRED)
  find_package(Eigen3 3.4 CONFIG REQUIRED)
  # Expressions and normal forms of tokenizers. Debian's PCRE2 has a CMake package from 13 on, its utf8proc none.
  foreach(library IN ITEMS pcre2 utf8proc)
    string(TOUPPER ${library} upper)
    string(REPLACE pcre2 pcre2-8 file ${library})
    find_path(${upper}_INCLUDE_DIR ${library}.h REQUIRED)
    find_library(${upper}_LIBRARY ${file} REQUIRED)
    mark_as_advanced(${upper}_INCLUDE_DIR ${upper}_LIBRARY)
    string(REPLACE UTF8PROC utf8proc space ${upper})
    add_library(${space}::${space} INTERFACE IMPORTED)
    set_target_properties(${space}::${space} PROPERTIES
      INTERFACE_LINK_LIBRARIES ${${upper}_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${${upper}_INCLUDE_DIR})
  endforeach()
  find_package(HDF5 COMPONENTS C) # optional: reading ann-benchmarks files

  # Optional: rivals that compare shows beside the library's index types. Debian's hnswlib has no CMake package.
  find_path(HNSWLIB_INCLUDE_DIR hnswlib/hnswlib.h)
  mark_as_advanced(HNSWLIB_INCLUDE_DIR)
  find_package(OpenMP COMPONENTS CXX QUIET) # Faiss's package names its target, and does not find it
  if(OpenMP_CXX_FOUND)
    find_package(faiss CONFIG QUIET)
  endif()
  if(TARGET faiss)
    # The BLAS and LAPACK of the packager's machine are in Faiss's target by their paths; the process has one already.
    set_target_properties(faiss PROPERTIES INTERFACE_LINK_LIBRARIES "OpenMP::OpenMP_CXX;OpenBLAS::OpenBLAS")
    add_library(Faiss::Faiss ALIAS faiss)
  endif()
endif()

if(KEYHOLE_TESTS)
  find_package(GTest CONFIG REQUIRED)
  include(GoogleTest)
endif()
if(KEYHOLE_BENCH)
  find_package(benchmark CONFIG REQUIRED)
endif()

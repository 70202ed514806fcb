# Warnings, sanitizers, test and benchmark programs: for people who work on Keyhole; embedders see none
# of it.
option(KEYHOLE_WERROR "Treat warnings as errors" OFF)
set(KEYHOLE_SANITIZE "" CACHE STRING "Sanitizers, e.g. address,undefined or thread")

find_program(CCACHE_PROGRAM ccache)
mark_as_advanced(CCACHE_PROGRAM)
if(PROJECT_IS_TOP_LEVEL AND CCACHE_PROGRAM)
  foreach(lang C CXX CUDA)
    if(NOT DEFINED CMAKE_${lang}_COMPILER_LAUNCHER)
      # ccache takes no file with a precompiled header without the sloppiness; with paths relative to the sources, clones share
      # what was compiled.
      set(CMAKE_${lang}_COMPILER_LAUNCHER
        ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
        ${CCACHE_PROGRAM})
    endif()
  endforeach()
endif()

# Every target of the project links this.
add_library(keyhole_options INTERFACE)
target_include_directories(keyhole_options INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(keyhole_options INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra -Wshadow>
  $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 sees overlaps in std::string's assignment that cannot be (GCC bug 105651).
  target_compile_options(keyhole_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  # What GCC 13 and 14 say of memory after inlining is said of libstdc++'s own vectors and variants (GCC bugs 107852, 109716), and
  # changes with the order of sources. GCC 12 says it where it is ours.
  target_compile_options(keyhole_options INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized;-Wno-array-bounds;-Wno-stringop-overflow;-Wno-stringop-overread;-Wno-aggressive-loop-optimizations>")
endif()
if(KEYHOLE_WERROR)
  target_compile_options(keyhole_options INTERFACE
    $<$<COMPILE_LANGUAGE:C,CXX>:-Werror> $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>)
endif()
if(KEYHOLE_SANITIZE)
  # Whole-build flags: a sanitizer must see every object, test framework glue included.
  add_compile_options(
    $<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${KEYHOLE_SANITIZE}>
    $<$<COMPILE_LANGUAGE:C,CXX>:-fno-omit-frame-pointer>
    $<$<COMPILE_LANGUAGE:C,CXX>:-fno-sanitize-recover=all>)
  add_link_options(-fsanitize=${KEYHOLE_SANITIZE})
  add_compile_definitions(KEYHOLE_SANITIZED=1)
endif()

set(fuzz OFF)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND KEYHOLE_SANITIZE MATCHES "address" AND KEYHOLE_TESTS)
  set(fuzz ON)
endif()
option(KEYHOLE_FUZZ "Build the libFuzzer targets (clang only); where clang is the compiler, AddressSanitizer's build has them" ${fuzz})
if(KEYHOLE_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "KEYHOLE_FUZZ needs clang; the compiler is ${CMAKE_CXX_COMPILER_ID}")
  endif()
  add_compile_definitions(KEYHOLE_FUZZED=1) # index/serial.h
endif()

# keyhole_fuzzed(TARGET [OPTION ...]): a library that parses bytes; fuzzers see which of its branches an input takes, and what it
# compares the input with.
function(keyhole_fuzzed target)
  if(KEYHOLE_FUZZ)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link;${ARGN}>")
  endif()
endfunction()

# The library is compiled as the preset says, as tests spend their time there. GCC takes 0.7 of -O3's time for a test with -O1;
# under sanitizers it takes 0.6 of -O1's time with -Og for parsers, tests and the command, and for the last two another 0.6
# without the checks of UBSan that stand at every pointer. What is uninitialised, -Og cannot tell: the other builds do.
# clang takes a quarter of -Og's time with -O0.
set(KEYHOLE_QUICK_OPTIONS)
set(KEYHOLE_COMMAND_OPTIONS)
set(KEYHOLE_TEST_OPTIONS)
if(KEYHOLE_SANITIZE AND CMAKE_BUILD_TYPE STREQUAL "RelWithDebInfo")
  set(KEYHOLE_QUICK_OPTIONS "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Og;-Wno-maybe-uninitialized>" $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-O0>)
  set(KEYHOLE_COMMAND_OPTIONS ${KEYHOLE_QUICK_OPTIONS})
  if(KEYHOLE_SANITIZE MATCHES "undefined")
    list(APPEND KEYHOLE_COMMAND_OPTIONS
      $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize=null,alignment,vptr,object-size>)
  endif()
  set(KEYHOLE_TEST_OPTIONS ${KEYHOLE_COMMAND_OPTIONS})
elseif(CMAKE_BUILD_TYPE MATCHES "^Rel")
  # The command parses options and writes tables: its loops are the library's, the decoder's and BLAS's. -O1 takes half of -O3's time.
  set(KEYHOLE_COMMAND_OPTIONS $<$<COMPILE_LANGUAGE:CXX>:-O1>)
  set(KEYHOLE_TEST_OPTIONS $<$<COMPILE_LANGUAGE:CXX>:-O1>)
endif()

include(cmake/compile_faster.cmake)
include(cmake/test_programs.cmake)

# What `ninja benchmarks` builds.
add_custom_target(benchmarks)

# keyhole_bench(NAME SOURCES ... LIBS ...): a Google Benchmark program.
function(keyhole_bench name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE keyhole_options ${arg_LIBS} benchmark::benchmark
    benchmark::benchmark_main)
  add_dependencies(benchmarks ${name})
endfunction()

# Warnings and sanitizers for people who work on Keyhole; embedders see none of it.
option(KEYHOLE_WERROR "Treat warnings as errors" OFF)
set(KEYHOLE_SANITIZE "" CACHE STRING "Sanitizers, e.g. address,undefined or thread")

# Every target of the project links this.
add_library(keyhole_options INTERFACE)
target_include_directories(keyhole_options INTERFACE ${CMAKE_CURRENT_SOURCE_DIR})
target_compile_options(keyhole_options INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor>)
if(KEYHOLE_WERROR)
  target_compile_options(keyhole_options INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-Werror>)
endif()
if(KEYHOLE_SANITIZE)
  # Whole-build flags: a sanitizer must see every object, test framework glue included.
  add_compile_options(-fsanitize=${KEYHOLE_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${KEYHOLE_SANITIZE})
  add_compile_definitions(KEYHOLE_SANITIZED=1)
endif()

# keyhole_test(NAME [LABEL label] SOURCES ... LIBS ...): a GoogleTest program, one ctest entry per case.
function(keyhole_test name)
  cmake_parse_arguments(arg "" "LABEL;TIMEOUT" "SOURCES;LIBS" ${ARGN})
  if(NOT arg_LABEL)
    set(arg_LABEL unit)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE keyhole_options ${arg_LIBS} GTest::gtest GTest::gtest_main)
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST
    PROPERTIES LABELS ${arg_LABEL} TIMEOUT ${arg_TIMEOUT})
endfunction()

# keyhole_bench(NAME SOURCES ... LIBS ...): a Google Benchmark program.
function(keyhole_bench name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE keyhole_options ${arg_LIBS} benchmark::benchmark
    benchmark::benchmark_main)
endfunction()

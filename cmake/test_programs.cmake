# keyhole_test(NAME [OPTIMISED] [CUDA] [SINGLY] [LABEL label] [TIMEOUT seconds] SOURCES ... [ONE_THREAD ...] LIBS ...): a GoogleTest program, one
# ctest entry per suite: a start takes 0.1 s under sanitizers, and there are five times as many cases.
#   LABEL       unit (default; runs under sanitizers), model (runs the bundled model), real (runs models of tools/real-models)
#   OPTIMISED   what it tests depends on the compiler's optimisation or on the processor's level (bits, kernels, faults of the system
#               that sanitizers do not let through): it runs in the release build, too
#   OPTIMISED_SUITES  expression of the suites that OPTIMISED is about, where it is not about all
#   ONE_THREAD  sources whose subject runs in the calling thread: ThreadSanitizer would find nothing, and they are left out under it
#   CUDA        a build with KEYHOLE_CUDA has it, or has more of it
#   SINGLY      no source is compiled together with others (KEYHOLE_UNITY)
#   NIGHT_UNDER_ASAN, NIGHT_UNDER_TSAN  expression of suites that have the label night under that sanitizer, which tools/test --all runs:
#               they take it long, and what they ask is asked elsewhere in every change (of the release build, of other suites' threads)
#   TIMEOUT     of a suite

# What `ninja unit_tests` builds: every program labelled unit. `ninja optimised_tests`: what the release build alone can tell.
add_custom_target(unit_tests)
add_custom_target(optimised_tests)
# `ninja cuda_tests`: those that only a build with CUDA has.
add_custom_target(cuda_tests)

# Under sanitizers tests link the library's insides as one shared library, whose names are visible for that: 20 programs with
# a copy each take minutes to link, and a gigabyte.
if(KEYHOLE_SANITIZE AND KEYHOLE_TESTS)
  set(CMAKE_CXX_VISIBILITY_PRESET default)
  set(CMAKE_VISIBILITY_INLINES_HIDDEN OFF)
endif()

# Tests of kernels and of index types compute for longer than they are compiled: the -O0 of clang's tests under sanitizers
# (developer.cmake) would cost more than it saves. They have the library's level, and precompiled headers of their own.
set(KEYHOLE_OPTIMISED_TEST_OPTIONS ${KEYHOLE_TEST_OPTIONS})
list(REMOVE_ITEM KEYHOLE_OPTIMISED_TEST_OPTIONS "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:-O0>")
set(kinds test)
if(KEYHOLE_SANITIZE AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  list(APPEND kinds optimised_test)
endif()

# Programs for the precompiled headers that all tests of a kind share.
if(KEYHOLE_PRECOMPILE AND KEYHOLE_TESTS)
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/test_headers.cpp CONTENT "int main() {}\n")
  foreach(kind IN LISTS kinds)
    string(TOUPPER KEYHOLE_${kind}_OPTIONS options)
    add_executable(${kind}_headers EXCLUDE_FROM_ALL ${CMAKE_CURRENT_BINARY_DIR}/test_headers.cpp)
    target_link_libraries(${kind}_headers PRIVATE keyhole_options GTest::gtest)
    target_compile_options(${kind}_headers PRIVATE ${${options}})
    keyhole_precompile(${kind}_headers HEADERS <gtest/gtest.h> ${KEYHOLE_STANDARD_HEADERS})
  endforeach()
endif()

function(keyhole_test name)
  cmake_parse_arguments(arg "OPTIMISED;SINGLY;CUDA" "LABEL;TIMEOUT;OPTIMISED_SUITES;NIGHT_UNDER_ASAN;NIGHT_UNDER_TSAN" "SOURCES;ONE_THREAD;LIBS" ${ARGN})
  set(sources ${arg_SOURCES})
  if(NOT KEYHOLE_SANITIZE MATCHES "thread")
    list(APPEND sources ${arg_ONE_THREAD})
  endif()
  if(NOT sources)
    return()
  endif()
  if(NOT arg_LABEL)
    set(arg_LABEL unit)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)
  endif()
  add_executable(${name} ${sources})
  keyhole_test_libraries(libraries ${arg_LIBS})
  target_link_libraries(${name} PRIVATE keyhole_options ${libraries} GTest::gtest GTest::gtest_main)
  set(kind test)
  if(arg_OPTIMISED AND "optimised_test" IN_LIST kinds)
    set(kind optimised_test)
  endif()
  string(TOUPPER KEYHOLE_${kind}_OPTIONS options)
  target_compile_options(${name} PRIVATE ${${options}})
  if(TARGET ${kind}_headers)
    keyhole_precompiled_as(${name} ${kind}_headers)
  endif()
  if(NOT arg_SINGLY)
    keyhole_unity(${name})
  endif()
  if(arg_LABEL STREQUAL "unit")
    add_dependencies(unit_tests ${name})
  endif()
  if(arg_CUDA)
    add_dependencies(cuda_tests ${name})
  endif()
  if(arg_OPTIMISED OR NOT arg_LABEL STREQUAL "unit")
    add_dependencies(optimised_tests ${name})
  endif()
  set(labels ${arg_LABEL})
  set(optimised)
  if(arg_OPTIMISED_SUITES)
    set(optimised "${arg_OPTIMISED_SUITES}")
  elseif(arg_OPTIMISED)
    set(optimised ".*")
  endif()
  set(environment)
  set(night)
  if(KEYHOLE_SANITIZE MATCHES "address")
    set(night "${arg_NIGHT_UNDER_ASAN}")
    # A fifth of the time went into what the allocator keeps and remembers: 256 MiB of freed blocks and 30 frames of each. UBSan reads
    # the same variable.
    set(environment "ASAN_OPTIONS=quarantine_size_mb=64:malloc_context_size=12:\$ENV{ASAN_OPTIONS}")
  elseif(KEYHOLE_SANITIZE MATCHES "thread")
    set(night "${arg_NIGHT_UNDER_TSAN}")
    set(environment "TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/tsan.supp")
  endif()
  # ctest asks the program for its suites before it runs them: a suite that is new is found without a configuration.
  set(list ${CMAKE_CURRENT_BINARY_DIR}/${name}_suites.cmake)
  file(GENERATE OUTPUT ${list} CONTENT "set(cmake \"${CMAKE_COMMAND}\")\nset(program $<TARGET_FILE:${name}>)\nset(name ${name})\nset(labels \"${labels}\")
set(timeout ${arg_TIMEOUT})\nset(night \"${night}\")\nset(optimised \"${optimised}\")\nset(environment \"${environment}\")\ninclude(${PROJECT_SOURCE_DIR}/cmake/list_suites.cmake)\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${list})
endfunction()

# keyhole_test_libraries(RESULT LIBRARY ...): under sanitizers, keyhole_internal in place of the archives that are in it.
function(keyhole_test_libraries result)
  set(libraries ${ARGN})
  if(TARGET keyhole_internal)
    list(LENGTH libraries before)
    list(REMOVE_ITEM libraries keyhole_cpu keyhole_index keyhole_gpu keyhole_runtime)
    list(LENGTH libraries after)
    if(after LESS before)
      list(REMOVE_ITEM libraries keyhole_files)
      list(APPEND libraries keyhole_internal)
    endif()
  endif()
  set(${result} ${libraries} PARENT_SCOPE)
endfunction()

# Headers read once, sources of a folder compiled together, a faster linker: half of the time of a build of everything is the
# reading of the standard library's headers and of JSON's, a quarter the templates that many sources instantiate.
option(KEYHOLE_PRECOMPILE "Read the standard library's, GoogleTest's, JSON's and CLI11's headers once for all sources of a part" OFF)
option(KEYHOLE_UNITY "Compile the sources of a folder in groups" OFF)

# keyhole_precompile(TARGET HEADERS ...): headers of others that most of the target's sources include. Headers of the project
# are not among them, so that sources include those that they use.
function(keyhole_precompile target)
  cmake_parse_arguments(arg "" "" "HEADERS" ${ARGN})
  if(KEYHOLE_PRECOMPILE)
    target_precompile_headers(${target} PRIVATE ${arg_HEADERS})
    keyhole_cache_precompiled(${target})
  endif()
endfunction()

# keyhole_precompiled_as(TARGET OTHER): TARGET, which has the options of OTHER, uses its precompiled headers.
function(keyhole_precompiled_as target other)
  if(KEYHOLE_PRECOMPILE)
    target_precompile_headers(${target} REUSE_FROM ${other})
    keyhole_cache_precompiled(${target})
  endif()
endfunction()

# What ccache asks for where a header is precompiled.
function(keyhole_cache_precompiled target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>
    "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:SHELL:-Xclang -fno-pch-timestamp>")
endfunction()

# The standard library's headers that the sources of the project use most.
set(KEYHOLE_STANDARD_HEADERS <algorithm> <array> <atomic> <bit> <chrono> <cmath> <condition_variable> <cstdint> <cstring> <exception>
  <filesystem> <fstream> <functional> <limits> <map> <memory> <mutex> <numeric> <optional> <random> <span> <sstream> <stdexcept>
  <string> <string_view> <thread> <type_traits> <utility> <vector>)

# keyhole_unity(TARGET [MOST number] [EXCEPT SOURCE ...] [TOGETHER FOLDER ...]): with KEYHOLE_UNITY the target's sources are compiled in groups
# (at most of twelve, or of MOST) of those of one folder, so that they read headers, and instantiate templates, once. Names of one file must be unique within a folder for
# that, and within those that are named TOGETHER, which are small. CMake leaves out sources with options of their own.
function(keyhole_unity target)
  cmake_parse_arguments(arg "" "MOST" "EXCEPT;TOGETHER" ${ARGN})
  if(NOT arg_MOST)
    set(arg_MOST 12)
  endif()
  if(NOT KEYHOLE_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  set(folders)
  foreach(source IN LISTS sources)
    cmake_path(GET source PARENT_PATH folder)
    if(NOT source MATCHES "\\.cpp$" OR source IN_LIST arg_EXCEPT)
      continue()
    endif()
    if(folder IN_LIST arg_TOGETHER)
      set(folder together)
    endif()
    string(MAKE_C_IDENTIFIER "in_${folder}" name)
    list(APPEND folders ${name})
    list(APPEND ${name} ${source})
  endforeach()
  list(REMOVE_DUPLICATES folders)
  foreach(name IN LISTS folders)
    # Groups of equal size: 13 sources are 7 and 6.
    list(LENGTH ${name} count)
    math(EXPR groups "(${count} + ${arg_MOST} - 1) / ${arg_MOST}")
    math(EXPR each "(${count} + ${groups} - 1) / ${groups}")
    set(i 0)
    foreach(source IN LISTS ${name})
      math(EXPR group "${i} / ${each}")
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${name}_${group})
      math(EXPR i "${i} + 1")
    endforeach()
  endforeach()
  set_source_files_properties(${arg_EXCEPT} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # GCC takes a group's sources for headers, whose types must not have members of an anonymous namespace.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
endfunction()

# lld or mold link a program with all debug information in a tenth of bfd's time.
set(KEYHOLE_LINKER AUTO CACHE STRING "Linker of the project's programs and libraries: AUTO (mold or lld where one is), bfd, lld, mold")
if(PROJECT_IS_TOP_LEVEL AND NOT KEYHOLE_LINKER STREQUAL "bfd")
  include(CheckLinkerFlag)
  set(linkers ${KEYHOLE_LINKER})
  if(KEYHOLE_LINKER STREQUAL "AUTO")
    set(linkers mold lld)
  endif()
  foreach(linker IN LISTS linkers)
    check_linker_flag(CXX -fuse-ld=${linker} KEYHOLE_LINKS_WITH_${linker})
    if(KEYHOLE_LINKS_WITH_${linker})
      add_link_options(-fuse-ld=${linker})
      break()
    endif()
  endforeach()
endif()

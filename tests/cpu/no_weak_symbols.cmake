# Fails if an object compiled for a higher level holds a symbol that the linker may merge with another
# unit's (weak or unique: inline functions and templates with external linkage). The copy that wins could be
# this one, and a machine without the level's instructions would die in it.
#   cmake -DNM=nm -DOBJECTS=a.o;b.o [-DONLY=regex] -P no_weak_symbols.cmake
set(checked 0)
foreach(object IN LISTS OBJECTS)
  if(NOT object MATCHES "${ONLY}")
    continue()
  endif()
  math(EXPR checked "${checked} + 1")
  execute_process(COMMAND ${NM} --defined-only -C ${object}
    OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [WwVvu] [^\n]*" mergeable "${symbols}")
  # Sanitized units refer to the exception personality through weak data: no instructions, no harm.
  # clang's UBSan names the types of functions that are called by pointers.
  list(FILTER mergeable EXCLUDE REGEX "DW\\.ref\\.| V typeinfo ")
  if(mergeable)
    list(JOIN mergeable "\n  " text)
    message(FATAL_ERROR "${object}:\n  ${text}")
  endif()
endforeach()
if(checked EQUAL 0)
  message(FATAL_ERROR "no object matches '${ONLY}'")
endif()

# What the shared library shows to the linker: keyhole_* in the version node of this ABI, nothing else.
# The C++ runtime's templates inside stay private, so that a program may carry its own.
set(version_script ${PROJECT_SOURCE_DIR}/cmake/keyhole.map)
file(STRINGS ${version_script} version_node REGEX "^KEYHOLE_[0-9]+ {")
if(NOT version_node STREQUAL "KEYHOLE_${keyhole_ABI_VERSION} {")
  message(FATAL_ERROR "cmake/keyhole.map has `${version_node}`, keyhole.h has KEYHOLE_ABI_VERSION "
    "${keyhole_ABI_VERSION}: they must agree")
endif()
set_target_properties(keyhole PROPERTIES
  VERSION ${PROJECT_VERSION} SOVERSION ${keyhole_ABI_VERSION} LINK_DEPENDS ${version_script})
target_link_options(keyhole PRIVATE
  -Wl,--version-script=${version_script} -Wl,--exclude-libs,ALL)
if(NOT KEYHOLE_SANITIZE) # a sanitizer's own symbols may come from the program
  target_link_options(keyhole PRIVATE -Wl,--no-undefined)
endif()

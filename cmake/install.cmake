# What `cmake --install` lays down, and how others find it: a CMake package and a pkg-config file, both
# relocatable. The component `library` is all that programs need which call the library: no command, model or document.
include(CMakePackageConfigHelpers)

set(public_include ${PROJECT_SOURCE_DIR}/runtime/include)
set_target_properties(keyhole PROPERTIES INTERFACE_INCLUDE_DIRECTORIES
  "$<BUILD_INTERFACE:${public_include}>;$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
add_library(keyhole::keyhole ALIAS keyhole)

install(DIRECTORY ${public_include}/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT library FILES_MATCHING PATTERN "*.h" PATTERN mpi.h EXCLUDE PATTERN nccl.h EXCLUDE)
install(TARGETS keyhole EXPORT keyhole-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library)
foreach(adapter mpi nccl)
  if(TARGET keyhole_${adapter})
    add_library(keyhole::keyhole_${adapter} ALIAS keyhole_${adapter})
    set_target_properties(keyhole_${adapter} PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${keyhole_ABI_VERSION}
      INSTALL_RPATH "$ORIGIN")
    install(FILES ${public_include}/keyhole/${adapter}.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/keyhole
      COMPONENT library)
    install(TARGETS keyhole_${adapter} EXPORT keyhole-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
      COMPONENT library)
  endif()
endforeach()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/keyhole)
install(EXPORT keyhole-targets NAMESPACE keyhole:: DESTINATION ${package_dir} COMPONENT library)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/keyhole-config.cmake.in
  ${PROJECT_BINARY_DIR}/keyhole-config.cmake INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may break its callers.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/keyhole-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/keyhole-config.cmake
  ${PROJECT_BINARY_DIR}/keyhole-config-version.cmake DESTINATION ${package_dir} COMPONENT library)

# pkg-config finds the prefix from where the file lies, so `--prefix` at install time just works.
set(pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH prefix_from_pkgconfig /p/${pkgconfig_dir} /p)
string(REGEX REPLACE "/$" "" prefix_from_pkgconfig "${prefix_from_pkgconfig}")
configure_file(${PROJECT_SOURCE_DIR}/cmake/keyhole.pc.in ${PROJECT_BINARY_DIR}/keyhole.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/keyhole.pc DESTINATION ${pkgconfig_dir} COMPONENT library)

# The command and its model are installed by tools/; from bin/ it finds the library in its own prefix.
if(TARGET keyhole_command)
  file(RELATIVE_PATH lib_from_bin /p/${CMAKE_INSTALL_BINDIR} /p/${CMAKE_INSTALL_LIBDIR})
  set_target_properties(keyhole_command PROPERTIES INSTALL_RPATH "$ORIGIN/${lib_from_bin}")
endif()

# The documents keep their places beside each other, so that their relative links work in the installed copy too.
# No "." among the folders: CMake 3.31 warns of a destination that is not in its normal form (policy CMP0177).
foreach(folder "" /docs /bench /tools/example /tools/model)
  file(GLOB documents CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}${folder}/*.md ${PROJECT_SOURCE_DIR}${folder}/*.svg
    ${PROJECT_SOURCE_DIR}${folder}/*.html)
  install(FILES ${documents} DESTINATION ${CMAKE_INSTALL_DOCDIR}${folder})
endforeach()
file(GLOB described CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/docs/*.json)
install(FILES ${described} DESTINATION ${CMAKE_INSTALL_DOCDIR}/docs)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT library)
install(FILES ${PROJECT_SOURCE_DIR}/tools/example/CMakeLists.txt ${PROJECT_SOURCE_DIR}/tools/example/example.c
  DESTINATION ${CMAKE_INSTALL_DOCDIR}/tools/example)

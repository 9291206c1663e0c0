# `cmake --install`: the library, its public headers, and the package that find_package(rebind) reads.

include(CMakePackageConfigHelpers)
set(_rebind_package "${CMAKE_INSTALL_LIBDIR}/cmake/rebind")

install(TARGETS rebind EXPORT rebindTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES ${rebind_headers} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/rebind)
install(EXPORT rebindTargets NAMESPACE rebind:: DESTINATION ${_rebind_package})

configure_package_config_file(tools/cmake/rebindConfig.cmake.in "${PROJECT_BINARY_DIR}/rebindConfig.cmake"
                              INSTALL_DESTINATION ${_rebind_package})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/rebindConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/rebindConfig.cmake" "${PROJECT_BINARY_DIR}/rebindConfigVersion.cmake"
              tools/cmake/FindLibTorch.cmake
        DESTINATION ${_rebind_package})

# Headers, library and CMake package, the same tree under an install prefix and in the wheel.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(specrt_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/specrt")

install(
  TARGETS specrt
  EXPORT specrtTargets
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
install(DIRECTORY include/specrt DESTINATION include FILES_MATCHING PATTERN "*.h")
install(
  EXPORT specrtTargets
  NAMESPACE specrt::
  DESTINATION "${specrt_package_dir}")

configure_package_config_file(
  cmake/specrtConfig.cmake.in "${PROJECT_BINARY_DIR}/specrtConfig.cmake"
  INSTALL_DESTINATION "${specrt_package_dir}")
write_basic_package_version_file(
  "${PROJECT_BINARY_DIR}/specrtConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/specrtConfig.cmake"
              "${PROJECT_BINARY_DIR}/specrtConfigVersion.cmake"
        DESTINATION "${specrt_package_dir}")

# The extension module specrt._core: one binding file per public header.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
find_package(pybind11 3.0 CONFIG QUIET)
if(NOT pybind11_FOUND)
  # Outside of a wheel build, pybind11 is most likely a Python package of this interpreter.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
    OUTPUT_VARIABLE pybind11_DIR
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_package(pybind11 3.0 CONFIG REQUIRED)
endif()

pybind11_add_module(
  _core MODULE
  python/bindings/constraint.cpp
  python/bindings/bell.cpp
  python/bindings/cpu.cpp
  python/bindings/cuda.cpp
  python/bindings/decoder.cpp
  python/bindings/draft_tree.cpp
  python/bindings/drafter.cpp
  python/bindings/features.cpp
  python/bindings/merge.cpp
  python/bindings/suffix.cpp
  python/bindings/errors.cpp
  python/bindings/medusa.cpp
  python/bindings/memory.cpp
  python/bindings/calibration.cpp
  python/bindings/model.cpp
  python/bindings/module.cpp
  python/bindings/planner.cpp
  python/bindings/sampling.cpp
  python/bindings/static_tree.cpp)
target_link_libraries(_core PRIVATE specrt::specrt)
target_compile_options(_core PRIVATE -Wall -Wextra)
# Reading these is more than half of what a binding file takes.
target_precompile_headers(_core PRIVATE <pybind11/pybind11.h> <pybind11/stl.h>)
if(SPECRT_WARNINGS_AS_ERRORS)
  target_compile_options(_core PRIVATE -Werror)
endif()

# The wheel holds the library at specrt/lib, beside the extension at specrt/.
if(APPLE)
  set_target_properties(_core PROPERTIES INSTALL_RPATH "@loader_path/lib")
else()
  set_target_properties(_core PROPERTIES INSTALL_RPATH "$ORIGIN/lib")
endif()
if(SKBUILD)
  # Wheels cannot hold symbolic links: the names that versions make would be copies.
  set_property(TARGET specrt PROPERTY VERSION)
  set_property(TARGET specrt PROPERTY SOVERSION)
  set(CMAKE_INSTALL_LIBDIR lib)
  install(TARGETS _core LIBRARY DESTINATION .)
endif()

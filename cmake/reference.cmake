# The slow double-precision oracle, for tests only.
add_library(
  specrt_reference STATIC
  ${PROJECT_SOURCE_DIR}/src/reference/attention.cpp ${PROJECT_SOURCE_DIR}/src/reference/kernels.cpp
  ${PROJECT_SOURCE_DIR}/src/reference/rejection.cpp
  ${PROJECT_SOURCE_DIR}/src/reference/sampling.cpp ${PROJECT_SOURCE_DIR}/src/reference/typical.cpp)
target_include_directories(
  specrt_reference PUBLIC ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
target_compile_options(specrt_reference PRIVATE -Wall -Wextra -Wshadow -Wconversion
                                                -Wno-sign-conversion)
if(SPECRT_WARNINGS_AS_ERRORS)
  target_compile_options(specrt_reference PRIVATE -Werror)
endif()
if(SPECRT_SANITIZE)
  target_compile_options(specrt_reference PUBLIC -fsanitize=${SPECRT_SANITIZE}
                                                 -fno-omit-frame-pointer)
endif()

# The CUDA half of the library (SPECRT_CUDA): objects for sm_80 and sm_90a that need nothing but
# cudart, linked statically, so that the library loads on machines without a driver.

if(NOT CMAKE_CUDA_ARCHITECTURES)
  # Named for each target below.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.4)
  message(FATAL_ERROR "CUDA: expected 12.4 or newer, got ${CMAKE_CUDA_COMPILER_VERSION}")
endif()

# CUTLASS's headers: a folder that has include/cutlass, or the nvidia-cutlass package of this
# interpreter, which is found without being imported.
set(CUTLASS_DIR "" CACHE PATH "CUTLASS, where include/cutlass/cutlass.h is")
if(CUTLASS_DIR)
  set(specrt_cutlass "${CUTLASS_DIR}/include")
else()
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND
      "${Python_EXECUTABLE}" -c
      "import importlib.util as u; s = u.find_spec('cutlass_library'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE specrt_cutlass_package
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(specrt_cutlass "${specrt_cutlass_package}/source/include")
endif()
if(NOT EXISTS "${specrt_cutlass}/cutlass/cutlass.h")
  message(FATAL_ERROR "CUTLASS: expected headers of -DCUTLASS_DIR or of the Python package "
                      "nvidia-cutlass (pip install --no-deps nvidia-cutlass==4.2.0.0), got none")
endif()

# For a machine's own GPU one of them will do.
set(SPECRT_CUDA_ARCHITECTURES "80;90" CACHE STRING "GPUs to build for: 80, 90 or both")
if(NOT SPECRT_CUDA_ARCHITECTURES MATCHES "^(80|90|80;90)$")
  message(FATAL_ERROR "SPECRT_CUDA_ARCHITECTURES: expected 80, 90 or 80;90, got "
                      "${SPECRT_CUDA_ARCHITECTURES}")
endif()
# Each from its own front half: of sm_80's, ptxas makes kernels for sm_90 that spill.
set(SPECRT_CUDA_CODE "")
foreach(specrt_arch IN LISTS SPECRT_CUDA_ARCHITECTURES)
  list(APPEND SPECRT_CUDA_CODE "--generate-code=arch=compute_${specrt_arch},code=[sm_${specrt_arch}]")
endforeach()
set(SPECRT_CUDA_CODE_90A "--generate-code=arch=compute_90a,code=[sm_90a]")

function(specrt_cuda_objects name code)
  add_library(${name} OBJECT ${ARGN})
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES OFF CUDA_STANDARD 20
                                           CUDA_STANDARD_REQUIRED ON
                                           CUDA_VISIBILITY_PRESET hidden)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/cuda ${PROJECT_SOURCE_DIR}/src
                                             ${PROJECT_SOURCE_DIR}/include)
  target_compile_definitions(${name} PRIVATE SPECRT_BUILDING)
  # constexpr functions of the core run on the device as they are. CUTLASS's assertions would keep
  # ptxas from overlapping wgmma.
  target_compile_options(
    ${name} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${code}>"
                    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -DNDEBUG
                    -diag-suppress=2908>)
  target_sources(specrt PRIVATE $<TARGET_OBJECTS:${name}>)
endfunction()

# Fused operations are written out where they are meant, as on the CPU.
specrt_cuda_objects(
  specrt_cuda_kernels "${SPECRT_CUDA_CODE}"
  cuda/gemm/mma_bf16.cu
  cuda/gemm/mma_fp16.cu
  cuda/gemm/mma_int4.cu
  cuda/gemm/mma_int8.cu
  cuda/gemm/product.cu
  cuda/launch/attention.cu
  cuda/launch/attention_bf16.cu
  cuda/launch/attention_fp16.cu
  cuda/launch/choose.cu
  cuda/launch/device.cu
  cuda/launch/rows.cu)
target_compile_options(specrt_cuda_kernels PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false>)

# A kernel each: they take a minute and 3 GB.
specrt_cuda_objects(
  specrt_cuda_wgmma "${SPECRT_CUDA_CODE_90A}"
  cuda/gemm/sm90_bf16_16.cu
  cuda/gemm/sm90_bf16_64.cu
  cuda/gemm/sm90_bf16_128.cu
  cuda/gemm/sm90_fp16_16.cu
  cuda/gemm/sm90_fp16_64.cu
  cuda/gemm/sm90_fp16_128.cu)
target_include_directories(specrt_cuda_wgmma SYSTEM PRIVATE "${specrt_cutlass}")

find_package(CUDAToolkit 12.4 REQUIRED)
target_link_libraries(specrt PRIVATE CUDA::cudart_static)

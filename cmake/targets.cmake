# The library. Objects first, so that the native tests can reach internals that the shared
# library hides.

set(specrt_sources
    cuda/kernels/pack.cpp
    src/core/draft_tree.cpp
    src/core/error.cpp
    src/core/features.cpp
    src/core/kv_cache.cpp
    src/core/kv_check.cpp
    src/core/kv_dtype.cpp
    src/core/kv_layout.cpp
    src/core/kv_pool.cpp
    src/core/kv_prefix.cpp
    src/core/kv_promises.cpp
    src/core/prefix_index.cpp
    src/core/sampling_params.cpp
    src/core/speculation.cpp
    src/core/static_tree.cpp
    src/core/suffix_index.cpp
    src/core/suffix_trie.cpp
    src/core/types.cpp
    src/cpu/detect.cpp
    src/cpu/dispatch.cpp
    src/cpu/pack.cpp
    src/cpu/quantise.cpp
    src/cpu/scalar.cpp
    src/cpu/thread_pool.cpp
    src/cpu/thread_team.cpp
    src/decode/acceptance.cpp
    src/decode/adasd.cpp
    src/decode/candidate_tree.cpp
    src/decode/chain_draft.cpp
    src/decode/choose.cpp
    src/decode/cost_model.cpp
    src/decode/cuda_walk.cpp
    src/decode/decide.cpp
    src/decode/decoder.cpp
    src/decode/drafter.cpp
    src/decode/ema_tiers.cpp
    src/decode/features.cpp
    src/decode/fill_lists.cpp
    src/decode/filter.cpp
    src/decode/goodput.cpp
    src/decode/head_children.cpp
    src/decode/head_drafter.cpp
    src/decode/head_growth.cpp
    src/decode/head_memory.cpp
    src/decode/head_modules.cpp
    src/decode/layers_drafter.cpp
    src/decode/logits_state.cpp
    src/decode/measure_cost.cpp
    src/decode/medusa_drafter.cpp
    src/decode/merge_drafter.cpp
    src/decode/model_drafter.cpp
    src/decode/ngram_drafter.cpp
    src/decode/plan.cpp
    src/decode/preempt.cpp
    src/decode/planner.cpp
    src/decode/rank.cpp
    src/decode/rejection.cpp
    src/decode/round.cpp
    src/decode/sequence.cpp
    src/decode/suffix_cache.cpp
    src/decode/suffix_drafter.cpp
    src/decode/synthetic_drafter.cpp
    src/decode/typical.cpp
    src/decode/verify.cpp
    src/model/attention_plan.cpp
    src/model/buffer.cpp
    src/model/calibration.cpp
    src/model/config.cpp
    src/model/cuda_arena.cpp
    src/model/cuda_favour.cpp
    src/model/cuda_features.cpp
    src/model/cuda_forward.cpp
    src/model/cuda_growth.cpp
    src/model/cuda_inputs.cpp
    src/model/cuda_medusa.cpp
    src/model/cuda_runner.cpp
    src/model/device_check.cpp
    src/model/cuda_weights.cpp
    src/model/draft_head.cpp
    src/model/forward.cpp
    src/model/head.cpp
    src/model/input_moments.cpp
    src/model/kv_storage.cpp
    src/model/medusa.cpp
    src/model/model.cpp
    src/model/model_file.cpp
    src/model/runner.cpp
    src/model/self_draft.cpp
    src/model/state_copies.cpp)

add_library(specrt_objects OBJECT ${specrt_sources})
target_include_directories(
  specrt_objects PUBLIC ${PROJECT_SOURCE_DIR}/include PRIVATE ${PROJECT_SOURCE_DIR}/src)
# Kernels' headers, for their arguments: nvcc's warnings are not the host compiler's.
target_include_directories(specrt_objects SYSTEM PRIVATE ${PROJECT_SOURCE_DIR}/cuda)
target_compile_definitions(specrt_objects PRIVATE SPECRT_BUILDING)
# Contraction would let the compiler fuse a*b+c differently in differently unrolled bodies of one
# kernel; fused operations are written out where they are meant.
target_compile_options(specrt_objects PRIVATE -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion
                                              -ffp-contract=off)
if(SPECRT_WARNINGS_AS_ERRORS)
  target_compile_options(specrt_objects PRIVATE -Werror)
endif()

# One unit per instruction-set level, and only that unit gets its flags.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  target_sources(specrt_objects PRIVATE src/cpu/amx.cpp src/cpu/amx_attention.cpp src/cpu/amx_int4.cpp
                                        src/cpu/avx2.cpp src/cpu/avx512.cpp src/cpu/vnni.cpp)
  set_source_files_properties(src/cpu/avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c")
  set_source_files_properties(
    src/cpu/avx512.cpp PROPERTIES COMPILE_OPTIONS
                                  "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mavx2;-mfma;-mf16c")
  set_source_files_properties(
    src/cpu/vnni.cpp
    PROPERTIES COMPILE_OPTIONS
               "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mavx512vnni;-mavx2;-mfma;-mf16c")
  set_source_files_properties(
    src/cpu/amx.cpp src/cpu/amx_attention.cpp src/cpu/amx_int4.cpp
    PROPERTIES COMPILE_OPTIONS
               "-mamx-tile;-mamx-bf16;-mamx-int8;-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mavx512bf16;-mavx512vnni;-mavx2;-mfma;-mf16c")
else()
  target_sources(specrt_objects PRIVATE src/cpu/no_x86.cpp)
endif()

if(SPECRT_PCH)
  target_precompile_headers(
    specrt_objects PRIVATE <algorithm> <array> <cmath> <cstdint> <functional> <memory> <optional>
    <span> <sstream> <string> <unordered_map> <vector>)
  # Units of one instruction-set level, and what they share with the baseline, stay by themselves.
  get_target_property(specrt_units specrt_objects SOURCES)
  list(FILTER specrt_units INCLUDE REGEX "src/cpu/")
  set_source_files_properties(${specrt_units} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
endif()

if(SPECRT_SANITIZE)
  target_compile_options(specrt_objects PUBLIC -fsanitize=${SPECRT_SANITIZE} -fno-omit-frame-pointer)
  target_link_options(specrt_objects PUBLIC -fsanitize=${SPECRT_SANITIZE})
endif()
target_link_libraries(specrt_objects PUBLIC Threads::Threads)

# A seam at link time: what device.h and ops.h declare is either cuda/launch and cuda/gemm
# (cmake/cuda.cmake), or this, which refuses, or specrt_emulated, which runs kernels on the host.
add_library(specrt_no_cuda OBJECT EXCLUDE_FROM_ALL src/no_cuda/no_cuda.cpp)
target_include_directories(specrt_no_cuda PRIVATE ${PROJECT_SOURCE_DIR}/include
                                                  ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/cuda)
target_compile_definitions(specrt_no_cuda PRIVATE SPECRT_BUILDING)
target_compile_options(specrt_no_cuda PRIVATE -Wall -Wextra)

add_library(
  specrt_emulated OBJECT EXCLUDE_FROM_ALL cuda/emulated/device.cpp cuda/emulated/ops.cpp
                                          cuda/simt/host.cpp)
target_include_directories(specrt_emulated PRIVATE ${PROJECT_SOURCE_DIR}/include
                                                   ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/cuda)
target_compile_definitions(specrt_emulated PRIVATE SPECRT_BUILDING)
target_compile_options(specrt_emulated PRIVATE -ffp-contract=off)

add_library(specrt SHARED)
add_library(specrt::specrt ALIAS specrt)
target_link_libraries(specrt PRIVATE specrt_objects)
target_include_directories(
  specrt PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
target_compile_features(specrt PUBLIC cxx_std_20)
set_target_properties(specrt PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})

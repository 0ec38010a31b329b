#pragma once

// The one place where code asks who compiles it. Kernels are templates over a block (block.h), so
// the same source is compiled by nvcc for a GPU and by the host's compiler for the tests.

#if defined(__CUDACC__)
#define SPECRT_KERNEL __host__ __device__ __forceinline__
// Called, not copied: for what is long and used in many places.
#define SPECRT_KERNEL_CALL __host__ __device__ __noinline__
#else
#define SPECRT_KERNEL inline
#define SPECRT_KERNEL_CALL inline
#endif

// Device code proper: instructions that only a GPU has.
#if defined(__CUDA_ARCH__)
#define SPECRT_ON_DEVICE 1
#else
#define SPECRT_ON_DEVICE 0
#endif

#if defined(__CUDACC__)
#define SPECRT_UNROLL _Pragma("unroll")
#else
#define SPECRT_UNROLL
#endif

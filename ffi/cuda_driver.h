// The part of the CUDA driver that a launch needs, declared here and found by dlopen: no toolkit to build, no driver to
// load. A test compiles these declarations against NVIDIA's cuda.h.
#ifndef JAX_BWGEMM_CUDA_DRIVER_H_
#define JAX_BWGEMM_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "status.h"

namespace jbw::cuda {

using Result = int;  // 0: success
using Device = int;
using Library = struct LibraryHandle*;
using Kernel = struct KernelHandle*;
using Function = struct FunctionHandle*;  // a Kernel may be cast to it (driver API, cuLaunchKernelEx)
using Stream = struct StreamHandle*;

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

struct LaunchAttribute {
  int32_t id;
  char pad[4];
  union {
    uint32_t cluster_dim[3];
    int32_t programmatic_stream_serialization;
    char size[64];
  } value;
};

struct LaunchConfig {
  uint32_t grid[3], block[3], smem_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  uint32_t num_attributes;
};

inline constexpr Result kSuccess = 0, kOutOfMemory = 2;
inline constexpr int kLaunchAttributeClusterDimension = 4, kLaunchAttributeProgrammaticStreamSerialization = 6;
inline constexpr int kFunctionAttributeMaxDynamicSmem = 8, kFunctionAttributeNonPortableClusterSize = 14;
inline constexpr int kDeviceAttributeMajor = 75, kDeviceAttributeMinor = 76;
inline constexpr int kTensorMapUint8 = 0, kTensorMapInt32 = 3, kTensorMapFloat16 = 6, kTensorMapFloat32 = 7;
inline constexpr int kTensorMapBfloat16 = 9, kTensorMapTfloat32 = 11;
inline constexpr int kSwizzle32 = 1, kSwizzle64 = 2, kSwizzle128 = 3, kSwizzle128Atom32 = 4;
inline constexpr int kInterleaveNone = 0, kL2Promotion128 = 2, kOobFillZeros = 0;

// X(name, parameters); every function returns a Result.
#define JBW_CUDA_FUNCTIONS(X)                                                                                       \
  X(cuDeviceGet, (Device*, int ordinal))                                                                            \
  X(cuDeviceGetAttribute, (int* value, int attribute, Device))                                                      \
  X(cuGetErrorName, (Result, const char**))                                                                         \
  X(cuGetErrorString, (Result, const char**))                                                                       \
  X(cuMemGetInfo, (size_t* free_bytes, size_t* total_bytes))                                                        \
  X(cuLibraryLoadData, (Library*, const void* code, int* jit_options, void** jit_values, uint32_t num_jit,          \
                        int* options, void** values, uint32_t num_options))                                         \
  X(cuLibraryUnload, (Library))                                                                                     \
  X(cuLibraryGetKernel, (Kernel*, Library, const char* name))                                                       \
  X(cuKernelSetAttribute, (int attribute, int value, Kernel, Device))                                               \
  X(cuOccupancyMaxActiveClusters, (int* num_clusters, Function, const LaunchConfig*))                               \
  X(cuTensorMapEncodeTiled,                                                                                         \
    (TensorMap*, int dtype, uint32_t rank, void* address, const uint64_t* dims, const uint64_t* stride_bytes,       \
     const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int l2_promotion, int oob)) \
  X(cuLaunchKernelEx, (const LaunchConfig*, Function, void** params, void** extra))

struct Driver {
  int version;  // 1000 * major + 10 * minor of the CUDA that it supports
#define JBW_CUDA_MEMBER(name, parameters) Result(*name) parameters;
  JBW_CUDA_FUNCTIONS(JBW_CUDA_MEMBER)
#undef JBW_CUDA_MEMBER

  std::string ErrorText(Result result) const;  // "CUDA_ERROR_X (what it means)"
};

// Of a launch of `variant` that failed; `sizes` follow the device.
Status LaunchError(const Driver& driver, const std::string& variant, int device, Result result,
                   const std::string& sizes);

// The process's driver, found once; where none could be loaded, the next call tries again. Environment
// JAX_BWGEMM_LIBCUDA names another file than libcuda.so.1.
Status GetDriver(const Driver** driver);

}  // namespace jbw::cuda

#endif  // JAX_BWGEMM_CUDA_DRIVER_H_

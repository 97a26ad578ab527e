// Compiles only if ffi/cuda_driver.h declares what NVIDIA's cuda.h does.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "../../../ffi/cuda_driver.h"

namespace ours = jbw::cuda;

// Enums pass as ints and handles as pointers: equal size and pointerness is an equal calling convention.
template <typename X, typename Y>
constexpr bool kSameArgument = sizeof(X) == sizeof(Y) && std::is_pointer_v<X> == std::is_pointer_v<Y>;

template <typename X, typename Y>
constexpr bool kSameFunction = false;

template <typename R, typename... X, typename S, typename... Y>
constexpr bool kSameFunction<R (*)(X...), S (*)(Y...)> = [] {
  if constexpr (sizeof...(X) == sizeof...(Y)) {
    return sizeof(R) == sizeof(S) && (kSameArgument<X, Y> && ...);
  }
  return false;
}();

#define CHECK_FUNCTION(name, parameters) \
  static_assert(kSameFunction<decltype(ours::Driver::name), decltype(&::name)>, #name);
JBW_CUDA_FUNCTIONS(CHECK_FUNCTION)

static_assert(sizeof(ours::TensorMap) == sizeof(CUtensorMap));
static_assert(sizeof(ours::LaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(ours::LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(offsetof(ours::LaunchAttribute, value) + sizeof(CUlaunchAttributeValue) == sizeof(ours::LaunchAttribute));
static_assert(sizeof(ours::LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(ours::LaunchConfig, grid) == offsetof(CUlaunchConfig, gridDimX));
static_assert(offsetof(ours::LaunchConfig, block) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(ours::LaunchConfig, smem_bytes) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(ours::LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(ours::LaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(ours::LaunchConfig, num_attributes) == offsetof(CUlaunchConfig, numAttrs));

static_assert(ours::kSuccess == CUDA_SUCCESS);
static_assert(ours::kLaunchAttributeClusterDimension == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(ours::kLaunchAttributeProgrammaticStreamSerialization ==
              CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(std::is_same_v<decltype(CUlaunchAttributeValue::programmaticStreamSerializationAllowed), int32_t>);
static_assert(ours::kFunctionAttributeNonPortableClusterSize == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
static_assert(ours::kFunctionAttributeMaxDynamicSmem == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(ours::kDeviceAttributeMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(ours::kDeviceAttributeMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(ours::kTensorMapFloat16 == CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
static_assert(ours::kTensorMapFloat32 == CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
static_assert(ours::kTensorMapBfloat16 == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
static_assert(ours::kTensorMapTfloat32 == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32);
static_assert(ours::kTensorMapUint8 == CU_TENSOR_MAP_DATA_TYPE_UINT8);
static_assert(ours::kTensorMapInt32 == CU_TENSOR_MAP_DATA_TYPE_INT32);
static_assert(ours::kSwizzle32 == CU_TENSOR_MAP_SWIZZLE_32B);
static_assert(ours::kSwizzle64 == CU_TENSOR_MAP_SWIZZLE_64B);
static_assert(ours::kSwizzle128 == CU_TENSOR_MAP_SWIZZLE_128B);
static_assert(ours::kSwizzle128Atom32 == CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B);
static_assert(ours::kInterleaveNone == CU_TENSOR_MAP_INTERLEAVE_NONE);
static_assert(ours::kL2Promotion128 == CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
static_assert(ours::kOobFillZeros == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);

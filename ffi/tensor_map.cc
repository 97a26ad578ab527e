#include "tensor_map.h"

namespace jbw {
namespace {

int DtypeCode(int32_t dtype) {
  if (dtype == kFloat16) return cuda::kTensorMapFloat16;
  return dtype == kBfloat16 ? cuda::kTensorMapBfloat16 : cuda::kTensorMapFloat32;
}

int SwizzleCode(int32_t swizzle_bytes) {
  if (swizzle_bytes == 32) return cuda::kSwizzle32;
  return swizzle_bytes == 64 ? cuda::kSwizzle64 : cuda::kSwizzle128;
}

Status EncodeError(const cuda::Driver& driver, const JbwTensorMapSpec& spec, const char* name, const void* address,
                   cuda::Result result) {
  return Internal("the tensor map of `", name, "` requires legal arguments, got ", driver.ErrorText(result),
                  " for address ", address, ", sizes (", spec.dims[0], ", ", spec.dims[1], ", ", spec.dims[2],
                  "), strides (", spec.stride_bytes[0], ", ", spec.stride_bytes[1], ") bytes, box (", spec.box[0], ", ",
                  spec.box[1], ", ", spec.box[2], "): please report it");
}

}  // namespace

Status EncodeTensorMap(const cuda::Driver& driver, const JbwTensorMapSpec& spec, const char* name, void* address,
                       void* map) {
  constexpr uint32_t kRank = 3, kElementStrides[kRank] = {1, 1, 1};
  const cuda::Result result =
      driver.cuTensorMapEncodeTiled(static_cast<cuda::TensorMap*>(map), DtypeCode(spec.dtype), kRank, address,
                                    spec.dims, spec.stride_bytes, spec.box, kElementStrides, cuda::kInterleaveNone,
                                    SwizzleCode(spec.swizzle_bytes), cuda::kL2Promotion128, cuda::kOobFillZeros);
  return result == cuda::kSuccess ? Status() : EncodeError(driver, spec, name, address, result);
}

}  // namespace jbw

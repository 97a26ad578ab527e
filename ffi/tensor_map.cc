#include "tensor_map.h"

namespace jbw {
namespace {

int SwizzleCode(const JbwTensorMapSpec& spec) {
  if (spec.swizzle_bytes == 32) return cuda::kSwizzle32;
  if (spec.swizzle_bytes == 64) return cuda::kSwizzle64;
  return spec.swizzle_atom_bytes == 32 ? cuda::kSwizzle128Atom32 : cuda::kSwizzle128;
}

Status EncodeError(const cuda::Driver& driver, const JbwTensorMapSpec& spec, const std::string& role,
                   const void* address, cuda::Result result) {
  return Internal("the tensor map of `", role, "` requires legal arguments, got ", driver.ErrorText(result),
                  " for address ", address, ", sizes (", spec.dims[0], ", ", spec.dims[1], ", ", spec.dims[2],
                  "), strides (", spec.stride_bytes[0], ", ", spec.stride_bytes[1], ") bytes, box (", spec.box[0], ", ",
                  spec.box[1], ", ", spec.box[2], "): please report it");
}

}  // namespace

Status EncodeTensorMap(const cuda::Driver& driver, const JbwTensorMapSpec& spec, const std::string& role, void* address,
                       void* map) {
  constexpr uint32_t kRank = 3, kElementStrides[kRank] = {1, 1, 1};
  const cuda::Result result = driver.cuTensorMapEncodeTiled(
      static_cast<cuda::TensorMap*>(map), spec.data_type, kRank, address, spec.dims, spec.stride_bytes, spec.box,
      kElementStrides, cuda::kInterleaveNone, SwizzleCode(spec), cuda::kL2Promotion128, cuda::kOobFillZeros);
  return result == cuda::kSuccess ? Status() : EncodeError(driver, spec, role, address, result);
}

}  // namespace jbw

// A tensor-map specification and an address -> the 128 bytes that TMA reads.
#ifndef JAX_BWGEMM_TENSOR_MAP_H_
#define JAX_BWGEMM_TENSOR_MAP_H_

#include <string>

#include "cuda_driver.h"
#include "launch_plan.h"
#include "status.h"

namespace jbw {

// `map` is 64-byte aligned. `role` is the buffer's, for the error.
Status EncodeTensorMap(const cuda::Driver& driver, const JbwTensorMapSpec& spec, const std::string& role, void* address,
                       void* map);

}  // namespace jbw

#endif  // JAX_BWGEMM_TENSOR_MAP_H_

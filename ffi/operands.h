// What the buffers of a call say: dtypes, shapes, and the problem that they pose. Knows no tile, no CUDA and no XLA.
#ifndef JAX_BWGEMM_OPERANDS_H_
#define JAX_BWGEMM_OPERANDS_H_

#include <cstdint>
#include <string>

#include "status.h"

extern "C" {

// A row-major buffer. `dtype` counts as XLA_FFI_DataType does; rank -1 says that there is no such buffer.
struct JbwBuffer {
  int32_t dtype, rank;
  int64_t dims[3];
};

}  // extern "C"

namespace jbw {

inline constexpr int32_t kFloat16 = 10, kFloat32 = 11, kBfloat16 = 16;
inline constexpr int64_t kInt32Max = INT32_MAX;

struct Sizes {
  int64_t m, n, k, batch, a_batch, b_batch;
};

int64_t DtypeBytes(int32_t dtype);  // 0: not one of the three above

// Reads the problem off the buffers: a is (la, m, k) or (la, k, m), b (lb, k, n) or (lb, n, k), out (l, m, n), bias
// (n,).
Status ReadSizes(const JbwBuffer& a, const JbwBuffer& b, const JbwBuffer& out, const JbwBuffer& bias, int32_t a_major,
                 int32_t b_major, bool has_bias, Sizes* sizes);

}  // namespace jbw

#endif  // JAX_BWGEMM_OPERANDS_H_

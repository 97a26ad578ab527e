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

inline constexpr int32_t kInt8 = 2, kInt32 = 4, kUint8 = 6, kFloat16 = 10, kFloat32 = 11, kBfloat16 = 16;
inline constexpr int32_t kFloat8E5M2 = 19, kFloat8E4M3FN = 20;
inline constexpr int32_t kAlignBytes = 16;  // of TMA's addresses and row pitches (cuTensorMapEncodeTiled)
inline constexpr int32_t kLineBytes = 128;  // of the L2 cache
inline constexpr int64_t kInt32Max = INT32_MAX;

struct Buffers {
  const JbwBuffer &a, &b, &out, &bias, &residual;
};

struct Optionals {
  bool bias, residual, workspace;  // whether the kernel takes one
};

struct Sizes {
  int64_t m, n, k, batch, a_batch, b_batch;
};

struct Majors {
  int32_t a, b, c;  // the characters 'k', 'm', 'n': the contiguous dimension of each
};

int64_t DtypeBytes(int32_t dtype);  // 0: not one of those above

// What rows of `size` elements may be padded to: the multiples of 16 bytes up to the end of their last cache line.
// Which one is Python's to say (`padding`).
struct Pitches {
  Pitches(int64_t size, int64_t element_bytes);
  bool Contain(int64_t pitch) const { return pitch >= least && pitch <= most && pitch % step == 0; }
  std::string Text() const { return Cat(least, "..", most, " in steps of ", step); }

  int64_t step, least, most;  // elements
};

// Reads the problem off the buffers: a is (la, m, k) or (la, k, m), b (lb, k, n) or (lb, n, k), out (l, m, n) or
// (l, n, m), bias (n,), residual as out. The contiguous dimension of a and b, if no multiple of 16 bytes, may be padded
// with zeros to one, as far as to the end of its cache line: m and n are the result's, k is the smaller one.
Status ReadSizes(const Buffers& buffers, const Majors& majors, const Optionals& has, Sizes* sizes);

}  // namespace jbw

#endif  // JAX_BWGEMM_OPERANDS_H_

// The buffers of a call against the rules of its kernel: dtypes, shapes, and the problem that they pose. Knows no tile,
// no CUDA and no XLA.
#ifndef JAX_BWGEMM_OPERANDS_H_
#define JAX_BWGEMM_OPERANDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "buffer_rules.h"
#include "status.h"

extern "C" {

// A row-major buffer. `dtype` counts as XLA_FFI_DataType does.
struct JbwBuffer {
  int32_t dtype, rank;
  int64_t dims[3];
};

// Operands, then results. No result at all says that shapes come later.
struct JbwBuffers {
  const JbwBuffer* all;
  int32_t num_operands, num_results;
};

}  // extern "C"

namespace jbw {

inline constexpr int32_t kLineBytes = 128;  // of the L2 cache
inline constexpr int64_t kInt32Max = INT32_MAX;

struct Sizes {
  int64_t batch, m, n, k, one = 1;
};

// What rows of `size` elements may be padded to: the multiples of 16 bytes up to the end of their last cache line.
// Which one is Python's to say (`padding`).
struct Pitches {
  Pitches(int64_t size, int64_t element_bytes);
  bool Contain(int64_t pitch) const { return pitch >= least && pitch <= most && pitch % step == 0; }
  std::string Text() const { return Cat(least, "..", most, " in steps of ", step); }

  int64_t step, least, most;  // elements
};

// The buffers of a call, with a batch of 1 where a matrix of l, m and n has none: XLA would copy a matrix that is
// reshaped before it is stored over.
std::vector<JbwBuffer> WithBatch(const BufferRules& rules, const JbwBuffers& buffers);

// m, n and the batch are the first result's, k is the operands' smallest; everything else must agree with them.
Status ReadSizes(const BufferRules& rules, const JbwBuffers& buffers, Sizes* sizes);

}  // namespace jbw

#endif  // JAX_BWGEMM_OPERANDS_H_

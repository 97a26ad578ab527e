// What a kernel's buffers must be, read from the texts of its recipe: docs/architecture.md, "Kernel parameter block".
// Knows no actual buffer, no tile and no CUDA call.
#ifndef JAX_BWGEMM_BUFFER_RULES_H_
#define JAX_BWGEMM_BUFFER_RULES_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attributes.h"
#include "status.h"

#define JBW_MAX_BUFFERS 16

namespace jbw {

inline constexpr int32_t kAlignBytes = 16;  // of TMA's addresses and row pitches (cuTensorMapEncodeTiled)

// One dimension of a buffer: the batch (l), m, n, k, one, or any number of bytes.
enum class Extent : char { kBatch = 'l', kM = 'm', kN = 'n', kK = 'k', kOne = '1', kBytes = 'b' };

struct Dim {
  Extent extent;
  bool may_be_one;     // one for the whole batch
  bool may_be_padded;  // zeros may follow, if TMA cannot step over rows of this size
  int32_t every;       // there is one for so many, or for what is left of them
};

struct BufferRule {
  std::string role;
  int32_t dtype;
  std::vector<Dim> dims;  // the contiguous one last
  int32_t align_bytes;
  bool is_result;
};

struct TensorMapRule {
  int32_t buffer, data_type, element_bytes;
  int32_t box[3];  // innermost first
  int32_t swizzle_bytes, swizzle_atom_bytes;
};

// In the order of the custom call, operands first. The first result has l, m and n.
struct BufferRules {
  std::vector<BufferRule> all;
  std::vector<TensorMapRule> tensor_maps;  // at most two a buffer, whose boxes differ

  const TensorMapRule* TensorMapOf(int32_t buffer, bool is_second = false) const;
  const BufferRule& result() const;
  std::string RolesText() const;  // "operands a, b and results out"
};

Status ReadBufferRules(const Attributes& attrs, BufferRules* rules);

}  // namespace jbw

#endif  // JAX_BWGEMM_BUFFER_RULES_H_

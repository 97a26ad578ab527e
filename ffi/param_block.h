// The kernel parameter block: its leaves, read from the text of a recipe, and the packing of all that is no address.
// Addresses (descriptors, pointers) come later: see call.cc.
#ifndef JAX_BWGEMM_PARAM_BLOCK_H_
#define JAX_BWGEMM_PARAM_BLOCK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "attributes.h"
#include "buffer_rules.h"
#include "operands.h"
#include "status.h"
#include "tile_walk.h"

#define JBW_MAX_PARAMS 64
#define JBW_MAX_PARAM_BYTES 4096  // CUDA C++ programming guide, __global__ function parameters

namespace jbw {

enum class Source { kTensorMap, kSecondMap, kPointer, kSize, kStep, kInt, kFloat, kL2Policy, kToken, kWalk };

struct Leaf {
  Source source;
  std::string name;  // as the recipe has it: "tma:0", "int:raster_group"
  int32_t buffer;    // of its first or second tensor map, a pointer or a batch step
  Extent extent;     // of a size
  WalkPart part;     // of a walk
  uint64_t value;    // of an attribute, as the kernel takes it
  int32_t offset, bytes;
};

// In the order of the kernel's parameters.
struct Leaves {
  std::vector<Leaf> all;
  int32_t bytes;  // of the block
  WalkRule walk;

  int32_t OffsetOf(Source source, int32_t buffer) const;  // -1: the kernel does not take it
};

// Reads the attributes, too, that leaves name.
Status ReadLeaves(const Attributes& attrs, const BufferRules& rules, Leaves* leaves);

// Writes every leaf that is not an address into `block`.
void PackParams(const Leaves& leaves, const JbwBuffers& buffers, const BufferRules& rules, const Sizes& sizes,
                const TileWalk& walk, uint64_t token, unsigned char* block);

}  // namespace jbw

#endif  // JAX_BWGEMM_PARAM_BLOCK_H_

// Everything about a launch that buffers' shapes and a custom call's attributes determine: grid, cluster, tensor-map
// specifications and the packed parameter block. Pure host arithmetic: no CUDA, no XLA. The plan is part of the C ABI
// (`jax_bwgemm/runtime/ffi.py` mirrors it), so that tests and the emulator run the packing that the GPU sees.
#ifndef JAX_BWGEMM_LAUNCH_PLAN_H_
#define JAX_BWGEMM_LAUNCH_PLAN_H_

#include <cstdint>

#include "attributes.h"
#include "buffer_rules.h"
#include "operands.h"
#include "param_block.h"
#include "status.h"

extern "C" {

// The arguments of one cuTensorMapEncodeTiled but its address. Dimensions innermost first: (contiguous, other, batch).
struct JbwTensorMapSpec {
  int32_t data_type;  // CUtensorMapDataType
  int32_t swizzle_bytes, swizzle_atom_bytes;
  uint64_t dims[3];
  uint64_t stride_bytes[2];  // of dims[1] and dims[2]
  uint32_t box[3];
};

// What a launch does with one buffer.
struct JbwBufferUse {
  int32_t align_bytes;                                    // what its address must be a multiple of
  int32_t map_offset, second_map_offset, pointer_offset;  // where its descriptors and its address go in the block; -1:
                                                          // nowhere
  JbwTensorMapSpec map, second_map;                       // if it has them
};

struct JbwLaunchPlan {
  uint32_t grid[3], block[3], cluster[3];
  uint32_t smem_bytes;
  int64_t num_cluster_tiles;
  int32_t pdl;
  int32_t num_buffers, num_params, param_bytes;
  JbwBufferUse buffers[JBW_MAX_BUFFERS];      // in the order of the custom call
  int32_t param_offsets[JBW_MAX_PARAMS];      // of the kernel's parameters, in its order
  unsigned char params[JBW_MAX_PARAM_BYTES];  // zeros where addresses go
};

}  // extern "C"

namespace jbw {

constexpr int32_t kTileGridAlongN = 2;

struct Geometry {
  int32_t cta_m, mma_n, out_n;  // columns of the accumulator, and of the result: half as many of a gated product
  int32_t cluster_m, cluster_n, cluster_k, num_threads, smem_bytes;
  int32_t stream_tiles, stream_clusters;  // how many tiles, the last ones, how many clusters share, if the kernel can
  int32_t tile_grid;                      // 1: a CTA for each tile, (tiles along m, along n, batch); 2: along n first
  int32_t rounds;                         // clusters that follow each other where one would stay, in a persistent grid
  int32_t parts;                          // of k, of each of which the kernel makes a matrix of the batch
  int32_t pdl;                            // 1: the kernel may start before the one before it ends
};

// All that a custom call's attributes say, with every text read and every check made that no buffer enters.
struct LaunchRequest {
  Geometry geometry;
  BufferRules rules;
  Leaves leaves;
};

// What a process adds.
struct LaunchContext {
  int32_t max_active_clusters;  // of the device
  uint64_t token;               // the value of a raised flag in a workspace
};

Status ReadLaunchRequest(const Attributes& attrs, LaunchRequest* request);

Status MakeLaunchPlan(const LaunchRequest& request, const JbwBuffers& buffers, const LaunchContext& context,
                      JbwLaunchPlan* plan);

}  // namespace jbw

#endif  // JAX_BWGEMM_LAUNCH_PLAN_H_

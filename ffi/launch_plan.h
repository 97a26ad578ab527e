// Everything about a launch that buffers' shapes and a variant's manifest determine: grid, cluster, tensor-map
// specifications and the packed parameter block. Pure host arithmetic on plain structs: no CUDA, no XLA. The structs
// are the C ABI too (`jax_bwgemm/ffi.py` mirrors them), so that tests and the emulator run the packing that the GPU
// sees.
#ifndef JAX_BWGEMM_LAUNCH_PLAN_H_
#define JAX_BWGEMM_LAUNCH_PLAN_H_

#include <cstdint>

#include "operands.h"
#include "param_block.h"
#include "status.h"

extern "C" {

// One custom call. `a`, `b`, `out`, `bias`, `residual` and `workspace` are its buffers; the rest are its attributes,
// under their names.
struct JbwLaunchRequest {
  JbwBuffer a, b, out, bias, residual, workspace;
  int32_t a_major, b_major, c_major;  // the characters 'k', 'm', 'n'
  int32_t cta_m, mma_n, cluster_m, cluster_n, cluster_k;
  int32_t num_threads, smem_bytes;
  int32_t raster_group, raster_along_n, raster_order;
  int32_t a_l2, b_l2;                     // as in ParamValues
  int32_t stream_tiles, stream_clusters;  // how many tiles, the last ones, how many clusters share, if the kernel can
  int32_t pdl;                            // 1: the kernel may start before the one before it ends
  float alpha;
  uint64_t token;                 // the value of a raised flag in the workspace
  int32_t box[3][3];              // of a, b, out (and the residual); innermost first; zeros where no tensor map is
  int32_t swizzle_bytes[3];       // the same
  int32_t swizzle_atom_bytes[3];  // the same; 16, or 32 for operands of 4 bytes whose k is not contiguous
  int32_t param_bytes, num_params;
  JbwParam params[JBW_MAX_PARAMS];
  int32_t max_active_clusters;  // of the device
};

// The arguments of one cuTensorMapEncodeTiled but its address. Dimensions innermost first: (contiguous, other, batch).
struct JbwTensorMapSpec {
  int32_t data_type;  // CUtensorMapDataType; float32 operands are TFLOAT32, which TMA rounds on its way
  int32_t swizzle_bytes, swizzle_atom_bytes;
  uint64_t dims[3];
  uint64_t stride_bytes[2];  // of dims[1] and dims[2]
  uint32_t box[3];
  int32_t param_offset;  // where the descriptor goes in the parameter block; -1: nowhere
};

struct JbwLaunchPlan {
  uint32_t grid[3], block[3], cluster[3];
  uint32_t smem_bytes;
  int64_t num_cluster_tiles;
  JbwTensorMapSpec tensor_maps[4];                  // a, b, out, residual
  int32_t c_offset, bias_offset, workspace_offset;  // where the pointers to these go; -1: nowhere
  int32_t out_align_bytes;                          // what the result's address must be a multiple of
  int32_t pdl;
  int32_t num_params;
  int32_t param_offsets[JBW_MAX_PARAMS];  // of the kernel's parameters, in its order
  int32_t param_bytes;
  unsigned char params[JBW_MAX_PARAM_BYTES];  // zeros where addresses go
};

}  // extern "C"

namespace jbw {

// Which buffers there are beside a, b and out: what the kernel's parameters name.
Optionals OptionalsOf(const JbwLaunchRequest& request);

// The part of MakeLaunchPlan's checks that no buffer enters.
Status CheckAttributes(const JbwLaunchRequest& request);

Status MakeLaunchPlan(const JbwLaunchRequest& request, JbwLaunchPlan* plan);

}  // namespace jbw

#endif  // JAX_BWGEMM_LAUNCH_PLAN_H_

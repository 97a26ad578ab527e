// The kernel parameter block: which kinds of leaves there are, whether a list of them is one that we can pack, and the
// packing. Addresses (descriptors, pointers) come later: see call.cc.
#ifndef JAX_BWGEMM_PARAM_BLOCK_H_
#define JAX_BWGEMM_PARAM_BLOCK_H_

#include <cstdint>

#include "operands.h"
#include "status.h"

#define JBW_MAX_PARAMS 24
#define JBW_MAX_PARAM_BYTES 1024

extern "C" {

struct JbwParam {
  int32_t kind, offset, size;
};

}  // extern "C"

namespace jbw {

// A code is a position in Python's `artifacts.PARAM_KINDS`; a test compares the two lists.
enum ParamKind : int32_t {
  kTmaA,
  kTmaB,
  kTmaC,
  kTmaR,
  kC,
  kM,
  kN,
  kK,
  kBatch,
  kABatchStep,
  kBBatchStep,
  kRasterGroup,
  kRasterAlongN,
  kRasterOrder,
  kAPolicy,
  kBPolicy,
  kStreamTiles,
  kStreamClusters,
  kWorkspace,
  kToken,
  kAlpha,
  kBias,
  kNumParamKinds,
};

const char* ParamKindName(int32_t kind);  // nullptr: there is no such kind

struct ParamList {
  const JbwParam* params;
  int32_t num_params, param_bytes;
};

Status CheckParams(const ParamList& list);

int32_t FindParam(const ParamList& list, ParamKind kind);  // its offset; -1: the kernel does not take it

inline constexpr int32_t kNumL2Policies = 3;

struct ParamValues {
  Sizes sizes;
  int32_t raster_group, raster_along_n;
  int32_t raster_order;  // 0: groups, 1: snake
  int32_t a_l2, b_l2;    // 0: normal, 1: evict_first, 2: evict_last
  int32_t stream_tiles, stream_clusters;
  float alpha;
  uint64_t token;
};

// Writes every leaf that is not an address into `block`, which is param_bytes long.
void PackParams(const ParamList& list, const ParamValues& values, unsigned char* block);

}  // namespace jbw

#endif  // JAX_BWGEMM_PARAM_BLOCK_H_

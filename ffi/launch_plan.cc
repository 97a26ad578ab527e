#include "launch_plan.h"

#include <algorithm>

#include "cuda_driver.h"

namespace jbw {
namespace {

constexpr int64_t kMaxGridZ = 65535;                         // CUDA C++ programming guide, technical specifications
constexpr int64_t kMaxClusterTiles = kInt32Max - kMaxGridZ;  // a CTA's last step past the end stays an int32
constexpr uint64_t kMaxStrideBytes = uint64_t{1} << 40;      // cuTensorMapEncodeTiled: strides below 2^40
constexpr int32_t kMaxBoxDim = 256;                          // the same
constexpr int64_t kMaxClusterCtas = 16;                      // of H100 and B200, CUDA C++ programming guide, clusters
constexpr const char* kNames[4] = {"a", "b", "out", "residual"};
constexpr ParamKind kTensorMaps[4] = {kTmaA, kTmaB, kTmaC, kTmaR};

constexpr int64_t kFlagBytes = 4096;     // Python's tile.FLAG_BYTES
constexpr int64_t kFlagBytesOfCta = 16;  // two store groups

int64_t CeilDiv(int64_t x, int64_t y) { return (x + y - 1) / y; }

ParamList Params(const JbwLaunchRequest& request) { return {request.params, request.num_params, request.param_bytes}; }

bool Has(const JbwLaunchRequest& request, ParamKind kind) { return FindParam(Params(request), kind) >= 0; }

Status CheckRange(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  return InvalidArgument("`", name, "` requires ", low, "..", high, ", got ", value);
}

std::string MajorText(int32_t major) {
  return major > ' ' && major < 127 ? Cat("'", static_cast<char>(major), "'") : Cat("code ", major);
}

Status CheckMajors(const JbwLaunchRequest& request) {
  if (request.a_major != 'k' && request.a_major != 'm') {
    return InvalidArgument("`a_major` requires 'k' or 'm', got ", MajorText(request.a_major));
  }
  if (request.b_major != 'n' && request.b_major != 'k') {
    return InvalidArgument("`b_major` requires 'n' or 'k', got ", MajorText(request.b_major));
  }
  if (request.c_major != 'n' && request.c_major != 'm') {
    return InvalidArgument("`c_major` requires 'n' or 'm', got ", MajorText(request.c_major));
  }
  return {};
}

Status CheckCluster(const JbwLaunchRequest& request) {
  JBW_RETURN_IF_ERROR(CheckRange("cluster_m", request.cluster_m, 1, kMaxClusterCtas));
  JBW_RETURN_IF_ERROR(CheckRange("cluster_n", request.cluster_n, 1, kMaxClusterCtas));
  JBW_RETURN_IF_ERROR(CheckRange("cluster_k", request.cluster_k, 1, kMaxClusterCtas));
  return CheckRange("cluster_m * cluster_n * cluster_k", request.cluster_m * request.cluster_n * request.cluster_k, 1,
                    kMaxClusterCtas);
}

Status CheckBox(const char* name, const int32_t (&box)[3], int32_t swizzle_bytes, int32_t swizzle_atom_bytes) {
  for (int32_t size : box) {
    if (size < 1 || size > kMaxBoxDim) {
      return InvalidArgument("the TMA box of `", name, "` requires sizes of 1..", kMaxBoxDim, ", got (", box[0], ", ",
                             box[1], ", ", box[2], ")");
    }
  }
  if (swizzle_bytes != 32 && swizzle_bytes != 64 && swizzle_bytes != 128) {
    return InvalidArgument("`swizzle_bytes` of `", name, "` requires 32, 64 or 128, got ", swizzle_bytes);
  }
  if (swizzle_atom_bytes == 16 || (swizzle_atom_bytes == 32 && swizzle_bytes == 128)) return {};
  return InvalidArgument("`swizzle_atom_bytes` of `", name, "` requires 16, or 32 in a span of 128, got ",
                         swizzle_atom_bytes, " in ", swizzle_bytes);
}

// The result's box counts only where TMA stores it.
Status CheckBoxes(const JbwLaunchRequest& request) {
  const int num_maps = Has(request, kTmaC) ? 3 : 2;
  for (int i = 0; i < num_maps; ++i) {
    JBW_RETURN_IF_ERROR(CheckBox(kNames[i], request.box[i], request.swizzle_bytes[i], request.swizzle_atom_bytes[i]));
  }
  return {};
}

// How many clusters the workspace has room for: flags and a float32 accumulator for each of their CTAs.
Status WorkspaceClusters(const JbwLaunchRequest& request, int64_t* num_clusters) {
  const int64_t ctas = int64_t{request.cluster_m} * request.cluster_n * request.cluster_k;
  const int64_t cluster_bytes = ctas * request.cta_m * request.mma_n * 4;
  const int64_t bytes = request.workspace.dims[0];
  *num_clusters = std::min((bytes - kFlagBytes) / cluster_bytes, kFlagBytes / (kFlagBytesOfCta * ctas));
  if (request.workspace.rank == 1 && *num_clusters >= 1) return {};
  return InvalidArgument("the workspace requires rank 1 and at least ", kFlagBytes + cluster_bytes, " bytes, got rank ",
                         request.workspace.rank, " and ", bytes);
}

// A cluster tile is cluster_m * cta_m rows by cluster_n * mma_n columns; the cluster's CTAs along z divide its k.
Status PlanGrid(const JbwLaunchRequest& request, const Sizes& sizes, JbwLaunchPlan* plan) {
  JBW_RETURN_IF_ERROR(CheckRange("max_active_clusters", request.max_active_clusters, 1, kInt32Max));
  const int64_t tiles_m = CeilDiv(sizes.m, int64_t{request.cluster_m} * request.cta_m);
  const int64_t tiles_n = CeilDiv(sizes.n, int64_t{request.cluster_n} * request.mma_n);
  const int64_t tiles_mn = tiles_m * tiles_n;  // below 2^62
  if (tiles_mn > kMaxClusterTiles || tiles_mn * sizes.batch > kMaxClusterTiles) {
    return InvalidArgument("a launch requires at most ", kMaxClusterTiles, " cluster tiles, got ", tiles_m, " x ",
                           tiles_n, " x ", sizes.batch, ": split the batch");
  }
  plan->num_cluster_tiles = tiles_mn * sizes.batch;
  int64_t num_clusters =
      std::min({plan->num_cluster_tiles, int64_t{request.max_active_clusters}, kMaxGridZ / request.cluster_k});
  if (Has(request, kWorkspace)) {  // fewer tiles than clusters may be shared by more of them
    int64_t with_room;
    JBW_RETURN_IF_ERROR(WorkspaceClusters(request, &with_room));
    const int64_t sharing = request.stream_tiles > 0 ? request.stream_clusters : 1;
    num_clusters =
        std::min({std::max(plan->num_cluster_tiles, sharing), int64_t{request.max_active_clusters}, with_room});
  }
  plan->grid[0] = plan->cluster[0] = static_cast<uint32_t>(request.cluster_m);
  plan->grid[1] = plan->cluster[1] = static_cast<uint32_t>(request.cluster_n);
  plan->cluster[2] = static_cast<uint32_t>(request.cluster_k);
  plan->grid[2] = plan->cluster[2] * static_cast<uint32_t>(num_clusters);
  plan->block[0] = static_cast<uint32_t>(request.num_threads);
  plan->block[1] = plan->block[2] = 1;
  plan->smem_bytes = static_cast<uint32_t>(request.smem_bytes);
  return {};
}

int32_t TensorMapType(int32_t dtype, bool is_operand) {
  switch (dtype) {
    case kFloat16:
      return cuda::kTensorMapFloat16;
    case kBfloat16:
      return cuda::kTensorMapBfloat16;
    case kFloat32:
      return is_operand ? cuda::kTensorMapTfloat32 : cuda::kTensorMapFloat32;
    case kInt32:
      return cuda::kTensorMapInt32;
    default:
      return cuda::kTensorMapUint8;  // whatever has one byte
  }
}

// Of operand `i` of a, b, out, residual: row-major (batch, rows, contiguous) whatever its major, which only says which
// size is which. A residual is moved as the result is.
Status PlanTensorMap(const JbwLaunchRequest& request, int i, const JbwBuffer& buffer, JbwTensorMapSpec* spec) {
  const char* const name = kNames[i];
  const int box_idx = std::min(i, 2);
  const int32_t (&box)[3] = request.box[box_idx];
  const int32_t swizzle_bytes = request.swizzle_bytes[box_idx];
  const int64_t elem_bytes = DtypeBytes(buffer.dtype);
  if (box[0] * elem_bytes != swizzle_bytes) {
    return InvalidArgument("the TMA box of `", name, "` requires an innermost size of its swizzle span, ",
                           swizzle_bytes, " bytes, got ", box[0], " elements of ", elem_bytes, " bytes");
  }
  const auto rows = static_cast<uint64_t>(buffer.dims[1]), columns = static_cast<uint64_t>(buffer.dims[2]);
  const uint64_t pitch_bytes = columns * static_cast<uint64_t>(elem_bytes);
  if (pitch_bytes % kAlignBytes) {
    return InvalidArgument("TMA requires a row pitch that is a multiple of ", kAlignBytes, " bytes, got ", pitch_bytes,
                           " bytes for `", name, "`: pad its last dimension");
  }
  if (rows * pitch_bytes >= kMaxStrideBytes) {  // sizes below 2^31: the product fits 64 bits
    return InvalidArgument("TMA requires a matrix of less than 2^40 bytes, got ", rows, " rows of ", pitch_bytes,
                           " bytes for `", name, "`");
  }
  *spec = {TensorMapType(buffer.dtype, i < 2),
           swizzle_bytes,
           request.swizzle_atom_bytes[box_idx],
           {columns, rows, static_cast<uint64_t>(buffer.dims[0])},
           {pitch_bytes, rows * pitch_bytes},
           {static_cast<uint32_t>(box[0]), static_cast<uint32_t>(box[1]), static_cast<uint32_t>(box[2])},
           FindParam(Params(request), kTensorMaps[i])};
  return {};
}

Status PlanTensorMaps(const JbwLaunchRequest& request, JbwLaunchPlan* plan) {
  const JbwBuffer* const buffers[4] = {&request.a, &request.b, &request.out, &request.residual};
  for (int i = 0; i < 4; ++i) {
    plan->tensor_maps[i].param_offset = -1;
    if (!Has(request, kTensorMaps[i])) continue;
    JBW_RETURN_IF_ERROR(PlanTensorMap(request, i, *buffers[i], &plan->tensor_maps[i]));
  }
  return {};
}

}  // namespace

Optionals OptionalsOf(const JbwLaunchRequest& request) {
  return {Has(request, kBias), Has(request, kTmaR), Has(request, kWorkspace)};
}

Status CheckAttributes(const JbwLaunchRequest& request) {
  JBW_RETURN_IF_ERROR(CheckParams(Params(request)));
  JBW_RETURN_IF_ERROR(CheckMajors(request));
  JBW_RETURN_IF_ERROR(CheckRange("cta_m", request.cta_m, 1, 512));
  JBW_RETURN_IF_ERROR(CheckRange("mma_n", request.mma_n, 1, 512));
  JBW_RETURN_IF_ERROR(CheckCluster(request));
  JBW_RETURN_IF_ERROR(CheckRange("num_threads", request.num_threads, 1, 1024));
  JBW_RETURN_IF_ERROR(CheckRange("smem_bytes", request.smem_bytes, 0, 1 << 20));
  JBW_RETURN_IF_ERROR(CheckRange("raster_group", request.raster_group, 1, kInt32Max));
  JBW_RETURN_IF_ERROR(CheckRange("raster_along_n", request.raster_along_n, 0, 1));
  JBW_RETURN_IF_ERROR(CheckRange("raster_order", request.raster_order, 0, 1));
  JBW_RETURN_IF_ERROR(CheckRange("a_l2", request.a_l2, 0, kNumL2Policies - 1));
  JBW_RETURN_IF_ERROR(CheckRange("b_l2", request.b_l2, 0, kNumL2Policies - 1));
  JBW_RETURN_IF_ERROR(CheckRange("pdl", request.pdl, 0, 1));
  JBW_RETURN_IF_ERROR(CheckRange("stream_tiles", request.stream_tiles, 0, kInt32Max));
  JBW_RETURN_IF_ERROR(CheckRange("stream_clusters", request.stream_clusters, 1, kMaxGridZ));
  return CheckBoxes(request);
}

Status MakeLaunchPlan(const JbwLaunchRequest& request, JbwLaunchPlan* plan) {
  *plan = {};
  JBW_RETURN_IF_ERROR(CheckAttributes(request));
  Sizes sizes;
  JBW_RETURN_IF_ERROR(ReadSizes({request.a, request.b, request.out, request.bias, request.residual},
                                {request.a_major, request.b_major, request.c_major}, OptionalsOf(request), &sizes));
  JBW_RETURN_IF_ERROR(PlanGrid(request, sizes, plan));
  JBW_RETURN_IF_ERROR(PlanTensorMaps(request, plan));
  plan->c_offset = FindParam(Params(request), kC);
  plan->bias_offset = FindParam(Params(request), kBias);
  plan->workspace_offset = FindParam(Params(request), kWorkspace);
  plan->out_align_bytes = plan->c_offset < 0 ? kAlignBytes : static_cast<int32_t>(DtypeBytes(request.out.dtype));
  plan->pdl = request.pdl;
  plan->num_params = request.num_params;
  for (int i = 0; i < request.num_params; ++i) plan->param_offsets[i] = request.params[i].offset;
  plan->param_bytes = request.param_bytes;
  PackParams(Params(request),
             {sizes, request.raster_group, request.raster_along_n, request.raster_order, request.a_l2, request.b_l2,
              request.stream_tiles, request.stream_clusters, request.alpha, request.token},
             plan->params);
  return {};
}

}  // namespace jbw

#include "launch_plan.h"

#include <algorithm>

namespace jbw {
namespace {

constexpr int64_t kMaxGridZ = 65535;                           // CUDA C++ programming guide, technical specifications
constexpr int64_t kMaxClusterTiles = kInt32Max - kMaxGridZ;    // a CTA's last step past the end stays an int32
constexpr uint64_t kMaxStrideBytes = uint64_t{1} << 40;        // cuTensorMapEncodeTiled: strides below 2^40
constexpr int32_t kPitchMultipleBytes = 16, kMaxBoxDim = 256;  // the same
constexpr int64_t kMaxClusterCtas = 8;  // the portable size, CUDA C++ programming guide, thread block clusters
constexpr const char* kNames[3] = {"a", "b", "out"};

int64_t CeilDiv(int64_t x, int64_t y) { return (x + y - 1) / y; }

ParamList Params(const JbwLaunchRequest& request) { return {request.params, request.num_params, request.param_bytes}; }

bool HasBias(const JbwLaunchRequest& request) { return FindParam(Params(request), kBias) >= 0; }

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
  return {};
}

Status CheckBox(const char* name, const int32_t (&box)[3], int32_t swizzle_bytes) {
  for (int32_t size : box) {
    if (size < 1 || size > kMaxBoxDim) {
      return InvalidArgument("the TMA box of `", name, "` requires sizes of 1..", kMaxBoxDim, ", got (", box[0], ", ",
                             box[1], ", ", box[2], ")");
    }
  }
  if (swizzle_bytes == 32 || swizzle_bytes == 64 || swizzle_bytes == 128) return {};
  return InvalidArgument("`swizzle_bytes` of `", name, "` requires 32, 64 or 128, got ", swizzle_bytes);
}

// A cluster tile is cluster_m * cta_m rows by cluster_n * mma_n columns.
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
  const int64_t grid_z = std::min({plan->num_cluster_tiles, int64_t{request.max_active_clusters}, kMaxGridZ});
  plan->grid[0] = plan->cluster[0] = static_cast<uint32_t>(request.cluster_m);
  plan->grid[1] = plan->cluster[1] = static_cast<uint32_t>(request.cluster_n);
  plan->grid[2] = static_cast<uint32_t>(grid_z);
  plan->block[0] = static_cast<uint32_t>(request.num_threads);
  plan->cluster[2] = plan->block[1] = plan->block[2] = 1;
  plan->smem_bytes = static_cast<uint32_t>(request.smem_bytes);
  return {};
}

// `buffer` is row-major (batch, rows, contiguous) whatever its major: the major only says which size is which.
Status PlanTensorMap(const char* name, const JbwBuffer& buffer, const int32_t (&box)[3], int32_t swizzle_bytes,
                     int32_t param_offset, JbwTensorMapSpec* spec) {
  const int64_t elem_bytes = DtypeBytes(buffer.dtype);
  if (box[0] * elem_bytes != swizzle_bytes) {
    return InvalidArgument("the TMA box of `", name, "` requires an innermost size of its swizzle span, ",
                           swizzle_bytes, " bytes, got ", box[0], " elements of ", elem_bytes, " bytes");
  }
  const auto rows = static_cast<uint64_t>(buffer.dims[1]), columns = static_cast<uint64_t>(buffer.dims[2]);
  const uint64_t pitch_bytes = columns * static_cast<uint64_t>(elem_bytes);
  if (pitch_bytes % kPitchMultipleBytes) {
    return InvalidArgument("TMA requires a row pitch that is a multiple of ", kPitchMultipleBytes, " bytes, got ",
                           pitch_bytes, " bytes for `", name, "`: pad its last dimension");
  }
  if (rows * pitch_bytes >= kMaxStrideBytes) {  // sizes below 2^31: the product fits 64 bits
    return InvalidArgument("TMA requires a matrix of less than 2^40 bytes, got ", rows, " rows of ", pitch_bytes,
                           " bytes for `", name, "`");
  }
  *spec = {buffer.dtype,
           swizzle_bytes,
           {columns, rows, static_cast<uint64_t>(buffer.dims[0])},
           {pitch_bytes, rows * pitch_bytes},
           {},
           param_offset};
  for (int i = 0; i < 3; ++i) spec->box[i] = static_cast<uint32_t>(box[i]);
  return {};
}

Status PlanTensorMaps(const JbwLaunchRequest& request, JbwLaunchPlan* plan) {
  const JbwBuffer* buffers[3] = {&request.a, &request.b, &request.out};
  for (int i = 0; i < 3; ++i) {
    const int32_t offset = FindParam(Params(request), static_cast<ParamKind>(kTmaA + i));
    JBW_RETURN_IF_ERROR(
        PlanTensorMap(kNames[i], *buffers[i], request.box[i], request.swizzle_bytes[i], offset, &plan->tensor_maps[i]));
  }
  return {};
}

}  // namespace

Status CheckAttributes(const JbwLaunchRequest& request) {
  JBW_RETURN_IF_ERROR(CheckMajors(request));
  JBW_RETURN_IF_ERROR(CheckRange("cta_m", request.cta_m, 1, 512));
  JBW_RETURN_IF_ERROR(CheckRange("mma_n", request.mma_n, 1, 512));
  JBW_RETURN_IF_ERROR(CheckRange("cluster_m", request.cluster_m, 1, kMaxClusterCtas));
  JBW_RETURN_IF_ERROR(CheckRange("cluster_n", request.cluster_n, 1, kMaxClusterCtas));
  JBW_RETURN_IF_ERROR(CheckRange("cluster_m * cluster_n", request.cluster_m * request.cluster_n, 1, kMaxClusterCtas));
  JBW_RETURN_IF_ERROR(CheckRange("num_threads", request.num_threads, 1, 1024));
  JBW_RETURN_IF_ERROR(CheckRange("smem_bytes", request.smem_bytes, 0, 1 << 20));
  JBW_RETURN_IF_ERROR(CheckRange("raster_group", request.raster_group, 1, kInt32Max));
  JBW_RETURN_IF_ERROR(CheckRange("raster_along_n", request.raster_along_n, 0, 1));
  for (int i = 0; i < 3; ++i) JBW_RETURN_IF_ERROR(CheckBox(kNames[i], request.box[i], request.swizzle_bytes[i]));
  return CheckParams(Params(request));
}

Status MakeLaunchPlan(const JbwLaunchRequest& request, JbwLaunchPlan* plan) {
  *plan = {};
  JBW_RETURN_IF_ERROR(CheckAttributes(request));
  Sizes sizes;
  JBW_RETURN_IF_ERROR(ReadSizes(request.a, request.b, request.out, request.bias, request.a_major, request.b_major,
                                HasBias(request), &sizes));
  JBW_RETURN_IF_ERROR(PlanGrid(request, sizes, plan));
  JBW_RETURN_IF_ERROR(PlanTensorMaps(request, plan));
  plan->bias_offset = FindParam(Params(request), kBias);
  plan->num_params = request.num_params;
  for (int i = 0; i < request.num_params; ++i) plan->param_offsets[i] = request.params[i].offset;
  plan->param_bytes = request.param_bytes;
  PackParams(Params(request), {sizes, request.raster_group, request.raster_along_n, request.alpha}, plan->params);
  return {};
}

}  // namespace jbw

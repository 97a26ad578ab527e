#include "launch_plan.h"

#include <algorithm>
#include <vector>

#include "dtypes.h"

namespace jbw {
namespace {

constexpr int64_t kMaxGridZ = 65535;                         // and y: CUDA C++ guide, technical specifications
constexpr int64_t kMaxClusterTiles = kInt32Max - kMaxGridZ;  // a CTA's last step past the end stays an int32
constexpr uint64_t kMaxStrideBytes = uint64_t{1} << 40;      // cuTensorMapEncodeTiled: strides below 2^40
constexpr int64_t kMaxClusterCtas = 16;                      // of H100 and B200, CUDA C++ programming guide, clusters

constexpr int64_t kMaxRounds = 64;

constexpr int64_t kFlagBytes = 4096;     // Python's tile.FLAG_BYTES
constexpr int64_t kFlagBytesOfCta = 16;  // two store groups

int64_t CeilDiv(int64_t x, int64_t y) { return (x + y - 1) / y; }

Status ReadGeometry(const Attributes& attrs, Geometry* geometry) {
  JBW_RETURN_IF_ERROR(Read(attrs, "cta_m", 1, 512, &geometry->cta_m));
  JBW_RETURN_IF_ERROR(Read(attrs, "mma_n", 1, 512, &geometry->mma_n));
  JBW_RETURN_IF_ERROR(Read(attrs, "out_n", 1, 512, &geometry->out_n));
  JBW_RETURN_IF_ERROR(Read(attrs, "cluster_m", 1, kMaxClusterCtas, &geometry->cluster_m));
  JBW_RETURN_IF_ERROR(Read(attrs, "cluster_n", 1, kMaxClusterCtas, &geometry->cluster_n));
  JBW_RETURN_IF_ERROR(Read(attrs, "cluster_k", 1, kMaxClusterCtas, &geometry->cluster_k));
  JBW_RETURN_IF_ERROR(Read(attrs, "num_threads", 1, 1024, &geometry->num_threads));
  JBW_RETURN_IF_ERROR(Read(attrs, "smem_bytes", 0, 1 << 20, &geometry->smem_bytes));
  JBW_RETURN_IF_ERROR(Read(attrs, "stream_tiles", 0, kInt32Max, &geometry->stream_tiles));
  JBW_RETURN_IF_ERROR(Read(attrs, "stream_clusters", 1, kMaxGridZ, &geometry->stream_clusters));
  JBW_RETURN_IF_ERROR(Read(attrs, "tile_grid", 0, 2, &geometry->tile_grid));
  JBW_RETURN_IF_ERROR(ReadOr(attrs, "rounds", 1, 1, kMaxRounds, &geometry->rounds));
  JBW_RETURN_IF_ERROR(ReadOr(attrs, "parts", 1, 1, kMaxGridZ, &geometry->parts));
  JBW_RETURN_IF_ERROR(Read(attrs, "pdl", 0, 1, &geometry->pdl));
  return CheckRange("cluster_m * cluster_n * cluster_k",
                    geometry->cluster_m * geometry->cluster_n * geometry->cluster_k, 1, kMaxClusterCtas);
}

const JbwBuffer* FindWorkspace(const BufferRules& rules, const JbwBuffers& buffers) {
  for (size_t i = 0; i < rules.all.size(); ++i) {
    if (rules.all[i].dims[0].extent == Extent::kBytes) return &buffers.all[i];
  }
  return nullptr;
}

// How many clusters the workspace has room for: flags and a float32 accumulator for each of their CTAs.
Status WorkspaceClusters(const Geometry& geometry, int64_t bytes, int64_t* num_clusters) {
  const int64_t ctas = int64_t{geometry.cluster_m} * geometry.cluster_n * geometry.cluster_k;
  const int64_t cluster_bytes = ctas * geometry.cta_m * geometry.mma_n * 4;
  if (bytes < kFlagBytes + cluster_bytes) {
    return InvalidArgument("the workspace requires at least ", kFlagBytes + cluster_bytes, " bytes, got ", bytes);
  }
  *num_clusters = std::min((bytes - kFlagBytes) / cluster_bytes, kFlagBytes / (kFlagBytesOfCta * ctas));
  return {};
}

// At once, in a persistent grid; in rounds, so many times as many, each with its part of the tiles: where one ends, the
// CTAs of another kernel may start. Fewer tiles than clusters may be shared by more of them, through a workspace, where
// all must be there at once.
Status CountClusters(const Geometry& geometry, const JbwBuffer* workspace, int32_t max_active_clusters,
                     int64_t num_tiles, int64_t* num_clusters) {
  JBW_RETURN_IF_ERROR(CheckRange("max_active_clusters", max_active_clusters, 1, kInt32Max));
  if (!workspace) {
    const int64_t in_rounds = int64_t{geometry.rounds} * max_active_clusters;
    *num_clusters = std::min({num_tiles, in_rounds, kMaxGridZ / geometry.cluster_k});
    return {};
  }
  int64_t with_room;
  JBW_RETURN_IF_ERROR(WorkspaceClusters(geometry, workspace->dims[0], &with_room));
  const int64_t sharing = geometry.stream_tiles > 0 ? geometry.stream_clusters : 1;
  *num_clusters = std::min({std::max(num_tiles, sharing), int64_t{max_active_clusters}, with_room});
  return {};
}

// A CTA for each tile, or a cluster of those that divide its k: where they are, is their tile. CTAs start in the order
// of x: tiles side by side write what is contiguous in the result.
Status PlanTileGrid(const Geometry& geometry, int64_t tiles_m, int64_t tiles_n, int64_t batch, JbwLaunchPlan* plan) {
  const bool n_first = geometry.tile_grid == kTileGridAlongN;
  JBW_RETURN_IF_ERROR(CheckRange("cluster_m * cluster_n", geometry.cluster_m * geometry.cluster_n, 1, 1));
  JBW_RETURN_IF_ERROR(
      CheckRange(n_first ? "tiles along m" : "tiles along n", n_first ? tiles_m : tiles_n, 1, kMaxGridZ));
  JBW_RETURN_IF_ERROR(CheckRange("batch", batch, 1, kMaxGridZ / geometry.cluster_k));
  const int64_t grid[3] = {n_first ? tiles_n : tiles_m, n_first ? tiles_m : tiles_n, batch * geometry.cluster_k};
  for (int i = 0; i < 3; ++i) {
    plan->grid[i] = static_cast<uint32_t>(grid[i]);
    plan->cluster[i] = 1;
  }
  plan->cluster[2] = static_cast<uint32_t>(geometry.cluster_k);
  return {};
}

// A cluster tile is cluster_m * cta_m rows by cluster_n * out_n columns; the cluster's CTAs along z divide its k.
int64_t TilesM(const Geometry& geometry, const Sizes& sizes) {
  return CeilDiv(sizes.m, int64_t{geometry.cluster_m} * geometry.cta_m);
}
int64_t TilesN(const Geometry& geometry, const Sizes& sizes) {
  return CeilDiv(sizes.n, int64_t{geometry.cluster_n} * geometry.out_n);
}

Status PlanGrid(const Geometry& geometry, const JbwBuffer* workspace, const Sizes& sizes, int32_t max_active_clusters,
                JbwLaunchPlan* plan) {
  const int64_t tiles_m = TilesM(geometry, sizes), tiles_n = TilesN(geometry, sizes);
  const int64_t tiles_mn = tiles_m * tiles_n;  // below 2^62
  if (tiles_mn > kMaxClusterTiles || tiles_mn * sizes.batch > kMaxClusterTiles) {
    return InvalidArgument("a launch requires at most ", kMaxClusterTiles, " cluster tiles, got ", tiles_m, " x ",
                           tiles_n, " x ", sizes.batch, ": split the batch");
  }
  plan->num_cluster_tiles = tiles_mn * sizes.batch;
  plan->block[0] = static_cast<uint32_t>(geometry.num_threads);
  plan->block[1] = plan->block[2] = 1;
  plan->smem_bytes = static_cast<uint32_t>(geometry.smem_bytes);
  plan->pdl = geometry.pdl;
  if (geometry.tile_grid) return PlanTileGrid(geometry, tiles_m, tiles_n, sizes.batch, plan);
  int64_t num_clusters;
  JBW_RETURN_IF_ERROR(CountClusters(geometry, workspace, max_active_clusters, plan->num_cluster_tiles, &num_clusters));
  plan->grid[0] = plan->cluster[0] = static_cast<uint32_t>(geometry.cluster_m);
  plan->grid[1] = plan->cluster[1] = static_cast<uint32_t>(geometry.cluster_n);
  plan->cluster[2] = static_cast<uint32_t>(geometry.cluster_k);
  plan->grid[2] = plan->cluster[2] * static_cast<uint32_t>(num_clusters);
  return {};
}

// Parts of k are of operands that all matrices of the batch share.
Status CheckParts(const LaunchRequest& request, const JbwBuffers& buffers, const Sizes& sizes) {
  const int32_t parts = request.geometry.parts;
  if (parts == 1) return {};
  JBW_RETURN_IF_ERROR(CheckRange("batch", sizes.batch, parts, parts));
  for (size_t i = 0; i < static_cast<size_t>(buffers.num_operands); ++i) {
    const BufferRule& rule = request.rules.all[i];
    if (rule.dims[0].extent != Extent::kBatch || buffers.all[i].dims[0] == 1) continue;
    return InvalidArgument("`parts` requires one matrix of `", rule.role, "`, got ", buffers.all[i].dims[0]);
  }
  return {};
}

// All zeros of a kernel that walks no tiles.
TileWalk PlanWalk(const LaunchRequest& request, const Sizes& sizes, const JbwLaunchPlan& plan) {
  const Geometry& geometry = request.geometry;
  if (request.leaves.walk.k_tile == 0) return {};
  const int64_t clusters = plan.grid[2] / plan.cluster[2];
  return WalkOf(request.leaves.walk, {TilesM(geometry, sizes), TilesN(geometry, sizes), sizes.batch, sizes.k,
                                      geometry.parts, clusters, geometry.stream_tiles, geometry.stream_clusters});
}

// Of a row-major (batch, rows, contiguous) buffer, whatever its sizes are called. The kernel counts (contiguous, rows,
// batch).
Status PlanTensorMap(const TensorMapRule& map, const BufferRule& rule, const JbwBuffer& buffer,
                     JbwTensorMapSpec* spec) {
  const auto batch = static_cast<uint64_t>(buffer.dims[0]), rows = static_cast<uint64_t>(buffer.dims[1]);
  const auto columns = static_cast<uint64_t>(buffer.dims[2]);
  const uint64_t row_bytes = columns * static_cast<uint64_t>(map.element_bytes);
  if (row_bytes % kAlignBytes) {
    return InvalidArgument("TMA requires a row pitch that is a multiple of ", kAlignBytes, " bytes, got ", row_bytes,
                           " bytes for `", rule.role, "`: pad its last dimension");
  }
  if (rows * row_bytes >= kMaxStrideBytes) {  // sizes below 2^31: the product fits 64 bits
    return InvalidArgument("TMA requires a matrix of less than 2^40 bytes, got ", rows, " rows of ", row_bytes,
                           " bytes for `", rule.role, "`");
  }
  *spec = {map.data_type,
           map.swizzle_bytes,
           map.swizzle_atom_bytes,
           {columns, rows, batch},
           {row_bytes, rows * row_bytes},
           {static_cast<uint32_t>(map.box[0]), static_cast<uint32_t>(map.box[1]), static_cast<uint32_t>(map.box[2])}};
  return {};
}

Status PlanBuffers(const LaunchRequest& request, const JbwBuffers& buffers, JbwLaunchPlan* plan) {
  plan->num_buffers = static_cast<int32_t>(request.rules.all.size());
  for (int32_t i = 0; i < plan->num_buffers; ++i) {
    const BufferRule& rule = request.rules.all[static_cast<size_t>(i)];
    JbwBufferUse* use = &plan->buffers[i];
    use->align_bytes = rule.align_bytes;
    use->map_offset = request.leaves.OffsetOf(Source::kTensorMap, i);
    use->second_map_offset = request.leaves.OffsetOf(Source::kSecondMap, i);
    use->pointer_offset = request.leaves.OffsetOf(Source::kPointer, i);
    const TensorMapRule *map = request.rules.TensorMapOf(i), *second = request.rules.TensorMapOf(i, true);
    if (use->map_offset >= 0) JBW_RETURN_IF_ERROR(PlanTensorMap(*map, rule, buffers.all[i], &use->map));
    if (use->second_map_offset < 0) continue;
    JBW_RETURN_IF_ERROR(PlanTensorMap(*second, rule, buffers.all[i], &use->second_map));
  }
  return {};
}

}  // namespace

Status ReadLaunchRequest(const Attributes& attrs, LaunchRequest* request) {
  JBW_RETURN_IF_ERROR(ReadGeometry(attrs, &request->geometry));
  JBW_RETURN_IF_ERROR(ReadBufferRules(attrs, &request->rules));
  return ReadLeaves(attrs, request->rules, &request->leaves);
}

Status MakeLaunchPlan(const LaunchRequest& request, const JbwBuffers& given, const LaunchContext& context,
                      JbwLaunchPlan* plan) {
  *plan = {};
  const std::vector<JbwBuffer> whole = WithBatch(request.rules, given);
  const JbwBuffers buffers = {whole.data(), given.num_operands, given.num_results};
  Sizes sizes;
  JBW_RETURN_IF_ERROR(ReadSizes(request.rules, buffers, &sizes));
  JBW_RETURN_IF_ERROR(CheckParts(request, buffers, sizes));
  JBW_RETURN_IF_ERROR(
      PlanGrid(request.geometry, FindWorkspace(request.rules, buffers), sizes, context.max_active_clusters, plan));
  JBW_RETURN_IF_ERROR(PlanBuffers(request, buffers, plan));
  plan->param_bytes = request.leaves.bytes;
  for (const Leaf& leaf : request.leaves.all) plan->param_offsets[plan->num_params++] = leaf.offset;
  PackParams(request.leaves, buffers, request.rules, sizes, PlanWalk(request, sizes, *plan), context.token,
             plan->params);
  return {};
}

}  // namespace jbw

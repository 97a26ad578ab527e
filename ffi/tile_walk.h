// The tiles of a launch as its kernel walks them, with all that it divides by: what `kernels/scheduler.py` calls a
// TileOrder and a Stream. A kernel that had to find it out would divide several times, one after the other, before its
// first load. Pure arithmetic; the same in Python, which tests compare.
#ifndef JAX_BWGEMM_TILE_WALK_H_
#define JAX_BWGEMM_TILE_WALK_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "attributes.h"
#include "scanner.h"
#include "status.h"

namespace jbw {

// In the order of `kWalkNames`.
enum class WalkFact : int32_t {
  kTiles,           // of the whole batch; a tile is what a cluster computes
  kTriangle,        // those on and under the diagonals, which are all of a symmetric product
  kKTiles,          // of a tile
  kKStep,           // from a matrix of the batch to the next, where these are of parts of k; else 0
  kMatrix,          // tiles of one matrix,
  kGroup,           // of a whole group of rows (or columns) of it,
  kRows,            // rows of a whole group,
  kLastRows,        // and of the last one,
  kLastGroup,       // which is this one
  kAcross,          // tiles of a row
  kClusters,        // of the grid
  kStreamFirst,     // the first tile of the stream,
  kStreamEnd,       // all k tiles of it,
  kStreamClusters,  // how many clusters share them,
  kStreamLong,      // k tiles of the longer shares,
  kStreamShort,     // of the others, or 1 if they have none,
  kStreamLonger,    // and how many are longer
  kCount,
};

using TileWalk = std::array<uint32_t, static_cast<size_t>(WalkFact::kCount)>;

// A fact, or one of the two numbers by which it divides: x / fact = (2 * x * multiplier >> 32) >> shift for x < 2^31.
struct WalkPart {
  WalkFact fact;
  enum { kValue, kMultiplier, kShift } part;
};

// What a walk depends on beside sizes.
struct WalkRule {
  int32_t k_tile;     // 0: the kernel walks no tiles
  bool is_symmetric;  // it walks those on and under the diagonals
  int32_t raster_group, raster_along_n;
};

struct WalkCounts {
  int64_t tiles_m, tiles_n, batch, k;
  int64_t parts;                          // of k, a matrix of the batch of each
  int64_t clusters;                       // of the grid
  int64_t stream_tiles, stream_clusters;  // as the plan says
};

// "rows", "rows_multiplier", "rows_shift", or "k_step/64"; some say a part of the rule, too.
bool TakeWalkPart(Scanner* scanner, WalkPart* part, WalkRule* rule);

Status ReadRaster(const Attributes& attrs, WalkRule* rule);

TileWalk WalkOf(const WalkRule& rule, const WalkCounts& counts);

uint32_t ValueOf(const TileWalk& walk, const WalkPart& part);

}  // namespace jbw

#endif  // JAX_BWGEMM_TILE_WALK_H_

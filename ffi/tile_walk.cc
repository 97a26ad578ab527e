#include "tile_walk.h"

#include <algorithm>

#include "operands.h"

namespace jbw {
namespace {

constexpr const char* kWalkNames[] = {"tiles",        "triangle",     "k_tiles",    "k_step",          "matrix",
                                      "group",        "rows",         "last_rows",  "last_group",      "across",
                                      "clusters",     "stream_first", "stream_end", "stream_clusters", "stream_long",
                                      "stream_short", "stream_longer"};
static_assert(std::size(kWalkNames) == static_cast<size_t>(WalkFact::kCount));

constexpr int32_t kMaxKTile = 1024;

bool TakeEnd(std::string_view* name, std::string_view end) {
  if (name->size() <= end.size() || name->substr(name->size() - end.size()) != end) return false;
  name->remove_suffix(end.size());
  return true;
}

// The smallest s such that `value` is at most 2^s.
uint32_t CeilLog2(uint32_t value) {
  uint32_t log = 0;
  while (log < 32 && (uint64_t{1} << log) < value) ++log;
  return log;
}

// Rounded up: the quotient is then too large by less than 1 / value for every x below 2^31, and so exact (Granlund and
// Montgomery, "Division by invariant integers using multiplication", theorem 4.2).
uint32_t Multiplier(uint32_t value) {
  const uint64_t scale = uint64_t{1} << (31 + CeilLog2(value));
  return static_cast<uint32_t>((scale + value - 1) / value);
}

uint32_t& At(TileWalk* walk, WalkFact fact) { return (*walk)[static_cast<size_t>(fact)]; }

void PutStream(const WalkCounts& counts, int64_t num_tiles, int64_t k_tiles, TileWalk* walk) {
  const int64_t tiles = std::min({counts.stream_tiles, num_tiles, kInt32Max / k_tiles});
  const int64_t sharing = std::min(counts.stream_clusters, counts.clusters);
  const int64_t each = tiles * k_tiles / sharing;
  At(walk, WalkFact::kClusters) = static_cast<uint32_t>(counts.clusters);
  At(walk, WalkFact::kStreamFirst) = static_cast<uint32_t>(num_tiles - tiles);
  At(walk, WalkFact::kStreamEnd) = static_cast<uint32_t>(tiles * k_tiles);
  At(walk, WalkFact::kStreamClusters) = static_cast<uint32_t>(sharing);
  At(walk, WalkFact::kStreamLong) = static_cast<uint32_t>(each + 1);
  At(walk, WalkFact::kStreamShort) = static_cast<uint32_t>(std::max(each, int64_t{1}));
  At(walk, WalkFact::kStreamLonger) = static_cast<uint32_t>(tiles * k_tiles - each * sharing);
}

}  // namespace

bool TakeWalkPart(Scanner* scanner, WalkPart* part, WalkRule* rule) {
  std::string_view name;
  if (!scanner->TakeName(&name)) return false;
  part->part = TakeEnd(&name, "_multiplier") ? WalkPart::kMultiplier
               : TakeEnd(&name, "_shift")    ? WalkPart::kShift
                                             : WalkPart::kValue;
  const auto found = std::find(std::begin(kWalkNames), std::end(kWalkNames), name);
  if (found == std::end(kWalkNames)) return false;
  part->fact = static_cast<WalkFact>(found - std::begin(kWalkNames));
  if (part->fact == WalkFact::kTriangle) rule->is_symmetric = true;
  if (part->fact != WalkFact::kKStep || part->part != WalkPart::kValue) return true;
  return scanner->Take("/") && scanner->TakeInt(&rule->k_tile) && rule->k_tile >= 1 && rule->k_tile <= kMaxKTile;
}

Status ReadRaster(const Attributes& attrs, WalkRule* rule) {
  JBW_RETURN_IF_ERROR(Read(attrs, "raster_group", 1, kInt32Max, &rule->raster_group));
  return Read(attrs, "raster_along_n", 0, 1, &rule->raster_along_n);
}

TileWalk WalkOf(const WalkRule& rule, const WalkCounts& counts) {
  const bool along_n = rule.raster_along_n == 1;
  const int64_t grouped = along_n ? counts.tiles_n : counts.tiles_m, across = along_n ? counts.tiles_m : counts.tiles_n;
  const int64_t rows = std::min(int64_t{rule.raster_group}, grouped), last_group = (grouped - 1) / rows;
  const int64_t num_tiles = grouped * across * counts.batch;
  const int64_t triangle = counts.tiles_m * (counts.tiles_m + 1) / 2 * counts.batch;
  const int64_t all_k_tiles = std::max((counts.k + rule.k_tile - 1) / rule.k_tile, int64_t{1});
  const int64_t k_tiles = (all_k_tiles + counts.parts - 1) / counts.parts;
  TileWalk walk = {};
  At(&walk, WalkFact::kTiles) = static_cast<uint32_t>(num_tiles);
  At(&walk, WalkFact::kTriangle) = static_cast<uint32_t>(triangle);
  At(&walk, WalkFact::kKTiles) = static_cast<uint32_t>(k_tiles);
  At(&walk, WalkFact::kKStep) = static_cast<uint32_t>(counts.parts > 1 ? k_tiles : 0);
  At(&walk, WalkFact::kMatrix) = static_cast<uint32_t>(grouped * across);
  At(&walk, WalkFact::kGroup) = static_cast<uint32_t>(rows * across);
  At(&walk, WalkFact::kRows) = static_cast<uint32_t>(rows);
  At(&walk, WalkFact::kLastRows) = static_cast<uint32_t>(grouped - last_group * rows);
  At(&walk, WalkFact::kLastGroup) = static_cast<uint32_t>(last_group);
  At(&walk, WalkFact::kAcross) = static_cast<uint32_t>(across);
  PutStream(counts, rule.is_symmetric ? triangle : num_tiles, k_tiles, &walk);
  return walk;
}

uint32_t ValueOf(const TileWalk& walk, const WalkPart& part) {
  const uint32_t value = walk[static_cast<size_t>(part.fact)];
  if (part.part == WalkPart::kMultiplier) return Multiplier(value);
  return part.part == WalkPart::kShift ? CeilLog2(value) : value;
}

}  // namespace jbw

#include "param_block.h"

#include <cstring>

namespace jbw {
namespace {

struct KindFacts {
  const char* name;
  int32_t size, alignment;
};

constexpr KindFacts kKinds[kNumParamKinds] = {
    {"tma_a", 128, 64},
    {"tma_b", 128, 64},
    {"tma_c", 128, 64},
    {"tma_r", 128, 64},
    {"c", 8, 8},
    {"m", 4, 4},
    {"n", 4, 4},
    {"k", 4, 4},
    {"batch", 4, 4},
    {"a_batch_step", 4, 4},
    {"b_batch_step", 4, 4},
    {"raster_group", 4, 4},
    {"raster_along_n", 4, 4},
    {"raster_order", 4, 4},
    {"a_policy", 8, 8},
    {"b_policy", 8, 8},
    {"stream_tiles", 4, 4},
    {"stream_clusters", 4, 4},
    {"workspace", 8, 8},
    {"token", 8, 8},
    {"alpha", 4, 4},
    {"bias", 8, 8},
};

// What createpolicy.fractional makes for all of a cache line: evict_normal, evict_first, evict_last (CUTLASS,
// TMA::CacheHintSm90).
constexpr uint64_t kL2Policies[kNumL2Policies] = {0x1000000000000000, 0x12F0000000000000, 0x14F0000000000000};

constexpr const char kRemedy[] = ": rebuild the kernels and the library from the same version";

Status CheckParam(const JbwParam& param, int32_t param_bytes) {
  if (!ParamKindName(param.kind)) {
    return InvalidArgument("a parameter kind requires 0..", kNumParamKinds - 1, ", got ", param.kind, kRemedy);
  }
  const KindFacts& facts = kKinds[param.kind];
  if (param.size != facts.size) {
    return InvalidArgument("parameter `", facts.name, "` requires ", facts.size, " bytes, got ", param.size, kRemedy);
  }
  if (param.offset < 0 || param.offset % facts.alignment || param.offset > param_bytes - param.size) {
    return InvalidArgument("parameter `", facts.name, "` requires an offset that is a multiple of ", facts.alignment,
                           " and ends within ", param_bytes, " bytes, got ", param.offset, kRemedy);
  }
  return {};
}

template <typename T>
void Store(unsigned char* block, int32_t offset, T value) {
  std::memcpy(block + offset, &value, sizeof(value));
}

int32_t IntValue(int32_t kind, const ParamValues& values) {
  switch (kind) {
    case kM:
      return static_cast<int32_t>(values.sizes.m);
    case kN:
      return static_cast<int32_t>(values.sizes.n);
    case kK:
      return static_cast<int32_t>(values.sizes.k);
    case kBatch:
      return static_cast<int32_t>(values.sizes.batch);
    case kABatchStep:
      return values.sizes.a_batch > 1;
    case kBBatchStep:
      return values.sizes.b_batch > 1;
    case kRasterGroup:
      return values.raster_group;
    case kRasterAlongN:
      return values.raster_along_n;
    default:
      return values.raster_order;
  }
}

Status CheckOperands(const ParamList& list) {
  for (ParamKind kind : {kTmaA, kTmaB}) {
    if (FindParam(list, kind) < 0) {
      return InvalidArgument("`params` requires `", ParamKindName(kind), "`, got a list without it", kRemedy);
    }
  }
  const bool has_map = FindParam(list, kTmaC) >= 0, has_pointer = FindParam(list, kC) >= 0;
  if (has_map == has_pointer) {
    return InvalidArgument("`params` requires either `tma_c` or `c`, got ", has_map ? "both" : "neither", kRemedy);
  }
  if (has_map || FindParam(list, kTmaR) < 0) return {};
  return InvalidArgument("`tma_r` requires `tma_c`, whose box it has, got `c`", kRemedy);
}

}  // namespace

const char* ParamKindName(int32_t kind) { return kind >= 0 && kind < kNumParamKinds ? kKinds[kind].name : nullptr; }

Status CheckParams(const ParamList& list) {
  if (list.num_params < 0 || list.num_params > JBW_MAX_PARAMS) {
    return InvalidArgument("`params` requires at most ", JBW_MAX_PARAMS, " leaves, got ", list.num_params, kRemedy);
  }
  if (list.param_bytes < 1 || list.param_bytes > JBW_MAX_PARAM_BYTES) {
    return InvalidArgument("`param_bytes` requires 1..", JBW_MAX_PARAM_BYTES, ", got ", list.param_bytes, kRemedy);
  }
  int32_t end = 0;  // of the leaf before
  for (int32_t i = 0; i < list.num_params; ++i) {
    const JbwParam& param = list.params[i];
    JBW_RETURN_IF_ERROR(CheckParam(param, list.param_bytes));
    const ParamList before = {list.params, i, list.param_bytes};
    if (param.offset < end || FindParam(before, static_cast<ParamKind>(param.kind)) >= 0) {
      return InvalidArgument("`params` requires each kind once and ascending offsets without overlap, got `",
                             ParamKindName(param.kind), "` at ", param.offset, " after ", end, kRemedy);
    }
    end = param.offset + param.size;
  }
  return CheckOperands(list);
}

int32_t FindParam(const ParamList& list, ParamKind kind) {
  for (int32_t i = 0; i < list.num_params; ++i) {
    if (list.params[i].kind == kind) return list.params[i].offset;
  }
  return -1;
}

void PackParams(const ParamList& list, const ParamValues& values, unsigned char* block) {
  for (int32_t i = 0; i < list.num_params; ++i) {
    const JbwParam& param = list.params[i];
    if (param.kind == kAlpha) {
      Store(block, param.offset, values.alpha);
    } else if (param.kind == kAPolicy || param.kind == kBPolicy) {
      Store(block, param.offset, kL2Policies[param.kind == kAPolicy ? values.a_l2 : values.b_l2]);
    } else if (param.kind == kToken) {
      Store(block, param.offset, values.token);
    } else if (param.kind == kStreamTiles) {
      Store(block, param.offset, values.stream_tiles);
    } else if (param.kind == kStreamClusters) {
      Store(block, param.offset, values.stream_clusters);
    } else if (param.kind >= kM && param.kind <= kRasterOrder) {
      Store(block, param.offset, IntValue(param.kind, values));
    }
  }
}

}  // namespace jbw

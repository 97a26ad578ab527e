#include "param_block.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "scanner.h"

namespace jbw {
namespace {

struct SourceFacts {
  Source source;
  const char* name;
  int32_t bytes, alignment;
};

constexpr SourceFacts kSources[] = {
    {Source::kTensorMap, "tma", 128, 64}, {Source::kSecondMap, "tma2", 128, 64}, {Source::kPointer, "ptr", 8, 8},
    {Source::kSize, "size", 4, 4},        {Source::kStep, "step", 4, 4},         {Source::kInt, "int", 4, 4},
    {Source::kFloat, "float", 4, 4},      {Source::kL2Policy, "l2", 8, 8},       {Source::kToken, "token", 8, 8},
    {Source::kWalk, "walk", 4, 4},
};

// What createpolicy.fractional makes for all of a cache line: evict_normal, evict_first, evict_last (CUTLASS,
// TMA::CacheHintSm90).
constexpr std::pair<const char*, uint64_t> kL2Policies[] = {
    {"normal", 0x1000000000000000}, {"evict_first", 0x12F0000000000000}, {"evict_last", 0x14F0000000000000}};

constexpr const char kRemedy[] = ": rebuild the kernels and the library from the same version";

const SourceFacts& FactsOf(Source source) { return kSources[static_cast<size_t>(source)]; }

struct Range {
  int32_t low = INT32_MIN, high = INT32_MAX;
};

// "[0..1]", "[1..]" or nothing
bool TakeRange(Scanner* scanner, Range* range) {
  if (!scanner->Take("[")) return true;
  if (!scanner->TakeInt(&range->low) || !scanner->Take("..")) return false;
  if (scanner->Take("]")) return true;
  return scanner->TakeInt(&range->high) && scanner->Take("]");
}

bool TakeSize(Scanner* scanner, Extent* extent) {
  constexpr std::pair<const char*, Extent> kSizes[] = {
      {"batch", Extent::kBatch}, {"m", Extent::kM}, {"n", Extent::kN}, {"k", Extent::kK}};
  std::string_view name;
  if (!scanner->TakeName(&name)) return false;
  for (const auto& [text, size] : kSizes) {
    *extent = size;
    if (name == text) return true;
  }
  return false;
}

bool TakeSource(Scanner* scanner, Source* source) {
  std::string_view name;
  if (!scanner->TakeName(&name)) return false;
  for (const SourceFacts& facts : kSources) {
    *source = facts.source;
    if (name == facts.name) return facts.source == Source::kToken || scanner->Take(":");
  }
  return false;
}

// What stands behind the colon: a buffer, a size or an attribute.
bool TakeArgument(Scanner* scanner, Leaf* leaf, std::string_view* attribute, Range* range, WalkRule* walk) {
  switch (leaf->source) {
    case Source::kTensorMap:
    case Source::kSecondMap:
    case Source::kPointer:
    case Source::kStep:
      return scanner->TakeInt(&leaf->buffer);
    case Source::kSize:
      return TakeSize(scanner, &leaf->extent);
    case Source::kToken:
      return true;
    case Source::kWalk:
      return TakeWalkPart(scanner, &leaf->part, walk);
    default:
      return scanner->TakeName(attribute) && (leaf->source != Source::kInt || TakeRange(scanner, range));
  }
}

Status ReadPolicy(const Attributes& attrs, std::string_view attribute, uint64_t* policy) {
  std::string text;
  JBW_RETURN_IF_ERROR(Read(attrs, attribute, &text));
  for (const auto& [name, value] : kL2Policies) {
    *policy = value;
    if (text == name) return {};
  }
  return InvalidArgument("`", attribute, "` requires normal, evict_first or evict_last, got '", text, "'");
}

Status ReadValue(const Attributes& attrs, std::string_view attribute, const Range& range, Leaf* leaf) {
  if (leaf->source == Source::kL2Policy) return ReadPolicy(attrs, attribute, &leaf->value);
  if (leaf->source == Source::kFloat) {
    float value;
    JBW_RETURN_IF_ERROR(Read(attrs, attribute, &value));
    std::memcpy(&leaf->value, &value, sizeof(value));
  } else if (leaf->source == Source::kInt) {
    int32_t value;
    JBW_RETURN_IF_ERROR(Read(attrs, attribute, range.low, range.high, &value));
    leaf->value = static_cast<uint32_t>(value);
  }
  return {};
}

// "int:raster_along_n[0..1]@404+4"
Status ReadLeaf(const Attributes& attrs, std::string_view text, Leaf* leaf, WalkRule* walk) {
  const size_t at = std::min(text.find('@'), text.size());
  Scanner source(text.substr(0, at)), place(text.substr(at));
  std::string_view attribute;
  Range range;
  *leaf = {Source::kToken, std::string(text.substr(0, at)), -1, Extent::kM, {}, 0, 0, 0};
  if (!TakeSource(&source, &leaf->source) || !TakeArgument(&source, leaf, &attribute, &range, walk) ||
      !source.AtEnd() || !place.Take("@") || !place.TakeInt(&leaf->offset) || !place.Take("+") ||
      !place.TakeInt(&leaf->bytes) || !place.AtEnd()) {
    return InvalidArgument("`params` requires texts such as tma:0@0+128 or int:name[0..1]@404+4, got ", text, kRemedy);
  }
  return ReadValue(attrs, attribute, range, leaf);
}

Status CheckLeaf(const Leaf& leaf, const BufferRules& rules) {
  const SourceFacts& facts = FactsOf(leaf.source);
  if (leaf.bytes != facts.bytes) {
    return InvalidArgument("parameter `", leaf.name, "` requires ", facts.bytes, " bytes, got ", leaf.bytes, kRemedy);
  }
  if (leaf.offset < 0 || leaf.offset % facts.alignment || leaf.offset > JBW_MAX_PARAM_BYTES - leaf.bytes) {
    return InvalidArgument("parameter `", leaf.name, "` requires an offset that is a multiple of ", facts.alignment,
                           " and ends within ", JBW_MAX_PARAM_BYTES, " bytes, got ", leaf.offset, kRemedy);
  }
  const bool is_map = leaf.source == Source::kTensorMap || leaf.source == Source::kSecondMap;
  const bool is_of_buffer = is_map || leaf.source == Source::kPointer || leaf.source == Source::kStep;
  if (is_of_buffer && (leaf.buffer < 0 || leaf.buffer >= static_cast<int32_t>(rules.all.size()))) {
    return InvalidArgument("parameter `", leaf.name, "` requires a buffer of 0..", rules.all.size() - 1, ", got ",
                           leaf.buffer, kRemedy);
  }
  if (is_map && !rules.TensorMapOf(leaf.buffer, leaf.source == Source::kSecondMap)) {
    return InvalidArgument("parameter `", leaf.name, "` requires a text in `tensor_maps`, got none", kRemedy);
  }
  return {};
}

Status CheckOrder(const Leaves& leaves, const Leaf& leaf) {
  bool is_new = leaf.offset >= leaves.bytes;
  for (const Leaf& other : leaves.all) is_new = is_new && (other.name != leaf.name || leaf.source == Source::kStep);
  if (is_new) return {};
  return InvalidArgument("`params` requires each source once and ascending offsets without overlap, got `", leaf.name,
                         "` at ", leaf.offset, " after ", leaves.bytes, kRemedy);
}

Status CheckBuffersAreTaken(const Leaves& leaves, const BufferRules& rules) {
  for (int32_t i = 0; i < static_cast<int32_t>(rules.all.size()); ++i) {
    if (leaves.OffsetOf(Source::kTensorMap, i) >= 0 || leaves.OffsetOf(Source::kPointer, i) >= 0) continue;
    return InvalidArgument("`params` requires `tma:", i, "` or `ptr:", i, "`, which take `",
                           rules.all[static_cast<size_t>(i)].role, "`, got neither", kRemedy);
  }
  return {};
}

// What a walk's leaves depend on, if there are any.
Status ReadWalk(const Attributes& attrs, Leaves* leaves) {
  for (const Leaf& leaf : leaves->all) {
    if (leaf.source != Source::kWalk) continue;
    if (leaves->walk.k_tile > 0) return ReadRaster(attrs, &leaves->walk);
    return InvalidArgument("`", leaf.name, "` requires a parameter such as walk:k_step/64, got none", kRemedy);
  }
  return {};
}

int64_t SizeOf(const Sizes& sizes, Extent extent) {
  if (extent == Extent::kBatch) return sizes.batch;
  if (extent == Extent::kM) return sizes.m;
  return extent == Extent::kN ? sizes.n : sizes.k;
}

// 1 if the buffer has its own matrix for each of the batch.
uint64_t BatchStep(const BufferRule& rule, const JbwBuffer& buffer) {
  for (size_t i = 0; i < rule.dims.size(); ++i) {
    if (rule.dims[i].extent == Extent::kBatch) return buffer.dims[i] > 1;
  }
  return 0;
}

}  // namespace

int32_t Leaves::OffsetOf(Source source, int32_t buffer) const {
  for (const Leaf& leaf : all) {
    if (leaf.source == source && leaf.buffer == buffer) return leaf.offset;
  }
  return -1;
}

Status ReadLeaves(const Attributes& attrs, const BufferRules& rules, Leaves* leaves) {
  std::string text;
  JBW_RETURN_IF_ERROR(Read(attrs, "params", &text));
  leaves->bytes = 0;
  leaves->walk = {};
  for (std::string_view word : Words(text)) {
    Leaf leaf;
    JBW_RETURN_IF_ERROR(ReadLeaf(attrs, word, &leaf, &leaves->walk));
    JBW_RETURN_IF_ERROR(CheckLeaf(leaf, rules));
    JBW_RETURN_IF_ERROR(CheckOrder(*leaves, leaf));
    leaves->bytes = leaf.offset + leaf.bytes;
    leaves->all.push_back(std::move(leaf));
  }
  if (leaves->all.size() > JBW_MAX_PARAMS) {
    return InvalidArgument("`params` requires at most ", JBW_MAX_PARAMS, " leaves, got ", leaves->all.size(), kRemedy);
  }
  JBW_RETURN_IF_ERROR(CheckBuffersAreTaken(*leaves, rules));
  return ReadWalk(attrs, leaves);
}

void PackParams(const Leaves& leaves, const JbwBuffers& buffers, const BufferRules& rules, const Sizes& sizes,
                const TileWalk& walk, uint64_t token, unsigned char* block) {
  for (const Leaf& leaf : leaves.all) {
    if (leaf.source <= Source::kPointer) continue;
    uint64_t value = leaf.value;
    if (leaf.source == Source::kSize) value = static_cast<uint64_t>(SizeOf(sizes, leaf.extent));
    if (leaf.source == Source::kToken) value = token;
    if (leaf.source == Source::kWalk) value = ValueOf(walk, leaf.part);
    if (leaf.source == Source::kStep) {
      const auto buffer = static_cast<size_t>(leaf.buffer);
      value = BatchStep(rules.all[buffer], buffers.all[buffer]);
    }
    std::memcpy(block + leaf.offset, &value, static_cast<size_t>(leaf.bytes));  // little-endian
  }
}

}  // namespace jbw

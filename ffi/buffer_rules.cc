#include "buffer_rules.h"

#include <algorithm>

#include "dtypes.h"
#include "scanner.h"

namespace jbw {
namespace {

constexpr int32_t kMaxBoxDim = 256;  // cuTensorMapEncodeTiled
constexpr int32_t kMaxAlignBytes = 256;
constexpr size_t kMaxRank = 3;
constexpr const char kRemedy[] = ": rebuild the kernels and the library from the same version";

bool TakeExtent(Scanner* scanner, Extent* extent) {
  std::string_view name;
  if (!scanner->TakeName(&name)) return false;
  *extent = static_cast<Extent>(name[0]);
  return name == "bytes" || (name.size() == 1 && std::string_view("lmnk1").find(name[0]) != std::string_view::npos);
}

// "l?", "k+", "m/16"
bool TakeDim(Scanner* scanner, Dim* dim) {
  if (!TakeExtent(scanner, &dim->extent)) return false;
  dim->may_be_one = scanner->Take("?");
  dim->may_be_padded = scanner->Take("+");
  dim->every = 1;
  return !scanner->Take("/") || (scanner->TakeInt(&dim->every) && dim->every > 0 && dim->extent != Extent::kBytes);
}

bool Has(const BufferRule& rule, Extent extent) {
  return std::any_of(rule.dims.begin(), rule.dims.end(), [&](const Dim& dim) { return dim.extent == extent; });
}

// "a:bfloat16[l?,m,k+]%16"; of bytes there is no second dimension
bool ParseBuffer(std::string_view text, BufferRule* rule) {
  Scanner scanner(text);
  std::string_view role, dtype;
  if (!scanner.TakeName(&role) || !scanner.Take(":") || !scanner.TakeName(&dtype) || !scanner.Take("[")) return false;
  rule->role = role;
  rule->dtype = FindDtype(dtype);
  do {
    if (!TakeDim(&scanner, &rule->dims.emplace_back())) return false;
  } while (scanner.Take(","));
  if (!scanner.Take("]%") || !scanner.TakeInt(&rule->align_bytes) || !scanner.AtEnd()) return false;
  return rule->dtype >= 0 && rule->dims.size() <= (Has(*rule, Extent::kBytes) ? 1 : kMaxRank);
}

// "0:bf16[64,128,1]/128/16"
bool ParseTensorMap(std::string_view text, TensorMapRule* rule) {
  Scanner scanner(text);
  std::string_view name;
  if (!scanner.TakeInt(&rule->buffer) || !scanner.Take(":") || !scanner.TakeName(&name)) return false;
  const MapElement* element = FindMapElement(name);
  if (!element) return false;
  rule->data_type = element->data_type;
  rule->element_bytes = element->bytes;
  for (int i = 0; i < 3; ++i) {
    if (!scanner.Take(i ? "," : "[") || !scanner.TakeInt(&rule->box[i])) return false;
  }
  return scanner.Take("]/") && scanner.TakeInt(&rule->swizzle_bytes) && scanner.Take("/") &&
         scanner.TakeInt(&rule->swizzle_atom_bytes) && scanner.AtEnd();
}

Status CheckBuffer(const BufferRule& rule) {
  if (rule.align_bytes < 1 || rule.align_bytes > kMaxAlignBytes || rule.align_bytes & (rule.align_bytes - 1)) {
    return InvalidArgument("the alignment of `", rule.role, "` requires a power of two up to ", kMaxAlignBytes,
                           ", got ", rule.align_bytes, kRemedy);
  }
  return {};
}

// The sizes of a product can be read off the buffers.
Status CheckSizesAreThere(const BufferRules& rules) {
  const auto result = std::find_if(rules.all.begin(), rules.all.end(), [](const auto& rule) { return rule.is_result; });
  for (Extent extent : {Extent::kBatch, Extent::kM, Extent::kN}) {
    if (result != rules.all.end() && Has(*result, extent)) continue;
    return InvalidArgument("`buffers` requires a first result of l, m and n, got none with ", static_cast<char>(extent),
                           kRemedy);
  }
  if (std::any_of(rules.all.begin(), result, [](const auto& rule) { return Has(rule, Extent::kK); })) return {};
  return InvalidArgument("`buffers` requires an operand with k, got none", kRemedy);
}

Status ReadBuffers(const Attributes& attrs, BufferRules* rules) {
  std::string text;
  JBW_RETURN_IF_ERROR(Read(attrs, "buffers", &text));
  bool is_result = false;
  for (std::string_view word : Words(text)) {
    if (word == "->") {
      is_result = true;
      continue;
    }
    BufferRule& rule = rules->all.emplace_back();
    if (!ParseBuffer(word, &rule)) {
      return InvalidArgument("`buffers` requires texts such as a:bfloat16[l?,m,k+]%16, got ", word, kRemedy);
    }
    rule.is_result = is_result;
    JBW_RETURN_IF_ERROR(CheckBuffer(rule));
  }
  if (rules->all.size() > JBW_MAX_BUFFERS) {
    return InvalidArgument("`buffers` requires at most ", JBW_MAX_BUFFERS, " buffers, got ", rules->all.size(),
                           kRemedy);
  }
  return CheckSizesAreThere(*rules);
}

Status CheckTensorMap(const TensorMapRule& map, const BufferRule& buffer) {
  for (int32_t size : map.box) {
    if (size >= 1 && size <= kMaxBoxDim) continue;
    return InvalidArgument("the TMA box of `", buffer.role, "` requires sizes of 1..", kMaxBoxDim, ", got (",
                           map.box[0], ", ", map.box[1], ", ", map.box[2], ")");
  }
  if (map.swizzle_bytes != 32 && map.swizzle_bytes != 64 && map.swizzle_bytes != 128) {
    return InvalidArgument("the swizzle of `", buffer.role, "` requires 32, 64 or 128 bytes, got ", map.swizzle_bytes);
  }
  if (map.swizzle_atom_bytes != 16 && (map.swizzle_atom_bytes != 32 || map.swizzle_bytes != 128)) {
    return InvalidArgument("the swizzle atom of `", buffer.role, "` requires 16 bytes, or 32 in a span of 128, got ",
                           map.swizzle_atom_bytes, " in ", map.swizzle_bytes);
  }
  if (map.box[0] * map.element_bytes != map.swizzle_bytes) {
    return InvalidArgument("the TMA box of `", buffer.role, "` requires an innermost size of its swizzle span, ",
                           map.swizzle_bytes, " bytes, got ", map.box[0], " elements of ", map.element_bytes, " bytes");
  }
  if (DtypeBytes(buffer.dtype) != map.element_bytes || buffer.dims.size() != 3 || buffer.align_bytes % kAlignBytes) {
    return InvalidArgument("the tensor map of `", buffer.role, "` requires three dimensions of ", map.element_bytes,
                           "-byte elements and an alignment of ", kAlignBytes, ", got ", buffer.dims.size(), " of ",
                           DtypeName(buffer.dtype), " and ", buffer.align_bytes, kRemedy);
  }
  return {};
}

Status ReadTensorMaps(const Attributes& attrs, BufferRules* rules) {
  std::string text;
  JBW_RETURN_IF_ERROR(Read(attrs, "tensor_maps", &text));
  for (std::string_view word : Words(text)) {
    TensorMapRule map;
    if (!ParseTensorMap(word, &map)) {
      return InvalidArgument("`tensor_maps` requires texts such as 0:bf16[64,128,1]/128/16, got ", word, kRemedy);
    }
    if (map.buffer < 0 || map.buffer >= static_cast<int32_t>(rules->all.size()) ||
        rules->TensorMapOf(map.buffer, true)) {
      return InvalidArgument("`tensor_maps` requires each buffer of 0..", rules->all.size() - 1, " at most twice, got ",
                             map.buffer, kRemedy);
    }
    JBW_RETURN_IF_ERROR(CheckTensorMap(map, rules->all[static_cast<size_t>(map.buffer)]));
    rules->tensor_maps.push_back(map);
  }
  return {};
}

}  // namespace

const TensorMapRule* BufferRules::TensorMapOf(int32_t buffer, bool is_second) const {
  for (const TensorMapRule& map : tensor_maps) {
    if (map.buffer != buffer) continue;
    if (!is_second) return &map;
    is_second = false;
  }
  return nullptr;
}

const BufferRule& BufferRules::result() const {
  return *std::find_if(all.begin(), all.end(), [](const BufferRule& rule) { return rule.is_result; });
}

std::string BufferRules::RolesText() const {
  std::string operands, results;
  for (const BufferRule& rule : all) {
    std::string* roles = rule.is_result ? &results : &operands;
    *roles += Cat(roles->empty() ? "" : ", ", rule.role);
  }
  return Cat("operands ", operands, " and results ", results);
}

Status ReadBufferRules(const Attributes& attrs, BufferRules* rules) {
  JBW_RETURN_IF_ERROR(ReadBuffers(attrs, rules));
  return ReadTensorMaps(attrs, rules);
}

}  // namespace jbw

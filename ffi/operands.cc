#include "operands.h"

#include <algorithm>

#include "dtypes.h"

namespace jbw {
namespace {

std::string Shape(const JbwBuffer& buffer) {
  std::string text = "(";
  for (int i = 0; i < buffer.rank && i < 3; ++i) text += Cat(i ? ", " : "", buffer.dims[i]);
  return text + (buffer.rank > 3 ? ", ...)" : ")");
}

Status CheckCount(const BufferRules& rules, const JbwBuffers& buffers) {
  int32_t num_operands = 0;
  for (const BufferRule& rule : rules.all) num_operands += !rule.is_result;
  const int32_t num_results = static_cast<int32_t>(rules.all.size()) - num_operands;
  if (buffers.num_operands == num_operands && buffers.num_results == num_results) return {};
  return InvalidArgument("the custom call requires ", rules.RolesText(), ", as its `buffers` say, got ",
                         buffers.num_operands, " operands and ", buffers.num_results, " results");
}

Status CheckType(const BufferRule& rule, const JbwBuffer& buffer) {
  const auto rank = static_cast<int32_t>(rule.dims.size());
  if (buffer.rank != rank) {
    return InvalidArgument("`", rule.role, "` requires rank ", rank, ", got rank ", buffer.rank, " ", Shape(buffer));
  }
  if (buffer.dtype == rule.dtype) return {};
  return InvalidArgument("`", rule.role, "` requires ", DtypeName(rule.dtype),
                         ", for which the kernel is compiled, got ", DtypeName(buffer.dtype), ": cast it first");
}

bool IsLikeResult(const BufferRules& rules, const BufferRule& rule) {
  const std::vector<Dim>& dims = rules.result().dims;
  return std::equal(rule.dims.begin(), rule.dims.end(), dims.begin(), dims.end(),
                    [](const Dim& x, const Dim& y) { return x.extent == y.extent; });
}

Status CheckSize(const char* name, int64_t size) {
  if (size >= 1 && size <= kInt32Max) return {};
  return InvalidArgument("`", name, "` requires 1..", kInt32Max, ", got ", size);
}

// The operand with the smallest k, which is the product's: other operands may have zeros behind theirs.
size_t SmallestK(const BufferRules& rules, const JbwBuffers& buffers, int64_t* k) {
  size_t smallest = 0;
  *k = INT64_MAX;
  for (size_t i = 0; i < static_cast<size_t>(buffers.num_operands); ++i) {
    for (size_t j = 0; j < rules.all[i].dims.size(); ++j) {
      if (rules.all[i].dims[j].extent != Extent::kK || buffers.all[i].dims[j] >= *k) continue;
      *k = buffers.all[i].dims[j];
      smallest = i;
    }
  }
  return smallest;
}

int64_t* Find(Sizes* sizes, Extent extent) {
  if (extent == Extent::kBatch) return &sizes->batch;
  if (extent == Extent::kM) return &sizes->m;
  if (extent == Extent::kOne) return &sizes->one;
  return extent == Extent::kN ? &sizes->n : &sizes->k;
}

// `whose`: the buffer that says what the size is.
Status CheckDim(const BufferRule& rule, const Dim& dim, int64_t size, int64_t whole, const std::string& whose) {
  const int64_t want = (whole + dim.every - 1) / dim.every;
  const Pitches pitches(want, DtypeBytes(rule.dtype));
  const bool is_padded = dim.may_be_padded && pitches.least != want;
  if (dim.extent == Extent::kBytes || size == want || (dim.may_be_one && size == 1)) return {};
  if (dim.extent == Extent::kBatch) {
    return InvalidArgument("the batch of `", rule.role, "` requires the result's ", want,
                           dim.may_be_one ? " or 1 (shared), got " : ", got ", size);
  }
  if (is_padded && pitches.Contain(size)) return {};
  return InvalidArgument(static_cast<char>(dim.extent), " of `", rule.role, "` and of ", whose, " requires ", want,
                         is_padded ? Cat(", or with padding ", pitches.Text()) : "", ", got ", size);
}

}  // namespace

Pitches::Pitches(int64_t size, int64_t element_bytes) : step(kAlignBytes / element_bytes) {
  const int64_t line = kLineBytes / element_bytes;
  least = (size + step - 1) / step * step;
  most = (size + line - 1) / line * line;
}

std::vector<JbwBuffer> WithBatch(const BufferRules& rules, const JbwBuffers& buffers) {
  std::vector<JbwBuffer> whole(buffers.all, buffers.all + std::max(0, buffers.num_operands + buffers.num_results));
  for (size_t i = 0; i < whole.size() && i < rules.all.size(); ++i) {
    JbwBuffer& buffer = whole[i];
    if (buffer.rank == 2 && IsLikeResult(rules, rules.all[i])) {
      buffer = {buffer.dtype, 3, {1, buffer.dims[0], buffer.dims[1]}};
    }
  }
  return whole;
}

Status ReadSizes(const BufferRules& rules, const JbwBuffers& buffers, Sizes* sizes) {
  JBW_RETURN_IF_ERROR(CheckCount(rules, buffers));
  for (size_t i = 0; i < rules.all.size(); ++i) JBW_RETURN_IF_ERROR(CheckType(rules.all[i], buffers.all[i]));
  const std::vector<Dim>& dims = rules.result().dims;
  for (size_t i = 0; i < dims.size(); ++i) *Find(sizes, dims[i].extent) = buffers.all[buffers.num_operands].dims[i];
  const size_t smallest = SmallestK(rules, buffers, &sizes->k);
  JBW_RETURN_IF_ERROR(CheckSize("m", sizes->m));
  JBW_RETURN_IF_ERROR(CheckSize("n", sizes->n));
  JBW_RETURN_IF_ERROR(CheckSize("k", sizes->k));
  JBW_RETURN_IF_ERROR(CheckSize("batch", sizes->batch));
  for (size_t i = 0; i < rules.all.size(); ++i) {
    for (size_t j = 0; j < rules.all[i].dims.size(); ++j) {
      const Dim& dim = rules.all[i].dims[j];
      const std::string whose = dim.extent == Extent::kK ? Cat("`", rules.all[smallest].role, "`") : "the result";
      JBW_RETURN_IF_ERROR(CheckDim(rules.all[i], dim, buffers.all[i].dims[j], *Find(sizes, dim.extent), whose));
    }
  }
  return {};
}

}  // namespace jbw

#include "operands.h"

#include <algorithm>

namespace jbw {
namespace {

struct DtypeFacts {
  int32_t dtype;
  const char* name;
  int64_t bytes;
};

constexpr DtypeFacts kDtypes[] = {
    {kInt8, "int8", 1},
    {kInt32, "int32", 4},
    {kUint8, "uint8", 1},
    {kFloat16, "float16", 2},
    {kFloat32, "float32", 4},
    {kBfloat16, "bfloat16", 2},
    {kFloat8E5M2, "float8_e5m2", 1},
    {kFloat8E4M3FN, "float8_e4m3fn", 1},
};

const DtypeFacts* FindDtype(int32_t dtype) {
  for (const DtypeFacts& facts : kDtypes) {
    if (facts.dtype == dtype) return &facts;
  }
  return nullptr;
}

std::string DtypeName(int32_t dtype) {
  const DtypeFacts* facts = FindDtype(dtype);
  return facts ? facts->name : Cat("XLA FFI dtype ", dtype);
}

bool IsFloat8(int32_t dtype) { return dtype == kFloat8E5M2 || dtype == kFloat8E4M3FN; }
bool IsInt8(int32_t dtype) { return dtype == kInt8 || dtype == kUint8; }
bool IsFloat(int32_t dtype) { return dtype == kFloat16 || dtype == kBfloat16 || dtype == kFloat32; }

std::string Shape(const JbwBuffer& buffer) {
  std::string text = "(";
  for (int i = 0; i < buffer.rank && i < 3; ++i) text += Cat(i ? ", " : "", buffer.dims[i]);
  return text + (buffer.rank > 3 ? ", ...)" : ")");
}

Status CheckRank(const char* name, const JbwBuffer& buffer, int32_t rank) {
  if (buffer.rank == rank) return {};
  if (buffer.rank < 0) return InvalidArgument("`", name, "` requires a buffer of rank ", rank, ", got none");
  return InvalidArgument("`", name, "` requires rank ", rank, ", got rank ", buffer.rank, " ", Shape(buffer));
}

Status CheckDtypes(const JbwBuffer& a, const JbwBuffer& b, const JbwBuffer& out) {
  const bool are_int8 = IsInt8(a.dtype) && IsInt8(b.dtype), are_float8 = IsFloat8(a.dtype) && IsFloat8(b.dtype);
  if (!are_int8 && !are_float8 && (a.dtype != b.dtype || !IsFloat(a.dtype))) {
    return InvalidArgument(
        "operands require two of float8_e4m3fn and float8_e5m2, two of int8 and uint8, or bfloat16, float16 or "
        "float32, both the same, got ",
        DtypeName(a.dtype), " and ", DtypeName(b.dtype), ": cast them first");
  }
  if (are_int8 ? out.dtype == kInt32 : IsFloat(out.dtype) || IsFloat8(out.dtype)) return {};
  return InvalidArgument("the result of ", DtypeName(a.dtype), " and ", DtypeName(b.dtype), " requires ",
                         are_int8 ? "int32" : "bfloat16, float16, float32, float8_e4m3fn or float8_e5m2", ", got ",
                         DtypeName(out.dtype));
}

Status CheckSize(const char* name, int64_t size) {
  if (size >= 1 && size <= kInt32Max) return {};
  return InvalidArgument("`", name, "` requires 1..", kInt32Max, ", got ", size);
}

Status CheckAgrees(const char* what, int64_t want, int64_t got) {
  if (want == got) return {};
  return InvalidArgument(what, " requires ", want, ", got ", got);
}

// Zeros may follow a contiguous dimension that TMA cannot step over.
Status CheckExtent(const char* what, int64_t want, int64_t size, bool is_contiguous, int32_t dtype) {
  const Pitches pitches(want, DtypeBytes(dtype));
  if (size == want || !is_contiguous || pitches.least == want) return CheckAgrees(what, want, size);
  if (pitches.Contain(size)) return {};
  return InvalidArgument(what, " requires ", want, ", or with padding ", pitches.Text(), ", got ", size);
}

Status CheckBatch(const char* name, int64_t batch, int64_t operand_batch) {
  if (operand_batch == batch || operand_batch == 1) return {};
  return InvalidArgument("the batch of `", name, "` requires the result's ", batch, " or 1 (shared), got ",
                         operand_batch);
}

Status CheckAbsent(const char* name, const JbwBuffer& buffer) {
  if (buffer.rank < 0) return {};
  return InvalidArgument("a kernel without a ", name, " parameter requires no ", name, ", got one of shape ",
                         Shape(buffer));
}

Status CheckResultDtype(const char* name, const JbwBuffer& buffer, const JbwBuffer& out) {
  if (buffer.dtype == out.dtype) return {};
  return InvalidArgument("`", name, "` requires the result's dtype ", DtypeName(out.dtype), ", got ",
                         DtypeName(buffer.dtype));
}

Status CheckBias(const JbwBuffer& bias, bool has_bias, const JbwBuffer& out) {
  if (!has_bias) return CheckAbsent("bias", bias);
  JBW_RETURN_IF_ERROR(CheckRank("bias", bias, 1));
  JBW_RETURN_IF_ERROR(CheckResultDtype("bias", bias, out));
  return CheckAgrees("the length of `bias`", out.dims[2], bias.dims[0]);
}

Status CheckResidual(const JbwBuffer& residual, bool has_residual, const JbwBuffer& out) {
  if (!has_residual) return CheckAbsent("residual", residual);
  JBW_RETURN_IF_ERROR(CheckRank("residual", residual, 3));
  JBW_RETURN_IF_ERROR(CheckResultDtype("residual", residual, out));
  if (std::equal(residual.dims, residual.dims + 3, out.dims)) return {};
  return InvalidArgument("`residual` requires the result's shape ", Shape(out), ", got ", Shape(residual));
}

}  // namespace

int64_t DtypeBytes(int32_t dtype) {
  const DtypeFacts* facts = FindDtype(dtype);
  return facts ? facts->bytes : 0;
}

Pitches::Pitches(int64_t size, int64_t element_bytes) : step(kAlignBytes / element_bytes) {
  const int64_t line = kLineBytes / element_bytes;
  least = (size + step - 1) / step * step;
  most = (size + line - 1) / line * line;
}

Status ReadSizes(const Buffers& buffers, const Majors& majors, const Optionals& has, Sizes* sizes) {
  const JbwBuffer &a = buffers.a, &b = buffers.b, &out = buffers.out;
  JBW_RETURN_IF_ERROR(CheckRank("a", a, 3));
  JBW_RETURN_IF_ERROR(CheckRank("b", b, 3));
  JBW_RETURN_IF_ERROR(CheckRank("out", out, 3));
  JBW_RETURN_IF_ERROR(CheckDtypes(a, b, out));
  const bool a_k_inner = majors.a == 'k', b_k_inner = majors.b == 'k', c_n_inner = majors.c == 'n';
  const int64_t a_m = a.dims[a_k_inner ? 1 : 2], a_k = a.dims[a_k_inner ? 2 : 1];
  const int64_t b_n = b.dims[b_k_inner ? 1 : 2], b_k = b.dims[b_k_inner ? 2 : 1];
  const int64_t m = out.dims[c_n_inner ? 1 : 2], n = out.dims[c_n_inner ? 2 : 1];
  *sizes = {m, n, std::min(a_k, b_k), out.dims[0], a.dims[0], b.dims[0]};
  JBW_RETURN_IF_ERROR(CheckSize("m", sizes->m));
  JBW_RETURN_IF_ERROR(CheckSize("n", sizes->n));
  JBW_RETURN_IF_ERROR(CheckSize("k", sizes->k));
  JBW_RETURN_IF_ERROR(CheckSize("batch", sizes->batch));
  JBW_RETURN_IF_ERROR(CheckExtent("m of `a` and of the result", m, a_m, !a_k_inner, a.dtype));
  JBW_RETURN_IF_ERROR(CheckExtent("n of `b` and of the result", n, b_n, !b_k_inner, b.dtype));
  JBW_RETURN_IF_ERROR(CheckExtent("k of `a` and of `b`", sizes->k, a_k, a_k_inner, a.dtype));
  JBW_RETURN_IF_ERROR(CheckExtent("k of `b` and of `a`", sizes->k, b_k, b_k_inner, b.dtype));
  JBW_RETURN_IF_ERROR(CheckBatch("a", sizes->batch, sizes->a_batch));
  JBW_RETURN_IF_ERROR(CheckBatch("b", sizes->batch, sizes->b_batch));
  JBW_RETURN_IF_ERROR(CheckBias(buffers.bias, has.bias, out));
  return CheckResidual(buffers.residual, has.residual, out);
}

}  // namespace jbw

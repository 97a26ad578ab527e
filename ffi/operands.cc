#include "operands.h"

namespace jbw {
namespace {

std::string DtypeName(int32_t dtype) {
  switch (dtype) {
    case kFloat16:
      return "float16";
    case kBfloat16:
      return "bfloat16";
    case kFloat32:
      return "float32";
    default:
      return Cat("XLA FFI dtype ", dtype);
  }
}

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
  if (a.dtype != b.dtype || DtypeBytes(a.dtype) != 2) {
    return InvalidArgument("operands require bfloat16 or float16, both the same, got ", DtypeName(a.dtype), " and ",
                           DtypeName(b.dtype), ": cast them first");
  }
  if (DtypeBytes(out.dtype) == 0) {
    return InvalidArgument("the result requires bfloat16, float16 or float32, got ", DtypeName(out.dtype));
  }
  return {};
}

Status CheckSize(const char* name, int64_t size) {
  if (size >= 1 && size <= kInt32Max) return {};
  return InvalidArgument("`", name, "` requires 1..", kInt32Max, ", got ", size);
}

Status CheckAgrees(const char* what, int64_t want, int64_t got) {
  if (want == got) return {};
  return InvalidArgument(what, " requires ", want, ", got ", got);
}

Status CheckBatch(const char* name, int64_t batch, int64_t operand_batch) {
  if (operand_batch == batch || operand_batch == 1) return {};
  return InvalidArgument("the batch of `", name, "` requires the result's ", batch, " or 1 (shared), got ",
                         operand_batch);
}

Status CheckBias(const JbwBuffer& bias, bool has_bias, const JbwBuffer& out, int64_t n) {
  if (!has_bias) {
    if (bias.rank < 0) return {};
    return InvalidArgument("a kernel without a bias parameter requires operands a and b alone, got a bias ",
                           Shape(bias));
  }
  JBW_RETURN_IF_ERROR(CheckRank("bias", bias, 1));
  if (bias.dtype != out.dtype) {
    return InvalidArgument("`bias` requires the result's dtype ", DtypeName(out.dtype), ", got ",
                           DtypeName(bias.dtype));
  }
  return CheckAgrees("the length of `bias`", n, bias.dims[0]);
}

}  // namespace

int64_t DtypeBytes(int32_t dtype) {
  if (dtype == kFloat16 || dtype == kBfloat16) return 2;
  return dtype == kFloat32 ? 4 : 0;
}

Status ReadSizes(const JbwBuffer& a, const JbwBuffer& b, const JbwBuffer& out, const JbwBuffer& bias, int32_t a_major,
                 int32_t b_major, bool has_bias, Sizes* sizes) {
  JBW_RETURN_IF_ERROR(CheckRank("a", a, 3));
  JBW_RETURN_IF_ERROR(CheckRank("b", b, 3));
  JBW_RETURN_IF_ERROR(CheckRank("out", out, 3));
  JBW_RETURN_IF_ERROR(CheckDtypes(a, b, out));
  const bool a_k_inner = a_major == 'k', b_n_inner = b_major == 'n';
  *sizes = {out.dims[1], out.dims[2], a.dims[a_k_inner ? 2 : 1], out.dims[0], a.dims[0], b.dims[0]};
  JBW_RETURN_IF_ERROR(CheckSize("m", sizes->m));
  JBW_RETURN_IF_ERROR(CheckSize("n", sizes->n));
  JBW_RETURN_IF_ERROR(CheckSize("k", sizes->k));
  JBW_RETURN_IF_ERROR(CheckSize("batch", sizes->batch));
  JBW_RETURN_IF_ERROR(CheckAgrees("m of `a` and of the result", sizes->m, a.dims[a_k_inner ? 1 : 2]));
  JBW_RETURN_IF_ERROR(CheckAgrees("n of `b` and of the result", sizes->n, b.dims[b_n_inner ? 2 : 1]));
  JBW_RETURN_IF_ERROR(CheckAgrees("k of `b` and of `a`", sizes->k, b.dims[b_n_inner ? 1 : 2]));
  JBW_RETURN_IF_ERROR(CheckBatch("a", sizes->batch, sizes->a_batch));
  JBW_RETURN_IF_ERROR(CheckBatch("b", sizes->batch, sizes->b_batch));
  return CheckBias(bias, has_bias, out, sizes->n);
}

}  // namespace jbw

#include "attributes.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace ffi = xla::ffi;

namespace jbw {
namespace {

using Three = int32_t[3];

Status WrongAttribute(std::string_view name, const char* type, const ffi::Dictionary& attrs) {
  return InvalidArgument("attribute `", name, "` requires ", type, ", got ",
                         attrs.contains(name) ? "another type" : "none",
                         ": the Python package and the library are of different versions, reinstall");
}

template <typename T>
Status ReadScalar(const ffi::Dictionary& attrs, std::string_view name, const char* type, T* value) {
  ffi::ErrorOr<T> found = attrs.get<T>(name);
  if (!found.has_value()) return WrongAttribute(name, type, attrs);
  *value = *found;
  return {};
}

Status Read(const ffi::Dictionary& attrs, std::string_view name, int32_t* value) {
  return ReadScalar(attrs, name, "an int32", value);
}

Status Read(const ffi::Dictionary& attrs, std::string_view name, float* value) {
  return ReadScalar(attrs, name, "a float32", value);
}

Status Read(const ffi::Dictionary& attrs, std::string_view name, std::string* value) {
  std::string_view view;
  JBW_RETURN_IF_ERROR(ReadScalar(attrs, name, "a string", &view));
  *value = std::string(view);
  return {};
}

Status Read(const ffi::Dictionary& attrs, std::string_view name, Three* values) {
  ffi::Span<const int32_t> span;
  JBW_RETURN_IF_ERROR(ReadScalar(attrs, name, "3 int32", &span));
  if (span.size() != 3) return InvalidArgument("attribute `", name, "` requires 3 int32, got ", span.size());
  std::copy(span.begin(), span.end(), *values);
  return {};
}

Status ReadMajor(const ffi::Dictionary& attrs, std::string_view name, int32_t* major) {
  std::string text;
  JBW_RETURN_IF_ERROR(Read(attrs, name, &text));
  if (text.size() != 1) return InvalidArgument("attribute `", name, "` requires one character, got '", text, "'");
  *major = text[0];
  return {};
}

Status ReadParams(const ffi::Dictionary& attrs, JbwLaunchRequest* request) {
  ffi::Span<const int32_t> span;
  JBW_RETURN_IF_ERROR(ReadScalar(attrs, "params", "an int32 array", &span));
  if (span.size() % 3 || span.size() > 3 * JBW_MAX_PARAMS) {
    return InvalidArgument("attribute `params` requires (kind, offset, size) of at most ", JBW_MAX_PARAMS,
                           " leaves, got ", span.size(), " numbers");
  }
  request->num_params = static_cast<int32_t>(span.size() / 3);
  for (size_t i = 0; i < span.size() / 3; ++i) request->params[i] = {span[3 * i], span[3 * i + 1], span[3 * i + 2]};
  return Read(attrs, "param_bytes", &request->param_bytes);
}

Status ReadTile(const ffi::Dictionary& attrs, JbwLaunchRequest* request) {
  const std::pair<const char*, int32_t*> fields[] = {
      {"cta_m", &request->cta_m},
      {"mma_n", &request->mma_n},
      {"cluster_m", &request->cluster_m},
      {"cluster_n", &request->cluster_n},
      {"cluster_k", &request->cluster_k},
      {"num_threads", &request->num_threads},
      {"smem_bytes", &request->smem_bytes},
      {"raster_group", &request->raster_group},
      {"raster_along_n", &request->raster_along_n},
      {"raster_order", &request->raster_order},
      {"a_l2", &request->a_l2},
      {"b_l2", &request->b_l2},
      {"stream_tiles", &request->stream_tiles},
      {"stream_clusters", &request->stream_clusters},
      {"pdl", &request->pdl},
  };
  for (const auto& [name, value] : fields) JBW_RETURN_IF_ERROR(Read(attrs, name, value));
  return Read(attrs, "alpha", &request->alpha);
}

Status ReadNames(const ffi::Dictionary& attrs, KernelSpec* spec) {
  JBW_RETURN_IF_ERROR(Read(attrs, "variant", &spec->variant));
  JBW_RETURN_IF_ERROR(Read(attrs, "entry", &spec->entry));
  JBW_RETURN_IF_ERROR(Read(attrs, "target", &spec->target));
  return Read(attrs, "cubin_sha256", &spec->cubin_sha256);
}

}  // namespace

Status ReadRequest(const ffi::Dictionary& attrs, JbwLaunchRequest* request) {
  JBW_RETURN_IF_ERROR(ReadMajor(attrs, "a_major", &request->a_major));
  JBW_RETURN_IF_ERROR(ReadMajor(attrs, "b_major", &request->b_major));
  JBW_RETURN_IF_ERROR(ReadMajor(attrs, "c_major", &request->c_major));
  JBW_RETURN_IF_ERROR(ReadTile(attrs, request));
  JBW_RETURN_IF_ERROR(Read(attrs, "a_box", &request->box[0]));
  JBW_RETURN_IF_ERROR(Read(attrs, "b_box", &request->box[1]));
  JBW_RETURN_IF_ERROR(Read(attrs, "c_box", &request->box[2]));
  JBW_RETURN_IF_ERROR(Read(attrs, "swizzle_bytes", &request->swizzle_bytes));
  JBW_RETURN_IF_ERROR(Read(attrs, "swizzle_atom_bytes", &request->swizzle_atom_bytes));
  return ReadParams(attrs, request);
}

Status ReadSpec(const ffi::Dictionary& attrs, const JbwLaunchRequest& request, KernelSpec* spec) {
  JBW_RETURN_IF_ERROR(ReadNames(attrs, spec));
  spec->cluster_m = request.cluster_m;
  spec->cluster_n = request.cluster_n;
  spec->cluster_k = request.cluster_k;
  spec->num_threads = request.num_threads;
  spec->smem_bytes = request.smem_bytes;
  return {};
}

Status ReadRepack(const ffi::Dictionary& attrs, JbwRepackRequest* request, KernelSpec* spec) {
  JBW_RETURN_IF_ERROR(ReadNames(attrs, spec));
  std::string kind;
  JBW_RETURN_IF_ERROR(Read(attrs, "kind", &kind));
  if (kind != "pad" && kind != "transpose") {
    return InvalidArgument("attribute `kind` requires pad or transpose, got '", kind, "'");
  }
  request->is_transpose = kind == "transpose";
  JBW_RETURN_IF_ERROR(Read(attrs, "element_bytes", &request->element_bytes));
  JBW_RETURN_IF_ERROR(Read(attrs, "num_ctas", &request->num_ctas));
  JBW_RETURN_IF_ERROR(Read(attrs, "num_threads", &request->num_threads));
  JBW_RETURN_IF_ERROR(Read(attrs, "smem_bytes", &request->smem_bytes));
  JBW_RETURN_IF_ERROR(Read(attrs, "pdl", &request->pdl));
  spec->cluster_m = spec->cluster_n = spec->cluster_k = 1;
  spec->num_threads = request->num_threads;
  spec->smem_bytes = request->smem_bytes;
  return {};
}

}  // namespace jbw

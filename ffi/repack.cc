#include "repack.h"

#include <string>
#include <utility>

#include "dtypes.h"
#include "stats.h"

namespace jbw {
namespace {

// Kernels count rows and columns from the first of a tile: what a tile may reach beyond them must be an int32 too.
constexpr int64_t kMaxTile = 128;

Status ReadRequest(const Attributes& attrs, RepackRequest* request) {
  std::string kind;
  JBW_RETURN_IF_ERROR(Read(attrs, "kind", &kind));
  if (kind != "pad" && kind != "transpose") {
    return InvalidArgument("attribute `kind` requires pad or transpose, got '", kind, "'");
  }
  request->is_transpose = kind == "transpose";
  JBW_RETURN_IF_ERROR(Read(attrs, "element_bytes", &request->element_bytes));
  if (const int32_t bytes = request->element_bytes; bytes != 1 && bytes != 2 && bytes != 4) {
    return InvalidArgument("`element_bytes` requires 1, 2 or 4, got ", bytes);
  }
  JBW_RETURN_IF_ERROR(Read(attrs, "num_ctas", 1, kInt32Max, &request->num_ctas));
  JBW_RETURN_IF_ERROR(Read(attrs, "first_ctas", 1, request->num_ctas, &request->first_ctas));
  JBW_RETURN_IF_ERROR(Read(attrs, "num_threads", 1, 1024, &request->num_threads));
  JBW_RETURN_IF_ERROR(Read(attrs, "smem_bytes", 0, 1 << 20, &request->smem_bytes));
  return Read(attrs, "pdl", 0, 1, &request->pdl);
}

Status CheckBuffer(const char* name, const JbwBuffer& buffer, int32_t element_bytes) {
  if (buffer.rank != 3) return InvalidArgument("`", name, "` requires a buffer of rank 3, got rank ", buffer.rank);
  if (DtypeBytes(buffer.dtype) == element_bytes) return {};
  return InvalidArgument("`", name, "` requires elements of ", element_bytes, " bytes, got XLA FFI dtype ",
                         buffer.dtype);
}

Status CheckDims(const char* name, const JbwBuffer& buffer) {
  for (int64_t size : buffer.dims) {
    if (size >= 1 && size <= kInt32Max - kMaxTile) continue;
    return InvalidArgument("`", name, "` requires sizes of 1..", kInt32Max - kMaxTile, ", got ", size);
  }
  return {};
}

// The result is what the kernel writes to its last byte, and the kernel can count it.
Status CheckPair(const RepackRequest& request, const JbwBuffer& source, const JbwBuffer& out) {
  JBW_RETURN_IF_ERROR(CheckBuffer("source", source, request.element_bytes));
  JBW_RETURN_IF_ERROR(CheckBuffer("out", out, request.element_bytes));
  JBW_RETURN_IF_ERROR(CheckDims("source", source));
  JBW_RETURN_IF_ERROR(CheckDims("out", out));
  if (source.dtype != out.dtype) {
    return InvalidArgument("`out` requires the dtype of `source`, XLA FFI dtype ", source.dtype, ", got ", out.dtype);
  }
  const int64_t slow = source.dims[request.is_transpose ? 2 : 1], inner = source.dims[request.is_transpose ? 1 : 2];
  const Pitches pitches(inner, request.element_bytes);
  if (out.dims[0] != source.dims[0] || out.dims[1] != slow || !pitches.Contain(out.dims[2])) {
    return InvalidArgument("`out` requires shape (", source.dims[0], ", ", slow, ", ", pitches.Text(), "), got (",
                           out.dims[0], ", ", out.dims[1], ", ", out.dims[2], ")");
  }
  const int64_t row_chunks = out.dims[2] / pitches.step;
  if (source.dims[0] > kInt32Max / slow || source.dims[0] * slow > kInt32Max / row_chunks) {
    return InvalidArgument("`out` requires at most ", kInt32Max, " chunks of ", kAlignBytes, " bytes, got ",
                           source.dims[0], " x ", slow, " x ", row_chunks);
  }
  return {};
}

Status CheckSizes(const RepackRequest& request, const JbwBuffers& buffers) {
  const int64_t num_sources = buffers.num_operands;
  if (num_sources < 1 || num_sources > (request.is_transpose ? 1 : kMaxSources) || buffers.num_results != num_sources) {
    return InvalidArgument("a repack requires one operand, or two of a pad, and as many results, got ", num_sources,
                           " and ", buffers.num_results);
  }
  if (num_sources == 1 && request.first_ctas != request.num_ctas) {
    return InvalidArgument("`first_ctas` requires all ", request.num_ctas, " of one source, got ", request.first_ctas);
  }
  for (int64_t i = 0; i < num_sources; ++i) {
    JBW_RETURN_IF_ERROR(CheckPair(request, buffers.all[i], buffers.all[num_sources + i]));
  }
  return {};
}

Status CheckAligned(const char* name, const void* pointer, int32_t align_bytes) {
  if (reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(align_bytes) == 0) return {};
  return InvalidArgument("`", name, "` requires a pointer aligned to ", align_bytes, " bytes, got ", pointer,
                         ": compile with xla_gpu_enable_dynamic_slice_fusion=False");
}

}  // namespace

Status RepackCall::Create(const Attributes& attrs, const JbwBuffers& buffers, std::unique_ptr<RepackCall>* call) {
  RepackRequest request;
  JBW_RETURN_IF_ERROR(ReadRequest(attrs, &request));
  if (buffers.num_results > 0) JBW_RETURN_IF_ERROR(CheckSizes(request, buffers));
  KernelSpec spec = {{}, {}, {}, {}, 1, 1, 1, request.num_threads, request.smem_bytes};
  JBW_RETURN_IF_ERROR(ReadNames(attrs, &spec));
  Kernel* kernel;
  JBW_RETURN_IF_ERROR(CubinCache::Global().Find(spec, &kernel));
  call->reset(new RepackCall(kernel, request));
  return {};
}

bool RepackCall::IsReady(int device) const {
  return device >= 0 && device < kMaxDevices && kernel_->max_active_clusters(device) > 0 &&
         sizes_.load(std::memory_order_acquire);
}

Status RepackCall::Initialize(int device, const JbwBuffers& buffers) {
  JBW_RETURN_IF_ERROR(kernel_->Prepare(device));
  std::lock_guard<std::mutex> lock(mutex_);
  if (owned_) return {};
  JBW_RETURN_IF_ERROR(CheckSizes(request_, buffers));
  AllSizes all = {static_cast<size_t>(buffers.num_operands), {}};
  for (size_t i = 0; i < all.num_sources; ++i) {
    const int64_t* dims = buffers.all[i].dims;
    all.of[i] = {static_cast<int32_t>(dims[0]), static_cast<int32_t>(dims[1]), static_cast<int32_t>(dims[2]),
                 static_cast<int32_t>(buffers.all[all.num_sources + i].dims[2])};
  }
  owned_ = std::make_unique<const AllSizes>(all);
  sizes_.store(owned_.get(), std::memory_order_release);
  return {};
}

Status RepackCall::Execute(int device, cuda::Stream stream, void* const* pointers) const {
  ExecuteTimer timer;
  if (!IsReady(device)) return Internal("Execute requires an Initialize on the same device, got none on ", device);
  const cuda::Driver* driver;
  JBW_RETURN_IF_ERROR(cuda::GetDriver(&driver));
  AllSizes all = *sizes_.load(std::memory_order_acquire);
  void *sources[kMaxSources] = {}, *outs[kMaxSources] = {}, *params[kMaxSources * 6 + 1];
  size_t num_params = 0;
  for (size_t i = 0; i < kMaxSources; ++i) {
    if (i < all.num_sources) {
      sources[i] = pointers[i];
      outs[i] = pointers[all.num_sources + i];
      JBW_RETURN_IF_ERROR(CheckAligned("source", sources[i], request_.element_bytes));
      JBW_RETURN_IF_ERROR(CheckAligned("out", outs[i], kAlignBytes));
    }
    Sizes& of = all.of[i];
    for (void* param : {static_cast<void*>(&sources[i]), static_cast<void*>(&outs[i]), static_cast<void*>(&of.batch),
                        static_cast<void*>(&of.rows), static_cast<void*>(&of.cols), static_cast<void*>(&of.pitch)}) {
      params[num_params++] = param;
    }
  }
  int32_t first_ctas = request_.first_ctas;
  params[num_params] = &first_ctas;  // of a transpose, the driver reads the first source's alone
  cuda::LaunchAttribute attribute = {};
  attribute.id = cuda::kLaunchAttributeProgrammaticStreamSerialization;
  attribute.value.programmatic_stream_serialization = 1;
  const cuda::LaunchConfig config = {{static_cast<uint32_t>(request_.num_ctas), 1, 1},
                                     {static_cast<uint32_t>(request_.num_threads), 1, 1},
                                     static_cast<uint32_t>(request_.smem_bytes),
                                     stream,
                                     &attribute,
                                     static_cast<uint32_t>(request_.pdl)};
  timer.BeforeLaunch();
  const cuda::Result result = driver->cuLaunchKernelEx(&config, kernel_->function(), params, nullptr);
  timer.AfterLaunch();
  if (result == cuda::kSuccess) return {};
  return cuda::LaunchError(*driver, kernel_->spec().variant, device, result, "");
}

}  // namespace jbw

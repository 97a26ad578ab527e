#include "c_api.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "call.h"
#include "guard.h"
#include "repack.h"
#include "sha256.h"
#include "stats.h"

namespace {

int Report(const jbw::Status& status, char* error, size_t error_bytes) {
  if (error_bytes > 0) {
    const size_t length = std::min(status.message().size(), error_bytes - 1);
    std::memcpy(error, status.message().data(), length);
    error[length] = '\0';
  }
  return static_cast<int>(status.code());
}

jbw::Call* FromC(JbwCall* call) { return reinterpret_cast<jbw::Call*>(call); }
jbw::RepackCall* FromC(JbwRepackCall* call) { return reinterpret_cast<jbw::RepackCall*>(call); }

}  // namespace

const char* jbw_version() { return JAX_BWGEMM_VERSION; }

void jbw_struct_bytes(size_t* request, size_t* plan) {
  *request = sizeof(JbwLaunchRequest);
  *plan = sizeof(JbwLaunchPlan);
}

const char* jbw_param_kind(int code) { return jbw::ParamKindName(code); }

void jbw_set_artifact_dirs(const char* const* directories, size_t count) {
  jbw::CubinCache::Global().SetDirectories(std::vector<std::string>(directories, directories + count));
}

int jbw_launch_plan(const JbwLaunchRequest* request, JbwLaunchPlan* plan, char* error, size_t error_bytes) {
  return Report(jbw::Guard([&] { return jbw::MakeLaunchPlan(*request, plan); }), error, error_bytes);
}

void jbw_sha256(const void* data, size_t bytes, char* hex) {
  const std::string digest = jbw::Sha256Hex({static_cast<const char*>(data), bytes});
  std::memcpy(hex, digest.c_str(), digest.size() + 1);
}

uint64_t jbw_execute_count() { return jbw::ExecuteCount(); }

void jbw_timing_start(size_t capacity) { jbw::StartTiming(capacity); }

size_t jbw_timing_read(int64_t* own_ns, int64_t* total_ns, size_t capacity) {
  return jbw::ReadTiming(own_ns, total_ns, capacity);
}

int jbw_call_create(const JbwKernelNames* names, const JbwLaunchRequest* request, JbwCall** call, char* error,
                    size_t error_bytes) {
  auto create = [&] {
    const jbw::KernelSpec spec = {names->variant,      names->entry,         names->target,
                                  names->cubin_sha256, request->cluster_m,   request->cluster_n,
                                  request->cluster_k,  request->num_threads, request->smem_bytes};
    std::unique_ptr<jbw::Call> created;
    JBW_RETURN_IF_ERROR(jbw::Call::Create(spec, *request, request->a.rank >= 0, &created));
    *call = reinterpret_cast<JbwCall*>(created.release());
    return jbw::Status();
  };
  return Report(jbw::Guard(create), error, error_bytes);
}

int jbw_call_initialize(JbwCall* call, int device, const JbwLaunchRequest* buffers, char* error, size_t error_bytes) {
  return Report(jbw::Guard([&] { return FromC(call)->Initialize(device, *buffers); }), error, error_bytes);
}

int jbw_call_execute(const JbwCall* call, int device, void* stream, void* a, void* b, void* out, void* bias,
                     void* residual, void* workspace, char* error, size_t error_bytes) {
  auto execute = [&] {
    return reinterpret_cast<const jbw::Call*>(call)->Execute(device, static_cast<jbw::cuda::Stream>(stream),
                                                             {a, b, out, bias, residual, workspace});
  };
  return Report(jbw::Guard(execute), error, error_bytes);
}

void jbw_call_destroy(JbwCall* call) { delete FromC(call); }

int jbw_repack_call_create(const JbwKernelNames* names, const JbwRepackRequest* request, JbwRepackCall** call,
                           char* error, size_t error_bytes) {
  auto create = [&] {
    const jbw::KernelSpec spec = {names->variant,       names->entry,       names->target, names->cubin_sha256, 1, 1, 1,
                                  request->num_threads, request->smem_bytes};
    std::unique_ptr<jbw::RepackCall> created;
    JBW_RETURN_IF_ERROR(jbw::RepackCall::Create(spec, *request, &created));
    *call = reinterpret_cast<JbwRepackCall*>(created.release());
    return jbw::Status();
  };
  return Report(jbw::Guard(create), error, error_bytes);
}

int jbw_repack_call_initialize(JbwRepackCall* call, int device, const JbwRepackRequest* buffers, char* error,
                               size_t error_bytes) {
  return Report(jbw::Guard([&] { return FromC(call)->Initialize(device, *buffers); }), error, error_bytes);
}

int jbw_repack_call_execute(const JbwRepackCall* call, int device, void* stream, const void* source, void* out,
                            char* error, size_t error_bytes) {
  auto execute = [&] {
    return reinterpret_cast<const jbw::RepackCall*>(call)->Execute(device, static_cast<jbw::cuda::Stream>(stream),
                                                                   source, out);
  };
  return Report(jbw::Guard(execute), error, error_bytes);
}

void jbw_repack_call_destroy(JbwRepackCall* call) { delete FromC(call); }

// What Python loads by ctypes (`jax_bwgemm/ffi.py`). Functions that can fail return a status code (status.h) and write
// the sentence into `error`, cut to `error_bytes`.
#ifndef JAX_BWGEMM_C_API_H_
#define JAX_BWGEMM_C_API_H_

#include <cstddef>
#include <cstdint>

#include "launch_plan.h"
#include "repack.h"

#define JBW_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {

struct JbwKernelNames {
  const char *variant, *entry, *target, *cubin_sha256;
};

struct JbwCall;        // a jbw::Call
struct JbwRepackCall;  // a jbw::RepackCall

}  // extern "C"

JBW_EXPORT const char* jbw_version();
JBW_EXPORT int jbw_ffi_api_minor();  // of the XLA FFI headers that the library was built with
JBW_EXPORT void jbw_struct_bytes(size_t* request, size_t* plan);
JBW_EXPORT const char* jbw_param_kind(int code);  // nullptr past the last

JBW_EXPORT void jbw_set_artifact_dirs(const char* const* directories, size_t count);
JBW_EXPORT int jbw_launch_plan(const JbwLaunchRequest* request, JbwLaunchPlan* plan, char* error, size_t error_bytes);
JBW_EXPORT void jbw_sha256(const void* data, size_t bytes, char* hex);  // 64 digits and a NUL

JBW_EXPORT uint64_t jbw_execute_count();
JBW_EXPORT void jbw_timing_start(size_t capacity);
JBW_EXPORT size_t jbw_timing_read(int64_t* own_ns, int64_t* total_ns, size_t capacity);

// The stages without XLA, for tests and microbenchmarks. `a.rank` -1 in `request` says that shapes come later.
JBW_EXPORT int jbw_call_create(const JbwKernelNames* names, const JbwLaunchRequest* request, JbwCall** call,
                               char* error, size_t error_bytes);
JBW_EXPORT int jbw_call_initialize(JbwCall* call, int device, const JbwLaunchRequest* buffers, char* error,
                                   size_t error_bytes);
JBW_EXPORT int jbw_call_execute(const JbwCall* call, int device, void* stream, void* a, void* b, void* out, void* bias,
                                void* residual, void* workspace, char* error, size_t error_bytes);
JBW_EXPORT void jbw_call_destroy(JbwCall* call);

// The same of a repack; `source.rank` -1 in `request` says that shapes come later.
JBW_EXPORT int jbw_repack_call_create(const JbwKernelNames* names, const JbwRepackRequest* request,
                                      JbwRepackCall** call, char* error, size_t error_bytes);
JBW_EXPORT int jbw_repack_call_initialize(JbwRepackCall* call, int device, const JbwRepackRequest* buffers, char* error,
                                          size_t error_bytes);
JBW_EXPORT int jbw_repack_call_execute(const JbwRepackCall* call, int device, void* stream, const void* source,
                                       void* out, char* error, size_t error_bytes);
JBW_EXPORT void jbw_repack_call_destroy(JbwRepackCall* call);

#endif  // JAX_BWGEMM_C_API_H_

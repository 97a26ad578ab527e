// What Python loads by ctypes (`jax_bwgemm/runtime/ffi.py`). Functions that can fail return a status code (status.h)
// and write the sentence into `error`, cut to `error_bytes`.
#ifndef JAX_BWGEMM_C_API_H_
#define JAX_BWGEMM_C_API_H_

#include <cstddef>
#include <cstdint>

#include "attributes.h"
#include "launch_plan.h"
#include "operands.h"

#define JBW_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {

struct JbwAttributes {
  const JbwAttribute* all;
  size_t count;
};

struct JbwCall;        // a jbw::Call
struct JbwRepackCall;  // a jbw::RepackCall

}  // extern "C"

JBW_EXPORT const char* jbw_version();
JBW_EXPORT int jbw_ffi_api_minor();  // of the XLA FFI headers that the library was built with
JBW_EXPORT void jbw_struct_bytes(size_t* attribute, size_t* buffer, size_t* plan);

JBW_EXPORT void jbw_set_artifact_dirs(const char* const* directories, size_t count);
JBW_EXPORT int jbw_launch_plan(const JbwAttributes* attributes, const JbwBuffers* buffers, int32_t max_active_clusters,
                               uint64_t token, JbwLaunchPlan* plan, char* error, size_t error_bytes);
JBW_EXPORT void jbw_sha256(const void* data, size_t bytes, char* hex);       // 64 digits and a NUL
JBW_EXPORT void jbw_tokens(uint64_t first, uint64_t* tokens, size_t count);  // of a source that starts at `first`

JBW_EXPORT uint64_t jbw_execute_count();
JBW_EXPORT void jbw_timing_start(size_t capacity);
JBW_EXPORT size_t jbw_timing_read(int64_t* own_ns, int64_t* total_ns, size_t capacity);

// The stages without XLA, for tests and microbenchmarks. No buffers in a `create` say that shapes come later.
JBW_EXPORT int jbw_call_create(const JbwAttributes* attributes, const JbwBuffers* buffers, JbwCall** call, char* error,
                               size_t error_bytes);
JBW_EXPORT int jbw_call_initialize(JbwCall* call, int device, const JbwBuffers* buffers, char* error,
                                   size_t error_bytes);
JBW_EXPORT int jbw_call_execute(const JbwCall* call, int device, void* stream, void* const* pointers, char* error,
                                size_t error_bytes);
JBW_EXPORT void jbw_call_destroy(JbwCall* call);

// The same of a repack.
JBW_EXPORT int jbw_repack_call_create(const JbwAttributes* attributes, const JbwBuffers* buffers, JbwRepackCall** call,
                                      char* error, size_t error_bytes);
JBW_EXPORT int jbw_repack_call_initialize(JbwRepackCall* call, int device, const JbwBuffers* buffers, char* error,
                                          size_t error_bytes);
JBW_EXPORT int jbw_repack_call_execute(const JbwRepackCall* call, int device, void* stream, void* const* pointers,
                                       char* error, size_t error_bytes);
JBW_EXPORT void jbw_repack_call_destroy(JbwRepackCall* call);

#endif  // JAX_BWGEMM_C_API_H_

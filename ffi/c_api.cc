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
#include "token.h"

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
const jbw::Call* FromC(const JbwCall* call) { return reinterpret_cast<const jbw::Call*>(call); }
jbw::RepackCall* FromC(JbwRepackCall* call) { return reinterpret_cast<jbw::RepackCall*>(call); }
const jbw::RepackCall* FromC(const JbwRepackCall* call) { return reinterpret_cast<const jbw::RepackCall*>(call); }

jbw::CAttributes FromC(const JbwAttributes& attributes) { return {attributes.all, attributes.count}; }

template <typename Call, typename C>
jbw::Status Create(const JbwAttributes& attributes, const JbwBuffers& buffers, C** call) {
  std::unique_ptr<Call> created;
  JBW_RETURN_IF_ERROR(Call::Create(FromC(attributes), buffers, &created));
  *call = reinterpret_cast<C*>(created.release());
  return {};
}

}  // namespace

const char* jbw_version() { return JAX_BWGEMM_VERSION; }

void jbw_struct_bytes(size_t* attribute, size_t* buffer, size_t* plan) {
  *attribute = sizeof(JbwAttribute);
  *buffer = sizeof(JbwBuffer);
  *plan = sizeof(JbwLaunchPlan);
}

void jbw_set_artifact_dirs(const char* const* directories, size_t count) {
  jbw::CubinCache::Global().SetDirectories(std::vector<std::string>(directories, directories + count));
}

int jbw_launch_plan(const JbwAttributes* attributes, const JbwBuffers* buffers, int32_t max_active_clusters,
                    uint64_t token, JbwLaunchPlan* plan, char* error, size_t error_bytes) {
  auto make = [&] {
    jbw::LaunchRequest request;
    JBW_RETURN_IF_ERROR(jbw::ReadLaunchRequest(FromC(*attributes), &request));
    return jbw::MakeLaunchPlan(request, *buffers, {max_active_clusters, token}, plan);
  };
  return Report(jbw::Guard(make), error, error_bytes);
}

void jbw_sha256(const void* data, size_t bytes, char* hex) {
  const std::string digest = jbw::Sha256Hex({static_cast<const char*>(data), bytes});
  std::memcpy(hex, digest.c_str(), digest.size() + 1);
}

void jbw_tokens(uint64_t first, uint64_t* tokens, size_t count) {
  jbw::TokenSource source(first);
  std::generate_n(tokens, count, [&] { return source.Next(); });
}

uint64_t jbw_execute_count() { return jbw::ExecuteCount(); }

void jbw_timing_start(size_t capacity) { jbw::StartTiming(capacity); }

size_t jbw_timing_read(int64_t* own_ns, int64_t* total_ns, size_t capacity) {
  return jbw::ReadTiming(own_ns, total_ns, capacity);
}

int jbw_call_create(const JbwAttributes* attributes, const JbwBuffers* buffers, JbwCall** call, char* error,
                    size_t error_bytes) {
  return Report(jbw::Guard([&] { return Create<jbw::Call>(*attributes, *buffers, call); }), error, error_bytes);
}

int jbw_call_initialize(JbwCall* call, int device, const JbwBuffers* buffers, char* error, size_t error_bytes) {
  return Report(jbw::Guard([&] { return FromC(call)->Initialize(device, *buffers); }), error, error_bytes);
}

int jbw_call_execute(const JbwCall* call, int device, void* stream, void* const* pointers, char* error,
                     size_t error_bytes) {
  auto execute = [&] { return FromC(call)->Execute(device, static_cast<jbw::cuda::Stream>(stream), pointers); };
  return Report(jbw::Guard(execute), error, error_bytes);
}

void jbw_call_destroy(JbwCall* call) { delete FromC(call); }

int jbw_repack_call_create(const JbwAttributes* attributes, const JbwBuffers* buffers, JbwRepackCall** call,
                           char* error, size_t error_bytes) {
  return Report(jbw::Guard([&] { return Create<jbw::RepackCall>(*attributes, *buffers, call); }), error, error_bytes);
}

int jbw_repack_call_initialize(JbwRepackCall* call, int device, const JbwBuffers* buffers, char* error,
                               size_t error_bytes) {
  return Report(jbw::Guard([&] { return FromC(call)->Initialize(device, *buffers); }), error, error_bytes);
}

int jbw_repack_call_execute(const JbwRepackCall* call, int device, void* stream, void* const* pointers, char* error,
                            size_t error_bytes) {
  auto execute = [&] { return FromC(call)->Execute(device, static_cast<jbw::cuda::Stream>(stream), pointers); };
  return Report(jbw::Guard(execute), error, error_bytes);
}

void jbw_repack_call_destroy(JbwRepackCall* call) { delete FromC(call); }

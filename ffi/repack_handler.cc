// The custom call `jax_bwgemm_repack_v2`: binds XLA's stages to a RepackCall.
#include <algorithm>
#include <cstdint>

#include "c_api.h"
#include "guard.h"
#include "repack.h"
#include "stages.h"
#include "xla/ffi/api/ffi.h"
#include "xla_types.h"

namespace ffi = xla::ffi;

namespace jbw {
namespace {

using RepackState = CallState<RepackCall>;

// Initialize has counted the buffers.
ffi::Error ExecuteStage(cuda::Stream stream, int32_t device, RepackState* state, ffi::RemainingArgs args,
                        ffi::RemainingRets rets) {
  auto execute = [&] {
    void* pointers[2 * kMaxSources] = {};
    const size_t num_sources = std::min(args.size(), kMaxSources);
    for (size_t i = 0; i < num_sources; ++i) pointers[i] = args.get<ffi::AnyBuffer>(i)->untyped_data();
    for (size_t i = 0; i < std::min(rets.size(), kMaxSources); ++i) {
      pointers[num_sources + i] = (*rets.get<ffi::AnyBuffer>(i))->untyped_data();
    }
    return state->call->Execute(device, stream, pointers);
  };
  return ToFfi(Guard(execute));
}

const XLA_FFI_TypeInfo kTypeInfo = ffi::MakeTypeInfo<RepackState>();

}  // namespace
}  // namespace jbw

// The macros below set no visibility; these declarations do.
JBW_EXPORT XLA_FFI_Error* jbw_repack_instantiate(XLA_FFI_CallFrame*);
JBW_EXPORT XLA_FFI_Error* jbw_repack_initialize(XLA_FFI_CallFrame*);
JBW_EXPORT XLA_FFI_Error* jbw_repack_execute(XLA_FFI_CallFrame*);
JBW_EXPORT void* jbw_repack_type_id();
JBW_EXPORT const void* jbw_repack_type_info();

XLA_FFI_DEFINE_HANDLER_SYMBOL(jbw_repack_instantiate, jbw::InstantiateStage<jbw::RepackCall>, jbw::BindInstantiate());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jbw_repack_initialize, jbw::InitializeStage<jbw::RepackCall>,
                              jbw::BindInitialize<jbw::RepackCall>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jbw_repack_execute, jbw::ExecuteStage,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<jbw::cuda::Stream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<jbw::RepackState>>()
                                  .RemainingArgs()   // sources
                                  .RemainingRets(),  // outs
                              {ffi::Traits::kCmdBufferCompatible});

void* jbw_repack_type_id() { return &jbw::RepackState::id; }

const void* jbw_repack_type_info() { return &jbw::kTypeInfo; }

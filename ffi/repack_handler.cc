// The custom call `jax_bwgemm_repack_v2`: binds XLA's stages to a RepackCall.
#include <cstdint>

#include "c_api.h"
#include "repack.h"
#include "stages.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jbw {
namespace {

using RepackState = CallState<RepackCall>;

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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jbw_repack_execute, jbw::ExecuteStage<jbw::RepackCall>,
                              jbw::BindExecute<jbw::RepackCall>(), {ffi::Traits::kCmdBufferCompatible});

void* jbw_repack_type_id() { return &jbw::RepackState::id; }

const void* jbw_repack_type_info() { return &jbw::kTypeInfo; }

// The custom call `jax_bwgemm_matmul_v2`: binds XLA's stages to a Call. Knows no operand.
#include <cstdint>

#include "c_api.h"
#include "call.h"
#include "dtypes.h"
#include "stages.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jbw {
namespace {

static_assert(kInt8 == XLA_FFI_DataType_S8 && kInt32 == XLA_FFI_DataType_S32 && kUint8 == XLA_FFI_DataType_U8);
static_assert(kFloat16 == XLA_FFI_DataType_F16 && kFloat32 == XLA_FFI_DataType_F32 &&
              kBfloat16 == XLA_FFI_DataType_BF16);
static_assert(kFloat8E5M2 == XLA_FFI_DataType_F8E5M2 && kFloat8E4M3FN == XLA_FFI_DataType_F8E4M3FN);

using MatmulState = CallState<Call>;

const XLA_FFI_TypeInfo kTypeInfo = ffi::MakeTypeInfo<MatmulState>();

}  // namespace
}  // namespace jbw

// The macros below set no visibility; these declarations do.
JBW_EXPORT XLA_FFI_Error* jbw_matmul_instantiate(XLA_FFI_CallFrame*);
JBW_EXPORT XLA_FFI_Error* jbw_matmul_initialize(XLA_FFI_CallFrame*);
JBW_EXPORT XLA_FFI_Error* jbw_matmul_execute(XLA_FFI_CallFrame*);
JBW_EXPORT void* jbw_matmul_type_id();
JBW_EXPORT const void* jbw_matmul_type_info();

XLA_FFI_DEFINE_HANDLER_SYMBOL(jbw_matmul_instantiate, jbw::InstantiateStage<jbw::Call>, jbw::BindInstantiate());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jbw_matmul_initialize, jbw::InitializeStage<jbw::Call>, jbw::BindInitialize<jbw::Call>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jbw_matmul_execute, jbw::ExecuteStage<jbw::Call>, jbw::BindExecute<jbw::Call>(),
                              {ffi::Traits::kCmdBufferCompatible});

void* jbw_matmul_type_id() { return &jbw::MatmulState::id; }

const void* jbw_matmul_type_info() { return &jbw::kTypeInfo; }

int jbw_ffi_api_minor() { return XLA_FFI_API_MINOR; }

// The custom call `jax_bwgemm_matmul_v2`: binds XLA's stages to a Call. Knows no operand.
#include <algorithm>
#include <cstdint>

#include "c_api.h"
#include "call.h"
#include "dtypes.h"
#include "guard.h"
#include "stages.h"
#include "xla/ffi/api/ffi.h"
#include "xla_types.h"

namespace ffi = xla::ffi;

namespace jbw {
namespace {

static_assert(kInt8 == XLA_FFI_DataType_S8 && kInt32 == XLA_FFI_DataType_S32 && kUint8 == XLA_FFI_DataType_U8);
static_assert(kFloat16 == XLA_FFI_DataType_F16 && kFloat32 == XLA_FFI_DataType_F32 &&
              kBfloat16 == XLA_FFI_DataType_BF16);
static_assert(kFloat8E5M2 == XLA_FFI_DataType_F8E5M2 && kFloat8E4M3FN == XLA_FFI_DataType_F8E4M3FN);

using MatmulState = CallState<Call>;

// Initialize has counted the buffers.
ffi::Error ExecuteStage(cuda::Stream stream, int32_t device, MatmulState* state, ffi::RemainingArgs args,
                        ffi::RemainingRets rets) {
  auto execute = [&] {
    void* pointers[JBW_MAX_BUFFERS];
    const size_t num_operands = std::min(args.size(), size_t{JBW_MAX_BUFFERS});
    const size_t num_results = std::min(rets.size(), JBW_MAX_BUFFERS - num_operands);
    for (size_t i = 0; i < num_operands; ++i) pointers[i] = args.get<ffi::AnyBuffer>(i)->untyped_data();
    for (size_t i = 0; i < num_results; ++i) {
      pointers[num_operands + i] = (*rets.get<ffi::AnyBuffer>(i))->untyped_data();
    }
    return state->call->Execute(device, stream, pointers);
  };
  return ToFfi(Guard(execute));
}

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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jbw_matmul_execute, jbw::ExecuteStage,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<jbw::cuda::Stream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<jbw::MatmulState>>()
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

void* jbw_matmul_type_id() { return &jbw::MatmulState::id; }

const void* jbw_matmul_type_info() { return &jbw::kTypeInfo; }

int jbw_ffi_api_minor() { return XLA_FFI_API_MINOR; }

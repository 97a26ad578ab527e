// The custom call `jax_bwgemm_matmul_v1`: binds XLA's stages to a Call and says in a sentence what an attribute or a
// buffer should have been.
#include <cstdint>
#include <memory>
#include <vector>

#include "attributes.h"
#include "c_api.h"
#include "call.h"
#include "guard.h"
#include "xla/ffi/api/ffi.h"
#include "xla_types.h"

namespace ffi = xla::ffi;

namespace jbw {
namespace {

static_assert(kInt8 == XLA_FFI_DataType_S8 && kInt32 == XLA_FFI_DataType_S32 && kUint8 == XLA_FFI_DataType_U8);
static_assert(kFloat16 == XLA_FFI_DataType_F16 && kFloat32 == XLA_FFI_DataType_F32 &&
              kBfloat16 == XLA_FFI_DataType_BF16);
static_assert(kFloat8E5M2 == XLA_FFI_DataType_F8E5M2 && kFloat8E4M3FN == XLA_FFI_DataType_F8E4M3FN);

struct MatmulState {
  static ffi::TypeId id;
  std::unique_ptr<Call> call;
};
ffi::TypeId MatmulState::id = {};

// Some XLA versions show Instantiate no buffers at all: then the ranks stay -1 and Initialize checks.
Status ReadBuffers(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, const Optionals& has,
                   JbwLaunchRequest* request) {
  request->a = request->b = request->out = request->bias = request->residual = request->workspace = {0, -1, {}};
  if (args.size() == 0 && rets.size() == 0) return {};
  std::vector<JbwBuffer*> operands = {&request->a, &request->b};
  if (has.bias) operands.push_back(&request->bias);
  if (has.residual) operands.push_back(&request->residual);
  std::vector<JbwBuffer*> results = {&request->out};
  if (has.workspace) results.push_back(&request->workspace);
  if (args.size() != operands.size() || rets.size() != results.size()) {
    return InvalidArgument("the custom call requires operands a, b", has.bias ? ", bias" : "",
                           has.residual ? ", residual" : "", " and ", has.workspace ? "two results" : "one result",
                           ", as its `params` say, got ", args.size(), " operands and ", rets.size(), " results");
  }
  for (size_t i = 0; i < args.size(); ++i) {
    ffi::ErrorOr<ffi::AnyBuffer> arg = args.get<ffi::AnyBuffer>(i);
    if (!arg.has_value()) return InvalidArgument("operand ", i, " requires a buffer, got ", arg.error().message());
    *operands[i] = Describe(*arg);
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> ret = rets.get<ffi::AnyBuffer>(i);
    if (!ret.has_value()) return InvalidArgument("result ", i, " requires a buffer, got ", ret.error().message());
    *results[i] = Describe(**ret);
  }
  return {};
}

Status Instantiate(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, const ffi::Dictionary& attrs,
                   MatmulState* state) {
  JbwLaunchRequest request = {};
  KernelSpec spec;
  JBW_RETURN_IF_ERROR(ReadRequest(attrs, &request));
  JBW_RETURN_IF_ERROR(ReadSpec(attrs, request, &spec));
  JBW_RETURN_IF_ERROR(ReadBuffers(args, rets, OptionalsOf(request), &request));
  return Call::Create(spec, request, request.a.rank >= 0, &state->call);
}

ffi::ErrorOr<std::unique_ptr<MatmulState>> InstantiateStage(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                                            ffi::Dictionary attrs) {
  auto state = std::make_unique<MatmulState>();
  const Status status = Guard([&] { return Instantiate(args, rets, attrs, state.get()); });
  if (!status.ok()) return ffi::Unexpected(ToFfi(status));
  return state;
}

ffi::Error InitializeStage(int32_t device, MatmulState* state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  if (state->call->IsReady(device)) return ffi::Error::Success();
  auto initialize = [&] {
    JbwLaunchRequest buffers = {};
    JBW_RETURN_IF_ERROR(ReadBuffers(args, rets, state->call->optionals(), &buffers));
    return state->call->Initialize(device, buffers);
  };
  return ToFfi(Guard(initialize));
}

ffi::Error ExecuteStage(cuda::Stream stream, int32_t device, MatmulState* state, ffi::AnyBuffer a, ffi::AnyBuffer b,
                        ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out, ffi::RemainingRets rest_out) {
  auto execute = [&] {
    const auto [has_bias, has_residual, has_workspace] = state->call->optionals();  // Initialize has counted them
    Pointers pointers = {a.untyped_data(), b.untyped_data(), out->untyped_data(), nullptr, nullptr, nullptr};
    if (has_bias) pointers.bias = rest.get<ffi::AnyBuffer>(0)->untyped_data();
    if (has_residual) pointers.residual = rest.get<ffi::AnyBuffer>(has_bias ? 1 : 0)->untyped_data();
    if (has_workspace) pointers.workspace = (*rest_out.get<ffi::AnyBuffer>(0))->untyped_data();
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jbw_matmul_instantiate, jbw::InstantiateStage,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kInstantiate>()
                                  .RemainingArgs()  // a, b, bias, residual, or nothing
                                  .RemainingRets()  // out, workspace, or nothing
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jbw_matmul_initialize, jbw::InitializeStage,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<jbw::MatmulState>>()
                                  .RemainingArgs()    // a, b, bias, residual
                                  .RemainingRets());  // out, workspace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jbw_matmul_execute, jbw::ExecuteStage,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<jbw::cuda::Stream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<jbw::MatmulState>>()
                                  .Arg<ffi::AnyBuffer>()  // a
                                  .Arg<ffi::AnyBuffer>()  // b
                                  .RemainingArgs()        // bias, residual
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .RemainingRets(),       // workspace
                              {ffi::Traits::kCmdBufferCompatible});

void* jbw_matmul_type_id() { return &jbw::MatmulState::id; }

const void* jbw_matmul_type_info() { return &jbw::kTypeInfo; }

int jbw_ffi_api_minor() { return XLA_FFI_API_MINOR; }

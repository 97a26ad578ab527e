// The custom call `jax_bwgemm_repack_v1`: binds XLA's stages to a RepackCall.
#include <memory>

#include "attributes.h"
#include "c_api.h"
#include "guard.h"
#include "repack.h"
#include "xla/ffi/api/ffi.h"
#include "xla_types.h"

namespace ffi = xla::ffi;

namespace jbw {
namespace {

struct RepackState {
  static ffi::TypeId id;
  std::unique_ptr<RepackCall> call;
};
ffi::TypeId RepackState::id = {};

// Some XLA versions show Instantiate no buffers at all: then the ranks stay -1 and Initialize checks.
Status ReadBuffers(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, JbwRepackRequest* request) {
  request->source = request->out = {0, -1, {}};
  if (args.size() == 0 && rets.size() == 0) return {};
  if (args.size() != 1 || rets.size() != 1) {
    return InvalidArgument("a repack requires one operand and one result, got ", args.size(), " and ", rets.size());
  }
  ffi::ErrorOr<ffi::AnyBuffer> source = args.get<ffi::AnyBuffer>(0);
  if (!source.has_value()) return InvalidArgument("`source` requires a buffer, got ", source.error().message());
  ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> out = rets.get<ffi::AnyBuffer>(0);
  if (!out.has_value()) return InvalidArgument("`out` requires a buffer, got ", out.error().message());
  request->source = Describe(*source);
  request->out = Describe(**out);
  return {};
}

ffi::ErrorOr<std::unique_ptr<RepackState>> InstantiateStage(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                                            ffi::Dictionary attrs) {
  auto state = std::make_unique<RepackState>();
  auto instantiate = [&] {
    JbwRepackRequest request = {};
    KernelSpec spec;
    JBW_RETURN_IF_ERROR(ReadRepack(attrs, &request, &spec));
    JBW_RETURN_IF_ERROR(ReadBuffers(args, rets, &request));
    return RepackCall::Create(spec, request, &state->call);
  };
  const Status status = Guard(instantiate);
  if (!status.ok()) return ffi::Unexpected(ToFfi(status));
  return state;
}

ffi::Error InitializeStage(int32_t device, RepackState* state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  if (state->call->IsReady(device)) return ffi::Error::Success();
  auto initialize = [&] {
    JbwRepackRequest buffers = {};
    JBW_RETURN_IF_ERROR(ReadBuffers(args, rets, &buffers));
    return state->call->Initialize(device, buffers);
  };
  return ToFfi(Guard(initialize));
}

ffi::Error ExecuteStage(cuda::Stream stream, int32_t device, RepackState* state, ffi::AnyBuffer source,
                        ffi::Result<ffi::AnyBuffer> out) {
  return ToFfi(Guard([&] { return state->call->Execute(device, stream, source.untyped_data(), out->untyped_data()); }));
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jbw_repack_instantiate, jbw::InstantiateStage,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kInstantiate>()
                                  .RemainingArgs()  // source, or nothing
                                  .RemainingRets()  // out, or nothing
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jbw_repack_initialize, jbw::InitializeStage,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<jbw::RepackState>>()
                                  .RemainingArgs()    // source
                                  .RemainingRets());  // out

XLA_FFI_DEFINE_HANDLER_SYMBOL(jbw_repack_execute, jbw::ExecuteStage,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<jbw::cuda::Stream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<jbw::RepackState>>()
                                  .Arg<ffi::AnyBuffer>()   // source
                                  .Ret<ffi::AnyBuffer>(),  // out
                              {ffi::Traits::kCmdBufferCompatible});

void* jbw_repack_type_id() { return &jbw::RepackState::id; }

const void* jbw_repack_type_info() { return &jbw::kTypeInfo; }

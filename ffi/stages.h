// The stages that every handler of the library has, over a call site `C` with Create, IsReady and Initialize.
#ifndef JAX_BWGEMM_STAGES_H_
#define JAX_BWGEMM_STAGES_H_

#include <cstdint>
#include <memory>

#include "guard.h"
#include "xla/ffi/api/ffi.h"
#include "xla_types.h"

namespace jbw {

template <typename C>
struct CallState {
  inline static xla::ffi::TypeId id = {};
  std::unique_ptr<C> call;
};

template <typename C>
xla::ffi::ErrorOr<std::unique_ptr<CallState<C>>> InstantiateStage(xla::ffi::RemainingArgs args,
                                                                  xla::ffi::RemainingRets rets,
                                                                  xla::ffi::Dictionary attrs) {
  auto state = std::make_unique<CallState<C>>();
  auto instantiate = [&] {
    XlaBuffers buffers;
    JBW_RETURN_IF_ERROR(buffers.Read(args, rets));
    return C::Create(XlaAttributes(attrs), buffers.view(), &state->call);
  };
  const Status status = Guard(instantiate);
  if (!status.ok()) return xla::ffi::Unexpected(ToFfi(status));
  return state;
}

template <typename C>
xla::ffi::Error InitializeStage(int32_t device, CallState<C>* state, xla::ffi::RemainingArgs args,
                                xla::ffi::RemainingRets rets) {
  if (state->call->IsReady(device)) return xla::ffi::Error::Success();
  auto initialize = [&] {
    XlaBuffers buffers;
    JBW_RETURN_IF_ERROR(buffers.Read(args, rets));
    return state->call->Initialize(device, buffers.view());
  };
  return ToFfi(Guard(initialize));
}

// Instantiate may be shown no buffers: see XlaBuffers.
inline auto BindInstantiate() {
  return xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInstantiate>().RemainingArgs().RemainingRets().Attrs();
}

template <typename C>
auto BindInitialize() {
  return xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()
      .Ctx<xla::ffi::DeviceOrdinal>()
      .Ctx<xla::ffi::State<CallState<C>>>()
      .RemainingArgs()
      .RemainingRets();
}

}  // namespace jbw

#endif  // JAX_BWGEMM_STAGES_H_

// The stages that every handler of the library has, over a call site `C` with Create, IsReady, Initialize and Execute.
#ifndef JAX_BWGEMM_STAGES_H_
#define JAX_BWGEMM_STAGES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "buffer_rules.h"
#include "cuda_driver.h"
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

// Initialize has counted the buffers.
template <typename C>
xla::ffi::Error ExecuteStage(cuda::Stream stream, int32_t device, CallState<C>* state, xla::ffi::RemainingArgs args,
                             xla::ffi::RemainingRets rets) {
  auto execute = [&] {
    void* pointers[JBW_MAX_BUFFERS];
    const size_t num_operands = std::min(args.size(), size_t{JBW_MAX_BUFFERS});
    const size_t num_results = std::min(rets.size(), JBW_MAX_BUFFERS - num_operands);
    for (size_t i = 0; i < num_operands; ++i) pointers[i] = args.get<xla::ffi::AnyBuffer>(i)->untyped_data();
    for (size_t i = 0; i < num_results; ++i) {
      pointers[num_operands + i] = (*rets.get<xla::ffi::AnyBuffer>(i))->untyped_data();
    }
    return state->call->Execute(device, stream, pointers);
  };
  return ToFfi(Guard(execute));
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

template <typename C>
auto BindExecute() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::PlatformStream<cuda::Stream>>()
      .Ctx<xla::ffi::DeviceOrdinal>()
      .Ctx<xla::ffi::State<CallState<C>>>()
      .RemainingArgs()
      .RemainingRets();
}

}  // namespace jbw

#endif  // JAX_BWGEMM_STAGES_H_

#include "call.h"

#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "stats.h"
#include "tensor_map.h"

namespace jbw {
namespace {

Status CheckAligned(const char* name, const void* pointer, int32_t align_bytes) {
  if (reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(align_bytes) == 0) return {};
  return InvalidArgument(
      "`", name, "` requires a pointer aligned to ", align_bytes, " bytes, got ", pointer,
      ": XLA passed the middle of a bigger buffer (flattened weights, as of ravel_pytree). Wrap it in "
      "`jax.lax.optimization_barrier(...)`, or compile with xla_gpu_enable_dynamic_slice_fusion=False");
}

Status CheckPointers(const JbwLaunchPlan& plan, const Pointers& pointers) {
  JBW_RETURN_IF_ERROR(CheckAligned("a", pointers.a, kAlignBytes));
  JBW_RETURN_IF_ERROR(CheckAligned("b", pointers.b, kAlignBytes));
  JBW_RETURN_IF_ERROR(CheckAligned("out", pointers.out, plan.out_align_bytes));
  // 16 bytes for the kernels' vector loads of the bias
  if (plan.bias_offset >= 0) JBW_RETURN_IF_ERROR(CheckAligned("bias", pointers.bias, kAlignBytes));
  if (plan.workspace_offset >= 0) JBW_RETURN_IF_ERROR(CheckAligned("workspace", pointers.workspace, kAlignBytes));
  if (plan.tensor_maps[3].param_offset < 0) return {};
  return CheckAligned("residual", pointers.residual, kAlignBytes);
}

// `block` is the plan's parameter block, into which the addresses go.
Status FillAddresses(const cuda::Driver& driver, const JbwLaunchPlan& plan, const Pointers& pointers,
                     unsigned char* block) {
  const JbwTensorMapSpec* maps = plan.tensor_maps;
  JBW_RETURN_IF_ERROR(EncodeTensorMap(driver, maps[0], "a", pointers.a, block + maps[0].param_offset));
  JBW_RETURN_IF_ERROR(EncodeTensorMap(driver, maps[1], "b", pointers.b, block + maps[1].param_offset));
  if (plan.c_offset < 0) {
    JBW_RETURN_IF_ERROR(EncodeTensorMap(driver, maps[2], "out", pointers.out, block + maps[2].param_offset));
  } else {
    std::memcpy(block + plan.c_offset, &pointers.out, sizeof(pointers.out));
  }
  if (const int32_t at = maps[3].param_offset; at >= 0) {
    JBW_RETURN_IF_ERROR(EncodeTensorMap(driver, maps[3], "residual", pointers.residual, block + at));
  }
  if (plan.bias_offset >= 0) std::memcpy(block + plan.bias_offset, &pointers.bias, sizeof(pointers.bias));
  if (plan.workspace_offset >= 0) {
    std::memcpy(block + plan.workspace_offset, &pointers.workspace, sizeof(pointers.workspace));
  }
  return {};
}

// Fills `attributes` with what the plan asks for, and returns how many they are.
uint32_t FillAttributes(const JbwLaunchPlan& plan, cuda::LaunchAttribute (&attributes)[2]) {
  uint32_t count = 0;
  if (plan.cluster[0] * plan.cluster[1] * plan.cluster[2] > 1) {
    attributes[count].id = cuda::kLaunchAttributeClusterDimension;
    std::memcpy(attributes[count++].value.cluster_dim, plan.cluster, sizeof(plan.cluster));
  }
  if (plan.pdl) {
    attributes[count].id = cuda::kLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].value.programmatic_stream_serialization = 1;
  }
  return count;
}

// Parameters go one by one. As one buffer (CU_LAUNCH_PARAM_BUFFER_POINTER) they arrive 48 bytes off on sm_90, where
// ptxas starts a block with a descriptor 48 bytes into the parameter bank: the driver adds that only to single
// parameters (H200, driver 580).
cuda::Result Launch(const cuda::Driver& driver, const JbwLaunchPlan& plan, cuda::Function function, cuda::Stream stream,
                    unsigned char* block) {
  cuda::LaunchAttribute attributes[2] = {};
  const uint32_t num_attributes = FillAttributes(plan, attributes);
  const cuda::LaunchConfig config = {{plan.grid[0], plan.grid[1], plan.grid[2]},
                                     {plan.block[0], plan.block[1], plan.block[2]},
                                     plan.smem_bytes,
                                     stream,
                                     attributes,
                                     num_attributes};
  void* params[JBW_MAX_PARAMS];
  for (int i = 0; i < plan.num_params; ++i) params[i] = block + plan.param_offsets[i];
  return driver.cuLaunchKernelEx(&config, function, params, nullptr);
}

Status LaunchError(const cuda::Driver& driver, const JbwLaunchPlan& plan, const std::string& variant, int device,
                   cuda::Result result) {
  return Internal("the launch of `", variant, "` requires success, got ", driver.ErrorText(result), " on device ",
                  device, " (grid ", plan.grid[0], "x", plan.grid[1], "x", plan.grid[2], ", ", plan.block[0],
                  " threads, ", plan.smem_bytes,
                  " bytes of shared memory): the cause may be an earlier kernel on this device");
}

// A call's own value for raised flags. Flags are not zeroed: what lies in a workspace must not be taken for one.
uint64_t NewToken() {
  static std::atomic<uint64_t> num_tokens{0};
  std::random_device device;
  const uint64_t random = uint64_t{device()} << 32 | device();
  return random + 0x9E3779B97F4A7C15 * num_tokens.fetch_add(1);  // an odd step: no two calls of a process share one
}

}  // namespace

Status Call::Create(const KernelSpec& spec, const JbwLaunchRequest& request, bool has_buffers,
                    std::unique_ptr<Call>* call) {
  if (has_buffers) {
    JbwLaunchRequest any_device = request;
    any_device.max_active_clusters = 1;
    JbwLaunchPlan plan;
    JBW_RETURN_IF_ERROR(MakeLaunchPlan(any_device, &plan));
  } else {
    JBW_RETURN_IF_ERROR(CheckAttributes(request));
  }
  Kernel* kernel;
  JBW_RETURN_IF_ERROR(CubinCache::Global().Find(spec, &kernel));
  JbwLaunchRequest own = request;
  own.token = NewToken();
  call->reset(new Call(kernel, own));
  return {};
}

Status Call::Initialize(int device, const JbwLaunchRequest& buffers) {
  if (IsReady(device)) return {};
  JBW_RETURN_IF_ERROR(kernel_->Prepare(device));
  std::lock_guard<std::mutex> lock(mutex_);
  if (IsReady(device)) return {};
  JbwLaunchRequest request = request_;
  request.a = buffers.a;
  request.b = buffers.b;
  request.out = buffers.out;
  request.bias = buffers.bias;
  request.residual = buffers.residual;
  request.workspace = buffers.workspace;
  request.max_active_clusters = kernel_->max_active_clusters(device);
  auto plan = std::make_unique<JbwLaunchPlan>();
  JBW_RETURN_IF_ERROR(MakeLaunchPlan(request, plan.get()));
  plans_[device] = std::move(plan);
  ready_[device].store(plans_[device].get(), std::memory_order_release);
  return {};
}

Status Call::Execute(int device, cuda::Stream stream, const Pointers& pointers) const {
  ExecuteTimer timer;
  const JbwLaunchPlan* plan = PlanOf(device);
  if (!plan) return Internal("Execute requires an Initialize on the same device, got none on ", device);
  const cuda::Driver* driver;
  JBW_RETURN_IF_ERROR(cuda::GetDriver(&driver));
  JBW_RETURN_IF_ERROR(CheckPointers(*plan, pointers));
  alignas(cuda::TensorMap) unsigned char block[JBW_MAX_PARAM_BYTES];
  std::memcpy(block, plan->params, static_cast<size_t>(plan->param_bytes));
  JBW_RETURN_IF_ERROR(FillAddresses(*driver, *plan, pointers, block));
  timer.BeforeLaunch();
  const cuda::Result result = Launch(*driver, *plan, kernel_->function(), stream, block);
  timer.AfterLaunch();
  if (result == cuda::kSuccess) return {};
  return LaunchError(*driver, *plan, kernel_->spec().variant, device, result);
}

}  // namespace jbw

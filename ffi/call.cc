#include "call.h"

#include <cstring>
#include <string>
#include <utility>

#include "stats.h"
#include "tensor_map.h"

namespace jbw {
namespace {

Status AlignError(const std::string& role, const void* pointer, int32_t align_bytes) {
  return InvalidArgument(
      "`", role, "` requires a pointer aligned to ", align_bytes, " bytes, got ", pointer,
      ": XLA passed the middle of a bigger buffer (flattened weights, as of ravel_pytree). Wrap it in "
      "`jax.lax.optimization_barrier(...)`, or compile with xla_gpu_enable_dynamic_slice_fusion=False");
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
  const std::string sizes = Cat(" (grid ", plan.grid[0], "x", plan.grid[1], "x", plan.grid[2], ", ", plan.block[0],
                                " threads, ", plan.smem_bytes, " bytes of shared memory)");
  return cuda::LaunchError(driver, variant, device, result, sizes);
}

}  // namespace

Status Call::Create(const Attributes& attrs, const JbwBuffers& buffers, std::unique_ptr<Call>* call) {
  LaunchRequest request;
  JBW_RETURN_IF_ERROR(ReadLaunchRequest(attrs, &request));
  if (buffers.num_results > 0) {
    JbwLaunchPlan plan;
    JBW_RETURN_IF_ERROR(MakeLaunchPlan(request, buffers, {1, 1}, &plan));
  }
  const Geometry& own = request.geometry;
  KernelSpec spec = {{}, {}, {}, {}, own.cluster_m, own.cluster_n, own.cluster_k, own.num_threads, own.smem_bytes};
  JBW_RETURN_IF_ERROR(ReadNames(attrs, &spec));
  Kernel* kernel;
  JBW_RETURN_IF_ERROR(CubinCache::Global().Find(spec, &kernel));
  call->reset(new Call(kernel, std::move(request)));
  return {};
}

Status Call::Initialize(int device, const JbwBuffers& buffers) {
  if (IsReady(device)) return {};
  JBW_RETURN_IF_ERROR(kernel_->Prepare(device));
  std::lock_guard<std::mutex> lock(mutex_);
  if (IsReady(device)) return {};
  auto plan = std::make_unique<JbwLaunchPlan>();
  const LaunchContext context = {kernel_->max_active_clusters(device), token_};
  JBW_RETURN_IF_ERROR(MakeLaunchPlan(request_, buffers, context, plan.get()));
  plans_[device] = std::move(plan);
  ready_[device].store(plans_[device].get(), std::memory_order_release);
  return {};
}

Status Call::CheckPointers(const JbwLaunchPlan& plan, void* const* pointers) const {
  for (int32_t i = 0; i < plan.num_buffers; ++i) {
    const auto align_bytes = static_cast<uintptr_t>(plan.buffers[i].align_bytes);
    if (reinterpret_cast<uintptr_t>(pointers[i]) % align_bytes == 0) continue;
    return AlignError(request_.rules.all[static_cast<size_t>(i)].role, pointers[i], plan.buffers[i].align_bytes);
  }
  return {};
}

// `block` is the plan's parameter block, into which the addresses go.
Status Call::FillAddresses(const cuda::Driver& driver, const JbwLaunchPlan& plan, void* const* pointers,
                           unsigned char* block) const {
  for (int32_t i = 0; i < plan.num_buffers; ++i) {
    const JbwBufferUse& use = plan.buffers[i];
    if (use.pointer_offset >= 0) std::memcpy(block + use.pointer_offset, &pointers[i], sizeof(pointers[i]));
    const std::string& role = request_.rules.all[static_cast<size_t>(i)].role;
    if (use.map_offset >= 0) {
      JBW_RETURN_IF_ERROR(EncodeTensorMap(driver, use.map, role, pointers[i], block + use.map_offset));
    }
    if (use.second_map_offset >= 0) {
      JBW_RETURN_IF_ERROR(EncodeTensorMap(driver, use.second_map, role, pointers[i], block + use.second_map_offset));
    }
  }
  return {};
}

Status Call::Execute(int device, cuda::Stream stream, void* const* pointers) const {
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

// One call site through its stages: created (Instantiate), readied on a device (Initialize), launched (Execute). What
// the XLA handler and the C ABI both run; knows no XLA.
#ifndef JAX_BWGEMM_CALL_H_
#define JAX_BWGEMM_CALL_H_

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "attributes.h"
#include "cubin_cache.h"
#include "launch_plan.h"
#include "status.h"
#include "token.h"

namespace jbw {

class Call {
 public:
  // Reads and checks everything that attributes can tell, and shapes too if there are any; finds the cubin. Needs no
  // driver.
  static Status Create(const Attributes& attrs, const JbwBuffers& buffers, std::unique_ptr<Call>* call);

  bool IsReady(int device) const { return PlanOf(device) != nullptr; }

  // Loads the kernel and makes the plan of this device.
  Status Initialize(int device, const JbwBuffers& buffers);

  // Enqueues the kernel on `stream`; a pointer for each buffer. No allocation, no lock, no module load, no
  // synchronisation.
  Status Execute(int device, cuda::Stream stream, void* const* pointers) const;

 private:
  Call(Kernel* kernel, LaunchRequest request) : kernel_(kernel), request_(std::move(request)), token_(NewToken()) {}

  const JbwLaunchPlan* PlanOf(int device) const {
    return device >= 0 && device < kMaxDevices ? ready_[device].load(std::memory_order_acquire) : nullptr;
  }
  Status CheckPointers(const JbwLaunchPlan& plan, void* const* pointers) const;
  Status FillAddresses(const cuda::Driver& driver, const JbwLaunchPlan& plan, void* const* pointers,
                       unsigned char* block) const;

  Kernel* const kernel_;
  const LaunchRequest request_;
  const uint64_t token_;
  std::mutex mutex_;
  std::array<std::unique_ptr<const JbwLaunchPlan>, kMaxDevices> plans_;    // guarded by mutex_
  std::array<std::atomic<const JbwLaunchPlan*>, kMaxDevices> ready_ = {};  // the same, to read without a lock
};

}  // namespace jbw

#endif  // JAX_BWGEMM_CALL_H_

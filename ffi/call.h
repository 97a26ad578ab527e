// One call site through its stages: created (Instantiate), readied on a device (Initialize), launched (Execute). What
// the XLA handler and the C ABI both run; knows no XLA.
#ifndef JAX_BWGEMM_CALL_H_
#define JAX_BWGEMM_CALL_H_

#include <array>
#include <atomic>
#include <memory>
#include <mutex>

#include "cubin_cache.h"
#include "launch_plan.h"
#include "status.h"

namespace jbw {

struct Pointers {
  void *a, *b, *out, *bias, *residual, *workspace;
};

class Call {
 public:
  // Checks everything that attributes can tell, and shapes too if `has_buffers`; finds the cubin. Needs no driver.
  static Status Create(const KernelSpec& spec, const JbwLaunchRequest& request, bool has_buffers,
                       std::unique_ptr<Call>* call);

  bool IsReady(int device) const { return PlanOf(device) != nullptr; }

  const Optionals& optionals() const { return optionals_; }

  // Loads the kernel and makes the plan of this device. `buffers`' six buffers are read, not its attributes.
  Status Initialize(int device, const JbwLaunchRequest& buffers);

  // Enqueues the kernel on `stream`. No allocation, no lock, no module load, no synchronisation.
  Status Execute(int device, cuda::Stream stream, const Pointers& pointers) const;

 private:
  Call(Kernel* kernel, const JbwLaunchRequest& request)
      : kernel_(kernel), request_(request), optionals_(OptionalsOf(request)) {}

  const JbwLaunchPlan* PlanOf(int device) const {
    return device >= 0 && device < kMaxDevices ? ready_[device].load(std::memory_order_acquire) : nullptr;
  }

  Kernel* const kernel_;
  const JbwLaunchRequest request_;
  const Optionals optionals_;
  std::mutex mutex_;
  std::array<std::unique_ptr<const JbwLaunchPlan>, kMaxDevices> plans_;    // guarded by mutex_
  std::array<std::atomic<const JbwLaunchPlan*>, kMaxDevices> ready_ = {};  // the same, to read without a lock
};

}  // namespace jbw

#endif  // JAX_BWGEMM_CALL_H_

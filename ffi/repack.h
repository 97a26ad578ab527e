// One call site of a repack through its stages, as call.h has those of a product: created, readied on a device,
// launched. What the XLA handler and the C ABI both run; knows no XLA.
#ifndef JAX_BWGEMM_REPACK_H_
#define JAX_BWGEMM_REPACK_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "attributes.h"
#include "cubin_cache.h"
#include "operands.h"
#include "status.h"

namespace jbw {

constexpr size_t kMaxSources = 2;  // of a pad; of a transpose one

// A kernel works on what its buffers' sizes say, whatever the numbers of CTAs: too few leave a part of a result as it
// was. Those from `first_ctas` on are the second source's.
struct RepackRequest {
  bool is_transpose;
  int32_t element_bytes, num_ctas, first_ctas, num_threads, smem_bytes, pdl;
};

// Its buffers are the sources, and as many results.
class RepackCall {
 public:
  // Reads and checks everything that attributes can tell, and shapes too if there are any; finds the cubin. Needs no
  // driver.
  static Status Create(const Attributes& attrs, const JbwBuffers& buffers, std::unique_ptr<RepackCall>* call);

  bool IsReady(int device) const;

  // Loads the kernel.
  Status Initialize(int device, const JbwBuffers& buffers);

  // Enqueues the kernel on `stream`. No allocation, no lock, no module load, no synchronisation. `pointers`: of the
  // sources, then of the results.
  Status Execute(int device, cuda::Stream stream, void* const* pointers) const;

 private:
  struct Sizes {
    int32_t batch, rows, cols, pitch;  // of a source, but the pitch, which is its result's; as the kernel takes them
  };
  struct AllSizes {
    size_t num_sources;
    Sizes of[kMaxSources];
  };

  RepackCall(Kernel* kernel, const RepackRequest& request) : kernel_(kernel), request_(request) {}

  Kernel* const kernel_;
  const RepackRequest request_;
  std::mutex mutex_;
  std::unique_ptr<const AllSizes> owned_;           // guarded by mutex_
  std::atomic<const AllSizes*> sizes_ = {nullptr};  // the same, to read without a lock; no device changes them
};

}  // namespace jbw

#endif  // JAX_BWGEMM_REPACK_H_

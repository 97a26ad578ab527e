// One call site of a repack through its stages, as call.h has those of a product: created, readied on a device,
// launched. What the XLA handler and the C ABI both run; knows no XLA.
#ifndef JAX_BWGEMM_REPACK_H_
#define JAX_BWGEMM_REPACK_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "attributes.h"
#include "cubin_cache.h"
#include "operands.h"
#include "status.h"

namespace jbw {

// A kernel works on what its buffers' sizes say, whatever `num_ctas`: too few leave a part of the result as it was.
struct RepackRequest {
  bool is_transpose;
  int32_t element_bytes, num_ctas, num_threads, smem_bytes, pdl;
};

// Its buffers are one operand, `source`, and one result, `out`.
class RepackCall {
 public:
  // Reads and checks everything that attributes can tell, and shapes too if there are any; finds the cubin. Needs no
  // driver.
  static Status Create(const Attributes& attrs, const JbwBuffers& buffers, std::unique_ptr<RepackCall>* call);

  bool IsReady(int device) const;

  // Loads the kernel.
  Status Initialize(int device, const JbwBuffers& buffers);

  // Enqueues the kernel on `stream`. No allocation, no lock, no module load, no synchronisation.
  Status Execute(int device, cuda::Stream stream, const void* source, void* out) const;

 private:
  struct Sizes {
    int32_t batch, rows, cols, pitch;  // of the source, but the pitch, which is the result's; as the kernel takes them
  };

  RepackCall(Kernel* kernel, const RepackRequest& request) : kernel_(kernel), request_(request) {}

  Kernel* const kernel_;
  const RepackRequest request_;
  std::mutex mutex_;
  std::unique_ptr<const Sizes> owned_;           // guarded by mutex_
  std::atomic<const Sizes*> sizes_ = {nullptr};  // the same, to read without a lock; no device changes them
};

}  // namespace jbw

#endif  // JAX_BWGEMM_REPACK_H_

// The custom calls' attributes -> a KernelSpec and the request's numbers, or the sentence that says which one is off.
#ifndef JAX_BWGEMM_ATTRIBUTES_H_
#define JAX_BWGEMM_ATTRIBUTES_H_

#include "cubin_cache.h"
#include "launch_plan.h"
#include "repack.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace jbw {

// All but the buffers and max_active_clusters.
Status ReadRequest(const xla::ffi::Dictionary& attrs, JbwLaunchRequest* request);

Status ReadSpec(const xla::ffi::Dictionary& attrs, const JbwLaunchRequest& request, KernelSpec* spec);

// All of a repack's but the buffers.
Status ReadRepack(const xla::ffi::Dictionary& attrs, JbwRepackRequest* request, KernelSpec* spec);

}  // namespace jbw

#endif  // JAX_BWGEMM_ATTRIBUTES_H_

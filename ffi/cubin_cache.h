// From a variant's name to a kernel that is ready on a device: finds `<variant>.cubin` in the artifact directories,
// verifies it, loads it once for all devices, and keeps it for the process's life.
#ifndef JAX_BWGEMM_CUBIN_CACHE_H_
#define JAX_BWGEMM_CUBIN_CACHE_H_

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "attributes.h"
#include "cuda_driver.h"
#include "status.h"

namespace jbw {

inline constexpr int kMaxDevices = 64;

struct KernelSpec {
  std::string variant, entry, target, cubin_sha256;
  int cluster_m, cluster_n, cluster_k, num_threads, smem_bytes;
};

// The four names of a spec, from a custom call's attributes.
Status ReadNames(const Attributes& attrs, KernelSpec* spec);

class Library {
 public:
  Library() = default;
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  ~Library();

  Status Load(const cuda::Driver& driver, const std::string& cubin, const KernelSpec& spec);
  cuda::Kernel kernel() const { return kernel_; }

 private:
  const cuda::Driver* driver_ = nullptr;
  cuda::Library handle_ = nullptr;
  cuda::Kernel kernel_ = nullptr;
};

class Kernel {
 public:
  Kernel(KernelSpec spec, std::string cubin) : spec_(std::move(spec)), cubin_(std::move(cubin)) {}

  // Makes it launchable on `device`; from the second time on, one atomic load. Safe from any thread.
  Status Prepare(int device);

  // After a Prepare of that device.
  int max_active_clusters(int device) const { return max_active_clusters_[device].load(std::memory_order_acquire); }
  cuda::Function function() const { return reinterpret_cast<cuda::Function>(library_->kernel()); }
  const KernelSpec& spec() const { return spec_; }

 private:
  Status PrepareSlowly(int device);
  Status LoadLibrary(const cuda::Driver& driver);

  const KernelSpec spec_;
  const std::string cubin_;
  std::mutex mutex_;
  std::unique_ptr<Library> library_;                                    // guarded by mutex_ until a device is ready
  std::array<std::atomic<int>, kMaxDevices> max_active_clusters_ = {};  // 0: not ready
};

class CubinCache {
 public:
  static CubinCache& Global();

  void SetDirectories(std::vector<std::string> directories);

  // Reads and verifies the file at the first call for a kernel; needs no driver.
  Status Find(const KernelSpec& spec, Kernel** kernel);

 private:
  Status Read(const KernelSpec& spec, std::string* cubin) const;

  std::mutex mutex_;
  std::vector<std::string> directories_;
  std::map<std::string, std::unique_ptr<Kernel>> kernels_;
};

}  // namespace jbw

#endif  // JAX_BWGEMM_CUBIN_CACHE_H_

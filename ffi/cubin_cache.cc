#include "cubin_cache.h"

#include <cstdio>
#include <memory>

#include "sha256.h"

namespace jbw {
namespace {

constexpr size_t kRoomToLoad = 64 << 20;  // bytes: a hundred times what a driver keeps of a kernel
constexpr const char kFreeSome[] = ": free some, or let XLA take less of it (XLA_PYTHON_CLIENT_MEM_FRACTION)";
constexpr int kMaxPortableClusterCtas = 8;  // CUDA C++ programming guide, thread block clusters

struct Target {
  const char* name;
  int major, minor;
  bool is_family;
};

// PTX ISA, .target: one that ends with "a" runs on its own compute capability alone, with "f" on those of its family
// from its own on.
constexpr Target kTargets[] = {{"sm_90a", 9, 0, false}, {"sm_100a", 10, 0, false}, {"sm_100f", 10, 0, true}};

// 10.1 was Jetson Thor's, 11.0 since CUDA 13, and is of sm_110f's family (PTX ISA, .target, architecture families).
bool Runs(const Target& target, int major, int minor) {
  if (major != target.major) return false;
  if (minor == target.minor) return true;
  return target.is_family && minor > target.minor && !(major == 10 && minor == 1);
}

const Target* FindTarget(const std::string& name) {
  for (const Target& target : kTargets) {
    if (name == target.name) return &target;
  }
  return nullptr;
}

Status CheckNames(const KernelSpec& spec) {
  if (!FindTarget(spec.target)) {
    return InvalidArgument("`target` requires one of sm_90a, sm_100a, sm_100f, got '", spec.target, "'");
  }
  if (spec.variant.empty() || spec.variant.find_first_of(std::string("/\0", 2)) != std::string::npos) {
    return InvalidArgument("`variant` requires the name of a kernel, got '", spec.variant, "'");
  }
  if (spec.entry.empty()) return InvalidArgument("`entry` requires the name of a kernel symbol, got ''");
  return {};
}

std::string Key(const KernelSpec& spec) {
  return Cat(spec.cubin_sha256, ' ', spec.variant, ' ', spec.entry, ' ', spec.target, ' ', spec.cluster_m, ' ',
             spec.cluster_n, ' ', spec.cluster_k, ' ', spec.num_threads, ' ', spec.smem_bytes);
}

std::string BuildCommand(const KernelSpec& spec) {
  return Cat("build it with `python -m jax_bwgemm build --arch ", spec.target, " --only ", spec.variant, "`");
}

bool ReadFile(const std::string& path, std::string* bytes) {
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) return false;
  char chunk[1 << 16];
  bytes->clear();
  while (const size_t count = std::fread(chunk, 1, sizeof(chunk), file.get())) bytes->append(chunk, count);
  return !std::ferror(file.get());
}

Status CheckCapability(const cuda::Driver& driver, const KernelSpec& spec, int ordinal, cuda::Device device) {
  int major = 0, minor = 0;
  cuda::Result result = driver.cuDeviceGetAttribute(&major, cuda::kDeviceAttributeMajor, device);
  if (result == cuda::kSuccess) {
    result = driver.cuDeviceGetAttribute(&minor, cuda::kDeviceAttributeMinor, device);
  }
  if (result != cuda::kSuccess) {
    return FailedPrecondition("device ", ordinal, " requires a compute capability, got ", driver.ErrorText(result));
  }
  const Target& target = *FindTarget(spec.target);
  if (Runs(target, major, minor)) return {};
  return FailedPrecondition("kernel `", spec.variant, "` requires a GPU of compute capability ", target.major, ".",
                            target.minor, target.is_family ? " or a later one of its family (" : " (", target.name,
                            "), got ", major, ".", minor, " on device ", ordinal,
                            ": choose the target of this GPU when tracing");
}

cuda::LaunchConfig OneCluster(const KernelSpec& spec, cuda::LaunchAttribute* attribute) {
  const auto cluster_m = static_cast<uint32_t>(spec.cluster_m), cluster_n = static_cast<uint32_t>(spec.cluster_n);
  const auto cluster_k = static_cast<uint32_t>(spec.cluster_k);
  attribute->id = cuda::kLaunchAttributeClusterDimension;
  attribute->value.cluster_dim[0] = cluster_m;
  attribute->value.cluster_dim[1] = cluster_n;
  attribute->value.cluster_dim[2] = cluster_k;
  return {{cluster_m, cluster_n, cluster_k},
          {static_cast<uint32_t>(spec.num_threads), 1, 1},
          static_cast<uint32_t>(spec.smem_bytes),
          nullptr,
          attribute,
          1};
}

Status AllowSmem(const cuda::Driver& driver, const KernelSpec& spec, cuda::Kernel kernel, int ordinal,
                 cuda::Device device) {
  const cuda::Result result =
      driver.cuKernelSetAttribute(cuda::kFunctionAttributeMaxDynamicSmem, spec.smem_bytes, kernel, device);
  if (result == cuda::kSuccess) return {};
  return FailedPrecondition("kernel `", spec.variant, "` requires ", spec.smem_bytes,
                            " bytes of shared memory on device ", ordinal, ", got ", driver.ErrorText(result));
}

std::string ClusterText(const KernelSpec& spec) {
  return Cat(spec.cluster_m, "x", spec.cluster_n, "x", spec.cluster_k, " CTAs");
}

Status AllowCluster(const cuda::Driver& driver, const KernelSpec& spec, cuda::Kernel kernel, int ordinal,
                    cuda::Device device) {
  if (spec.cluster_m * spec.cluster_n * spec.cluster_k <= kMaxPortableClusterCtas) return {};
  const cuda::Result result =
      driver.cuKernelSetAttribute(cuda::kFunctionAttributeNonPortableClusterSize, 1, kernel, device);
  if (result == cuda::kSuccess) return {};
  return FailedPrecondition("kernel `", spec.variant, "` requires a cluster of ", ClusterText(spec), " on device ",
                            ordinal, ", got ", driver.ErrorText(result));
}

// Whether the current context's device has no memory left to load a kernel.
bool IsFull(const cuda::Driver& driver) {
  size_t free_bytes = 0, total_bytes = 0;
  return driver.cuMemGetInfo(&free_bytes, &total_bytes) == cuda::kSuccess && free_bytes < kRoomToLoad;
}

// How many clusters the current context's device, `ordinal`, holds at once. One that is full has room for none, and the
// driver calls that a success (580, on an H100).
Status CountClusters(const cuda::Driver& driver, const KernelSpec& spec, cuda::Function function, int ordinal,
                     int* num_clusters) {
  cuda::LaunchAttribute attribute = {};
  const cuda::LaunchConfig config = OneCluster(spec, &attribute);
  *num_clusters = 0;
  const cuda::Result result = driver.cuOccupancyMaxActiveClusters(num_clusters, function, &config);
  if (result == cuda::kSuccess && *num_clusters > 0) return {};
  if (result == cuda::kOutOfMemory || (result == cuda::kSuccess && IsFull(driver))) {
    return ResourceExhausted("kernel `", spec.variant, "` requires memory to be loaded on device ", ordinal,
                             ", got less than ", kRoomToLoad >> 20, " MiB free", kFreeSome);
  }
  return FailedPrecondition("kernel `", spec.variant, "` requires room for a cluster of ", ClusterText(spec),
                            " on device ", ordinal, ", got ", *num_clusters, ", ", driver.ErrorText(result));
}

}  // namespace

Status ReadNames(const Attributes& attrs, KernelSpec* spec) {
  JBW_RETURN_IF_ERROR(Read(attrs, "variant", &spec->variant));
  JBW_RETURN_IF_ERROR(Read(attrs, "entry", &spec->entry));
  JBW_RETURN_IF_ERROR(Read(attrs, "target", &spec->target));
  return Read(attrs, "cubin_sha256", &spec->cubin_sha256);
}

Library::~Library() {
  if (handle_) driver_->cuLibraryUnload(handle_);
}

Status Library::Load(const cuda::Driver& driver, const std::string& cubin, const KernelSpec& spec) {
  driver_ = &driver;
  cuda::Result result = driver.cuLibraryLoadData(&handle_, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result != cuda::kSuccess) handle_ = nullptr;
  if (result == cuda::kOutOfMemory) {
    return ResourceExhausted("kernel `", spec.variant, "` requires memory to be loaded, got ", driver.ErrorText(result),
                             kFreeSome);
  }
  if (result != cuda::kSuccess) {
    return FailedPrecondition("kernel `", spec.variant, "` requires a driver that loads it, got ",
                              driver.ErrorText(result), " from a driver of CUDA ", driver.version / 1000, ".",
                              driver.version % 1000 / 10, ": update the driver");
  }
  result = driver.cuLibraryGetKernel(&kernel_, handle_, spec.entry.c_str());
  if (result == cuda::kSuccess) return {};
  return Internal("kernel `", spec.variant, "` requires a symbol ", spec.entry, ", got ", driver.ErrorText(result),
                  ": re", BuildCommand(spec));
}

Status Kernel::Prepare(int device) {
  if (device < 0 || device >= kMaxDevices) {
    return FailedPrecondition("a device ordinal requires 0..", kMaxDevices - 1, ", got ", device);
  }
  return max_active_clusters(device) > 0 ? Status() : PrepareSlowly(device);
}

Status Kernel::PrepareSlowly(int device) {
  const cuda::Driver* driver;
  JBW_RETURN_IF_ERROR(cuda::GetDriver(&driver));
  std::lock_guard<std::mutex> lock(mutex_);
  if (max_active_clusters(device) > 0) return {};
  cuda::Device handle;
  if (cuda::Result result = driver->cuDeviceGet(&handle, device); result != cuda::kSuccess) {
    return FailedPrecondition("a launch requires device ", device, ", got ", driver->ErrorText(result));
  }
  JBW_RETURN_IF_ERROR(CheckCapability(*driver, spec_, device, handle));
  JBW_RETURN_IF_ERROR(LoadLibrary(*driver));
  JBW_RETURN_IF_ERROR(AllowSmem(*driver, spec_, library_->kernel(), device, handle));
  JBW_RETURN_IF_ERROR(AllowCluster(*driver, spec_, library_->kernel(), device, handle));
  int num_clusters;
  JBW_RETURN_IF_ERROR(CountClusters(*driver, spec_, function(), device, &num_clusters));
  max_active_clusters_[device].store(num_clusters, std::memory_order_release);
  return {};
}

Status Kernel::LoadLibrary(const cuda::Driver& driver) {
  if (library_) return {};
  auto library = std::make_unique<Library>();
  JBW_RETURN_IF_ERROR(library->Load(driver, cubin_, spec_));
  library_ = std::move(library);
  return {};
}

CubinCache& CubinCache::Global() {
  static CubinCache* const cache = new CubinCache;  // never destroyed: at exit the driver may be gone before us
  return *cache;
}

void CubinCache::SetDirectories(std::vector<std::string> directories) {
  std::lock_guard<std::mutex> lock(mutex_);
  directories_ = std::move(directories);
}

Status CubinCache::Find(const KernelSpec& spec, Kernel** kernel) {
  JBW_RETURN_IF_ERROR(CheckNames(spec));
  std::lock_guard<std::mutex> lock(mutex_);
  const std::string key = Key(spec);
  auto cached = kernels_.find(key);
  if (cached == kernels_.end()) {
    std::string cubin;
    JBW_RETURN_IF_ERROR(Read(spec, &cubin));
    cached = kernels_.emplace(key, std::make_unique<Kernel>(spec, std::move(cubin))).first;
  }
  *kernel = cached->second.get();
  return {};
}

// The first directory whose file has the right hash; a wrong one is reported only if no other directory has it right.
Status CubinCache::Read(const KernelSpec& spec, std::string* cubin) const {
  std::string searched;
  Status mismatch;
  for (const std::string& directory : directories_) {
    const std::string path = Cat(directory, "/", spec.variant, ".cubin");
    searched += Cat(searched.empty() ? "" : ", ", directory);
    if (!ReadFile(path, cubin)) continue;
    const std::string sha256 = Sha256Hex(*cubin);
    if (sha256 == spec.cubin_sha256) return {};
    mismatch = FailedPrecondition("`", path, "` requires the sha256 of its manifest, ", spec.cubin_sha256, ", got ",
                                  sha256, ": re", BuildCommand(spec));
  }
  if (!mismatch.ok()) return mismatch;
  return FailedPrecondition("kernel `", spec.variant, "` requires ", spec.variant,
                            ".cubin in an artifact directory, got none in [", searched, "]: ", BuildCommand(spec));
}

}  // namespace jbw

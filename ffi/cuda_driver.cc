#include "cuda_driver.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>

namespace jbw::cuda {
namespace {

constexpr int kMinVersion = 12000;  // cuLibraryLoadData, cuTensorMapEncodeTiled and clusters are of CUDA 12.0
// Asked for the version that the declarations are of: a newer one changes signatures under the same name.
constexpr int kSymbolVersion = 12000;
constexpr const char kRemedy[] = ": install an NVIDIA driver of 525 or newer (525.60 supports CUDA 12.0)";

using GetProcAddress = Result (*)(const char* name, void** function, int version, uint64_t flags, int* status);

template <typename F>
bool Find(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  return *function != nullptr;
}

// Before the driver's functions are known to be there.
std::string NameOf(void* library, Result result) {
  Result (*get_error_name)(Result, const char**) = nullptr;
  const char* name = nullptr;
  if (!Find(library, "cuGetErrorName", &get_error_name) || get_error_name(result, &name) != kSuccess || !name) {
    return Cat("CUDA error ", result);
  }
  return name;
}

Status CheckVersion(void* library, const char* path, int* version) {
  Result (*driver_get_version)(int*) = nullptr;
  if (!Find(library, "cuDriverGetVersion", &driver_get_version)) {
    return FailedPrecondition("the driver requires a cuDriverGetVersion, got none in ", path, kRemedy);
  }
  if (Result result = driver_get_version(version); result != kSuccess) {
    return FailedPrecondition("the driver requires a version, got ", NameOf(library, result), " of cuDriverGetVersion",
                              kRemedy);
  }
  if (*version >= kMinVersion) return {};
  return FailedPrecondition("the driver requires support of CUDA 12.0 or newer, got CUDA ", *version / 1000, ".",
                            *version % 1000 / 10, kRemedy);
}

Status FindFunctions(void* library, const char* path, Driver* driver) {
  GetProcAddress get_proc_address = nullptr;
  if (!Find(library, "cuGetProcAddress_v2", &get_proc_address)) {
    return FailedPrecondition("the driver requires a cuGetProcAddress_v2, got none in ", path, kRemedy);
  }
#define JBW_CUDA_FIND(name, parameters)                                                                          \
  if (int found = 0;                                                                                             \
      get_proc_address(#name, reinterpret_cast<void**>(&driver->name), kSymbolVersion, 0, &found) != kSuccess || \
      driver->name == nullptr) {                                                                                 \
    return FailedPrecondition("the driver requires a " #name ", got none in ", path, kRemedy);                   \
  }
  JBW_CUDA_FUNCTIONS(JBW_CUDA_FIND)
#undef JBW_CUDA_FIND
  return {};
}

Status Load(Driver* driver) {
  const char* chosen = std::getenv("JAX_BWGEMM_LIBCUDA");
  const char* path = chosen ? chosen : "libcuda.so.1";
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);  // kept: JAX holds the same copy for the process's life
  if (!library) {
    return FailedPrecondition("a launch requires the NVIDIA driver's library ", path, ", got ", dlerror(), kRemedy);
  }
  JBW_RETURN_IF_ERROR(CheckVersion(library, path, &driver->version));
  return FindFunctions(library, path, driver);
}

}  // namespace

std::string Driver::ErrorText(Result result) const {
  const char *name = nullptr, *meaning = nullptr;
  if (cuGetErrorName(result, &name) != kSuccess || !name) return Cat("CUDA error ", result);
  if (cuGetErrorString(result, &meaning) != kSuccess || !meaning) return name;
  return Cat(name, " (", meaning, ")");
}

Status LaunchError(const Driver& driver, const std::string& variant, int device, Result result,
                   const std::string& sizes) {
  if (result == kOutOfMemory) {
    return ResourceExhausted("the launch of `", variant, "` requires memory, got ", driver.ErrorText(result),
                             " on device ", device, sizes);
  }
  return Internal("the launch of `", variant, "` requires success, got ", driver.ErrorText(result), " on device ",
                  device, sizes, ": the cause may be an earlier kernel on this device");
}

Status GetDriver(const Driver** driver) {
  static std::atomic<const Driver*> loaded{nullptr};  // never deleted: used until the process ends
  static std::mutex mutex;
  *driver = loaded.load(std::memory_order_acquire);
  if (*driver) return {};
  std::lock_guard<std::mutex> lock(mutex);
  *driver = loaded.load(std::memory_order_relaxed);
  if (*driver) return {};
  auto found = std::make_unique<Driver>();
  JBW_RETURN_IF_ERROR(Load(found.get()));
  *driver = found.release();
  loaded.store(*driver, std::memory_order_release);
  return {};
}

}  // namespace jbw::cuda

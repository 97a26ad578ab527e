// A stand-in for libcuda.so.1: answers like a machine with two GPUs, records
// launches, and can be told to hide a symbol, to fail a function or the n-th
// call of any, or to be another machine. A tensor map is written as plain
// numbers, for tests to read.
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../../../ffi/cuda_driver.h"

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

using jbw::cuda::Device;
using jbw::cuda::Function;
using jbw::cuda::Kernel;
using jbw::cuda::LaunchConfig;
using jbw::cuda::Library;
using jbw::cuda::Result;
using jbw::cuda::TensorMap;

namespace {

constexpr Result kInvalidValue = 1, kInvalidDevice = 101, kInvalidHandle = 400, kNotFound = 500;
constexpr Result kInvalidClusterSize = 912;
constexpr int kNumDevices = 2, kFirstDevice = 100, kMaxPortableClusterCtas = 8;

struct RecordedLaunch {
  uint32_t grid[3], block[3], smem_bytes,
      cluster[3];  // cluster zero: no such attribute
  int32_t pdl;     // the same
  int32_t param_bytes;
  uint64_t stream, function;
  unsigned char params[4096];
};

struct RecordedMap {
  uint64_t address, dims[3], stride_bytes[2];
  uint32_t box[3];
  int32_t rank, dtype, interleave, swizzle, l2_promotion, oob;
};
static_assert(sizeof(RecordedMap) <= sizeof(TensorMap));

std::mutex g_mutex;
std::map<std::string, int> g_settings = {{"version", 13000}, {"major", 9}, {"minor", 0},
                                         {"clusters", 66},   {"gpus", 2},  {"sms", 132},
                                         {"free_mib", 1024}};
std::map<std::string, int> g_failures, g_calls;
int g_calls_until_failure = -1,
    g_nth_failure = 0;  // below 0: no call of any function fails
uint64_t g_num_libraries = 0;
std::set<uint64_t> g_libraries;  // that are loaded
std::map<std::pair<Device, int>, int> g_kernel_attributes;
std::map<int, int> g_attribute_failures;
uint32_t g_occupancy_cluster[3];
std::string g_hidden;
thread_local std::vector<size_t> t_param_sizes;
RecordedLaunch g_launch;

int Setting(const char* name) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return g_settings[name];
}

Result Called(const char* name) {
  std::lock_guard<std::mutex> lock(g_mutex);
  ++g_calls[name];
  if (g_calls_until_failure >= 0 && g_calls_until_failure-- == 0) return g_nth_failure;
  auto failure = g_failures.find(name);
  return failure == g_failures.end() ? 0 : failure->second;
}

// What cuTensorMapEncodeTiled documents for tiles without interleaving, of the
// three dimensions that we ask for; it takes strides in any order, as those of
// attention's (batch, sequence, heads, dimension) are, seen by heads.
bool IsEncodable(uint64_t address, uint32_t rank, const uint64_t* dims, const uint64_t* stride_bytes,
                 const uint32_t* box, const uint32_t* element_strides) {
  if (rank != 3 || address % 16) return false;
  for (int i = 0; i < 3; ++i) {
    if (dims[i] < 1 || dims[i] > uint64_t{1} << 32 || box[i] < 1 || box[i] > 256) return false;
    if (element_strides[i] < 1 || element_strides[i] > 8) return false;
  }
  for (int i = 0; i < 2; ++i) {
    if (stride_bytes[i] % 16 || stride_bytes[i] >= uint64_t{1} << 40) return false;
  }
  return true;
}

// Reads the attributes of a launch; a cluster that is too large must have been
// allowed on some device.
Result ReadAttributes(const LaunchConfig& config, uint32_t (&cluster)[3], int32_t* pdl) {
  for (uint32_t i = 0; i < config.num_attributes; ++i) {
    const auto& [id, pad, value] = config.attributes[i];
    if (id == jbw::cuda::kLaunchAttributeClusterDimension) {
      std::memcpy(cluster, value.cluster_dim, sizeof(cluster));
    } else if (id == jbw::cuda::kLaunchAttributeProgrammaticStreamSerialization) {
      *pdl = value.programmatic_stream_serialization;
    } else {
      return kInvalidValue;
    }
  }
  for (int i = 0; i < 3; ++i) {
    if (cluster[i] && config.grid[i] % cluster[i]) return kInvalidValue;
  }
  if (cluster[0] * cluster[1] * cluster[2] <= kMaxPortableClusterCtas) return 0;
  for (const auto& [key, value] : g_kernel_attributes) {
    if (key.second == jbw::cuda::kFunctionAttributeNonPortableClusterSize && value == 1) return 0;
  }
  return kInvalidClusterSize;
}

}  // namespace

FAKE_EXPORT void fake_set(const char* name, int value) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_settings[name] = value;
}
FAKE_EXPORT void fake_fail(const char* function, int result) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_failures[function] = result;
}
// The call of any function that comes after `skipped` others fails, once;
// false: the last one asked for has not come.
FAKE_EXPORT bool fake_fail_nth(int skipped, int result) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const bool came = g_calls_until_failure < 0;
  g_calls_until_failure = skipped;
  g_nth_failure = result;
  return came;
}
FAKE_EXPORT size_t fake_libraries() {
  std::lock_guard<std::mutex> lock(g_mutex);
  return g_libraries.size();
}
// A kernel's attribute that the driver does not take.
FAKE_EXPORT void fake_fail_attribute(int attribute, int result) { g_attribute_failures[attribute] = result; }
FAKE_EXPORT void fake_hide(const char* function) { g_hidden = function; }
// The sizes of the kernel's parameters, as a cubin lists them; a launch records
// their bytes, one after the other.
FAKE_EXPORT void fake_params(const size_t* sizes, size_t count) { t_param_sizes.assign(sizes, sizes + count); }
FAKE_EXPORT int fake_calls(const char* function) { return g_calls[function]; }
FAKE_EXPORT const RecordedLaunch* fake_launch() { return &g_launch; }
FAKE_EXPORT const uint32_t* fake_occupancy_cluster() { return g_occupancy_cluster; }
// A kernel's attribute on the `ordinal`-th device; -1: never set.
FAKE_EXPORT int fake_kernel_attribute(int ordinal, int attribute) {
  auto found = g_kernel_attributes.find({kFirstDevice + ordinal, attribute});
  return found == g_kernel_attributes.end() ? -1 : found->second;
}

#define FAKE_CALLED(name) \
  if (Result failure = Called(#name)) return failure

FAKE_EXPORT Result cuDriverGetVersion(int* version) {
  FAKE_CALLED(cuDriverGetVersion);
  *version = Setting("version");
  return 0;
}

FAKE_EXPORT Result cuInit(unsigned) { return Called("cuInit"); }

FAKE_EXPORT Result cuDeviceGetCount(int* count) {
  FAKE_CALLED(cuDeviceGetCount);
  *count = Setting("gpus");
  return 0;
}

FAKE_EXPORT Result cuDeviceGetName(char* name, int size, Device) {
  FAKE_CALLED(cuDeviceGetName);
  std::strncpy(name, Setting("major") == 9 ? "NVIDIA H200" : "NVIDIA Fake", static_cast<size_t>(size));
  return 0;
}

FAKE_EXPORT Result cuDeviceTotalMem_v2(size_t* bytes, Device) {
  FAKE_CALLED(cuDeviceTotalMem_v2);
  *bytes = size_t{141} << 30;
  return 0;
}

FAKE_EXPORT Result cuDeviceGet(Device* device, int ordinal) {
  FAKE_CALLED(cuDeviceGet);
  *device = kFirstDevice + ordinal;
  return ordinal < kNumDevices ? 0 : kInvalidDevice;
}

FAKE_EXPORT Result cuDeviceGetAttribute(int* value, int attribute, Device) {
  FAKE_CALLED(cuDeviceGetAttribute);
  constexpr int kMultiprocessorCount = 16;  // CUdevice_attribute
  *value = Setting(attribute == jbw::cuda::kDeviceAttributeMajor ? "major"
                   : attribute == kMultiprocessorCount           ? "sms"
                                                                 : "minor");
  return 0;
}

FAKE_EXPORT Result cuGetErrorName(Result result, const char** name) {
  FAKE_CALLED(cuGetErrorName);
  *name = result == kInvalidValue ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_FAKE";
  return 0;
}

FAKE_EXPORT Result cuGetErrorString(Result, const char** meaning) {
  FAKE_CALLED(cuGetErrorString);
  *meaning = "as told";
  return 0;
}

FAKE_EXPORT Result cuLibraryLoadData(Library* library, const void*, int*, void**, uint32_t, int*, void**, uint32_t) {
  FAKE_CALLED(cuLibraryLoadData);
  std::lock_guard<std::mutex> lock(g_mutex);
  g_libraries.insert(++g_num_libraries);
  *library = reinterpret_cast<Library>(g_num_libraries);
  return 0;
}

FAKE_EXPORT Result cuLibraryUnload(Library library) {
  FAKE_CALLED(cuLibraryUnload);
  std::lock_guard<std::mutex> lock(g_mutex);
  return g_libraries.erase(reinterpret_cast<uint64_t>(library)) ? 0 : kInvalidHandle;
}

FAKE_EXPORT Result cuLibraryGetKernel(Kernel* kernel, Library, const char* name) {
  FAKE_CALLED(cuLibraryGetKernel);
  *kernel = reinterpret_cast<Kernel>(0x2000);
  return std::strcmp(name, "kernel_entry") == 0 ? 0 : kNotFound;
}

FAKE_EXPORT Result cuKernelSetAttribute(int attribute, int value, Kernel, Device device) {
  FAKE_CALLED(cuKernelSetAttribute);
  const bool is_known = attribute == jbw::cuda::kFunctionAttributeMaxDynamicSmem ||
                        attribute == jbw::cuda::kFunctionAttributeNonPortableClusterSize;
  if (!is_known || device < kFirstDevice) return kInvalidValue;
  std::lock_guard<std::mutex> lock(g_mutex);
  if (g_attribute_failures.count(attribute)) return g_attribute_failures[attribute];
  g_kernel_attributes[{device, attribute}] = value;
  return 0;
}

FAKE_EXPORT Result cuOccupancyMaxActiveClusters(int* num_clusters, Function, const LaunchConfig* config) {
  FAKE_CALLED(cuOccupancyMaxActiveClusters);
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    int32_t pdl = 0;
    if (Result failure = ReadAttributes(*config, g_occupancy_cluster, &pdl)) return failure;
  }
  *num_clusters = Setting("clusters");
  return 0;
}

FAKE_EXPORT Result cuMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  FAKE_CALLED(cuMemGetInfo);
  *free_bytes = static_cast<size_t>(Setting("free_mib")) << 20;
  *total_bytes = size_t{80} << 30;
  return 0;
}

FAKE_EXPORT Result cuTensorMapEncodeTiled(TensorMap* map, int dtype, uint32_t rank, void* address, const uint64_t* dims,
                                          const uint64_t* stride_bytes, const uint32_t* box,
                                          const uint32_t* element_strides, int interleave, int swizzle,
                                          int l2_promotion, int oob) {
  FAKE_CALLED(cuTensorMapEncodeTiled);
  const auto at = reinterpret_cast<uint64_t>(address);
  if (reinterpret_cast<uint64_t>(map) % 64 || !IsEncodable(at, rank, dims, stride_bytes, box, element_strides)) {
    return kInvalidValue;
  }
  const RecordedMap recorded = {at,
                                {dims[0], dims[1], dims[2]},
                                {stride_bytes[0], stride_bytes[1]},
                                {box[0], box[1], box[2]},
                                static_cast<int32_t>(rank),
                                dtype,
                                interleave,
                                swizzle,
                                l2_promotion,
                                oob};
  std::memcpy(map, &recorded, sizeof(recorded));
  return 0;
}

FAKE_EXPORT Result cuLaunchKernelEx(const LaunchConfig* config, Function function, void** params, void** extra) {
  FAKE_CALLED(cuLaunchKernelEx);
  if (extra) return kInvalidValue;
  std::lock_guard<std::mutex> lock(g_mutex);
  g_launch = {};
  std::memcpy(g_launch.grid, config->grid, sizeof(g_launch.grid));
  std::memcpy(g_launch.block, config->block, sizeof(g_launch.block));
  g_launch.smem_bytes = config->smem_bytes;
  if (Result failure = ReadAttributes(*config, g_launch.cluster, &g_launch.pdl)) return failure;
  g_launch.stream = reinterpret_cast<uint64_t>(config->stream);
  g_launch.function = reinterpret_cast<uint64_t>(function);
  for (size_t i = 0; i < t_param_sizes.size(); ++i) {
    std::memcpy(g_launch.params + g_launch.param_bytes, params[i], t_param_sizes[i]);
    g_launch.param_bytes += static_cast<int32_t>(t_param_sizes[i]);
  }
  return 0;
}

FAKE_EXPORT Result cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t, int*) {
  FAKE_CALLED(cuGetProcAddress_v2);
  *function = nullptr;
  if (version != 12000 || g_hidden == name) return kNotFound;
#define FAKE_FIND(symbol, parameters) \
  if (std::strcmp(name, #symbol) == 0) *function = reinterpret_cast<void*>(&symbol);
  JBW_CUDA_FUNCTIONS(FAKE_FIND)
#undef FAKE_FIND
  return *function ? 0 : kNotFound;
}

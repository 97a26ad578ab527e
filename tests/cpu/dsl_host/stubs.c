/* Stands in for the CUDA symbols that CuTeDSL's generated host code calls, and keeps what it would have launched.
 * Structs as in CUDA's driver_types.h: cudaLaunchConfig_t and cudaLaunchAttribute. */
#include <stdint.h>
#include <string.h>

typedef struct { uint32_t id, pad; uint32_t value[16]; } Attribute;
typedef struct {
  uint32_t grid[3], block[3];
  size_t smem_bytes;
  void* stream;
  Attribute* attributes;
  uint32_t num_attributes;
} Config;

int jbw_num_params;
int jbw_param_sizes[64];
unsigned char jbw_params[64][128];
uint32_t jbw_grid[3], jbw_block[3], jbw_cluster[3];
uint64_t jbw_smem_bytes;
int jbw_num_launches;

int _cudaLaunchKernelEx(const Config* config, const void* kernel, void** args) {
  (void)kernel;
  memcpy(jbw_grid, config->grid, sizeof jbw_grid);
  memcpy(jbw_block, config->block, sizeof jbw_block);
  jbw_smem_bytes = config->smem_bytes;
  for (uint32_t i = 0; i < config->num_attributes; ++i)
    if (config->attributes[i].id == 4) memcpy(jbw_cluster, config->attributes[i].value, sizeof jbw_cluster);
  for (int i = 0; i < jbw_num_params; ++i) memcpy(jbw_params[i], args[i], jbw_param_sizes[i]);
  ++jbw_num_launches;
  return 0;
}

static int dummy;
int _cudaLibraryLoadData(void** library) { *library = &dummy; return 0; }
int _cudaLibraryGetKernel(void** kernel) { *kernel = &dummy; return 0; }
int _cudaGetDevice(int* device) { *device = 0; return 0; }
int _cudaDeviceGetAttribute(int* value) { *value = 232448; return 0; }
int _cudaFuncSetAttribute(void) { return 0; }
int _cudaKernelSetAttributeForDevice(void) { return 0; }
int _cuKernelGetAttribute(int* value) { *value = 0; return 0; }

// The element types of buffers and of tensor maps: codes, names, bytes.
#ifndef JAX_BWGEMM_DTYPES_H_
#define JAX_BWGEMM_DTYPES_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace jbw {

inline constexpr int32_t kInt8 = 2, kInt32 = 4, kUint8 = 6, kFloat16 = 10, kFloat32 = 11, kBfloat16 = 16;
inline constexpr int32_t kFloat8E5M2 = 19, kFloat8E4M3FN = 20;  // as XLA_FFI_DataType counts

int32_t FindDtype(std::string_view name);  // -1: not one of those above

int64_t DtypeBytes(int32_t dtype);  // 0: the same

std::string DtypeName(int32_t dtype);

// A tensor map's view of an element.
struct MapElement {
  const char* name;
  int32_t data_type;  // CUtensorMapDataType
  int32_t bytes;
};

const MapElement* FindMapElement(std::string_view name);  // nullptr: there is no such element

}  // namespace jbw

#endif  // JAX_BWGEMM_DTYPES_H_

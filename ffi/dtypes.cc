#include "dtypes.h"

#include "cuda_driver.h"
#include "status.h"

namespace jbw {
namespace {

struct DtypeFacts {
  int32_t dtype;
  const char* name;
  int64_t bytes;
};

constexpr DtypeFacts kDtypes[] = {
    {kInt8, "int8", 1},
    {kInt32, "int32", 4},
    {kUint8, "uint8", 1},
    {kFloat16, "float16", 2},
    {kFloat32, "float32", 4},
    {kBfloat16, "bfloat16", 2},
    {kFloat8E5M2, "float8_e5m2", 1},
    {kFloat8E4M3FN, "float8_e4m3fn", 1},
};

constexpr MapElement kMapElements[] = {
    {"u8", cuda::kTensorMapUint8, 1},       // whatever has one byte
    {"s32", cuda::kTensorMapInt32, 4},      //
    {"f16", cuda::kTensorMapFloat16, 2},    //
    {"bf16", cuda::kTensorMapBfloat16, 2},  //
    {"f32", cuda::kTensorMapFloat32, 4},    //
    {"tf32", cuda::kTensorMapTfloat32, 4},  // float32, which TMA rounds on its way
};

const DtypeFacts* Find(int32_t dtype) {
  for (const DtypeFacts& facts : kDtypes) {
    if (facts.dtype == dtype) return &facts;
  }
  return nullptr;
}

}  // namespace

int32_t FindDtype(std::string_view name) {
  for (const DtypeFacts& facts : kDtypes) {
    if (facts.name == name) return facts.dtype;
  }
  return -1;
}

int64_t DtypeBytes(int32_t dtype) {
  const DtypeFacts* facts = Find(dtype);
  return facts ? facts->bytes : 0;
}

std::string DtypeName(int32_t dtype) {
  const DtypeFacts* facts = Find(dtype);
  return facts ? facts->name : Cat("XLA FFI dtype ", dtype);
}

const MapElement* FindMapElement(std::string_view name) {
  for (const MapElement& element : kMapElements) {
    if (element.name == name) return &element;
  }
  return nullptr;
}

}  // namespace jbw

// What a custom call says by name, and the sentence that says which name is off. Two front ends: a C array (here) and
// XLA's dictionary (xla_types.h). Knows no name itself.
#ifndef JAX_BWGEMM_ATTRIBUTES_H_
#define JAX_BWGEMM_ATTRIBUTES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "status.h"

extern "C" {

// `type` says which value counts: 'i', 'f' or 's'.
struct JbwAttribute {
  const char* name;
  int32_t type;
  union {
    int32_t i;
    float f;
    const char* s;
  } value;
};

}  // extern "C"

namespace jbw {

class Attributes {
 public:
  enum class Found { kYes, kNo, kOtherType };

  virtual ~Attributes() = default;
  virtual Found Find(std::string_view name, int32_t* value) const = 0;
  virtual Found Find(std::string_view name, float* value) const = 0;
  virtual Found Find(std::string_view name, std::string* value) const = 0;
};

class CAttributes final : public Attributes {
 public:
  CAttributes(const JbwAttribute* all, size_t count) : all_(all), count_(count) {}

  Found Find(std::string_view name, int32_t* value) const override;
  Found Find(std::string_view name, float* value) const override;
  Found Find(std::string_view name, std::string* value) const override;

 private:
  template <typename T, typename Take>
  Found Find(std::string_view name, char type, Take take, T* value) const;

  const JbwAttribute* const all_;
  const size_t count_;
};

Status Read(const Attributes& attrs, std::string_view name, int32_t* value);
Status Read(const Attributes& attrs, std::string_view name, float* value);
Status Read(const Attributes& attrs, std::string_view name, std::string* value);

// An int32 of low..high.
Status Read(const Attributes& attrs, std::string_view name, int64_t low, int64_t high, int32_t* value);

// The same, or `otherwise` where there is none: what calls that were exported before it did not say.
Status ReadOr(const Attributes& attrs, std::string_view name, int32_t otherwise, int64_t low, int64_t high,
              int32_t* value);

Status CheckRange(std::string_view name, int64_t value, int64_t low, int64_t high);

}  // namespace jbw

#endif  // JAX_BWGEMM_ATTRIBUTES_H_

#include "attributes.h"

namespace jbw {
namespace {

using Found = Attributes::Found;

template <typename T>
Status ReadAs(const Attributes& attrs, std::string_view name, const char* type, T* value) {
  const Found found = attrs.Find(name, value);
  if (found == Found::kYes) return {};
  return InvalidArgument("attribute `", name, "` requires ", type, ", got ",
                         found == Found::kNo ? "none" : "another type",
                         ": the Python package and the library are of different versions, reinstall");
}

}  // namespace

template <typename T, typename Take>
Found CAttributes::Find(std::string_view name, char type, Take take, T* value) const {
  for (size_t i = 0; i < count_; ++i) {
    if (all_[i].name != name) continue;
    if (all_[i].type != type) return Found::kOtherType;
    *value = take(all_[i].value);
    return Found::kYes;
  }
  return Found::kNo;
}

Found CAttributes::Find(std::string_view name, int32_t* value) const {
  return Find(name, 'i', [](const auto& held) { return held.i; }, value);
}

Found CAttributes::Find(std::string_view name, float* value) const {
  return Find(name, 'f', [](const auto& held) { return held.f; }, value);
}

Found CAttributes::Find(std::string_view name, std::string* value) const {
  return Find(name, 's', [](const auto& held) { return held.s; }, value);
}

Status Read(const Attributes& attrs, std::string_view name, int32_t* value) {
  return ReadAs(attrs, name, "an int32", value);
}

Status Read(const Attributes& attrs, std::string_view name, float* value) {
  return ReadAs(attrs, name, "a float32", value);
}

Status Read(const Attributes& attrs, std::string_view name, std::string* value) {
  return ReadAs(attrs, name, "a string", value);
}

Status Read(const Attributes& attrs, std::string_view name, int64_t low, int64_t high, int32_t* value) {
  JBW_RETURN_IF_ERROR(Read(attrs, name, value));
  return CheckRange(name, *value, low, high);
}

Status ReadOr(const Attributes& attrs, std::string_view name, int32_t otherwise, int64_t low, int64_t high,
              int32_t* value) {
  *value = otherwise;
  if (attrs.Find(name, value) == Found::kNo) return {};
  return Read(attrs, name, low, high, value);
}

Status CheckRange(std::string_view name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  return InvalidArgument("`", name, "` requires ", low, "..", high, ", got ", value);
}

}  // namespace jbw

// Between XLA's types and ours: what every handler of the library needs.
#ifndef JAX_BWGEMM_XLA_TYPES_H_
#define JAX_BWGEMM_XLA_TYPES_H_

#include <string>
#include <string_view>
#include <vector>

#include "attributes.h"
#include "operands.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace jbw {

inline xla::ffi::Error ToFfi(const Status& status) {
  if (status.ok()) return xla::ffi::Error::Success();
  return xla::ffi::Error(static_cast<xla::ffi::ErrorCode>(status.code()), status.message());
}

// What an XLA custom call says by name.
class XlaAttributes final : public Attributes {
 public:
  explicit XlaAttributes(const xla::ffi::Dictionary& all) : all_(all) {}

  Found Find(std::string_view name, int32_t* value) const override { return Get<int32_t>(name, value); }
  Found Find(std::string_view name, float* value) const override { return Get<float>(name, value); }
  Found Find(std::string_view name, std::string* value) const override { return Get<std::string_view>(name, value); }

 private:
  template <typename T, typename U>
  Found Get(std::string_view name, U* value) const {
    const xla::ffi::ErrorOr<T> found = all_.get<T>(name);
    if (!found.has_value()) return all_.contains(name) ? Found::kOtherType : Found::kNo;
    *value = U(*found);
    return Found::kYes;
  }

  const xla::ffi::Dictionary& all_;
};

// The buffers of an XLA custom call. Some XLA versions show Instantiate none at all: then Initialize checks.
class XlaBuffers {
 public:
  Status Read(const xla::ffi::RemainingArgs& args, const xla::ffi::RemainingRets& rets) {
    for (size_t i = 0; i < args.size(); ++i) {
      xla::ffi::ErrorOr<xla::ffi::AnyBuffer> arg = args.get<xla::ffi::AnyBuffer>(i);
      if (!arg.has_value()) return InvalidArgument("operand ", i, " requires a buffer, got ", arg.error().message());
      all_.push_back(Describe(*arg));
    }
    for (size_t i = 0; i < rets.size(); ++i) {
      xla::ffi::ErrorOr<xla::ffi::Result<xla::ffi::AnyBuffer>> ret = rets.get<xla::ffi::AnyBuffer>(i);
      if (!ret.has_value()) return InvalidArgument("result ", i, " requires a buffer, got ", ret.error().message());
      all_.push_back(Describe(**ret));
    }
    view_ = {all_.data(), static_cast<int32_t>(args.size()), static_cast<int32_t>(rets.size())};
    return {};
  }

  const JbwBuffers& view() const { return view_; }

 private:
  static JbwBuffer Describe(const xla::ffi::AnyBuffer& buffer) {
    JbwBuffer described = {
        static_cast<int32_t>(buffer.element_type()), static_cast<int32_t>(buffer.dimensions().size()), {}};
    for (size_t i = 0; i < buffer.dimensions().size() && i < 3; ++i) described.dims[i] = buffer.dimensions()[i];
    return described;
  }

  std::vector<JbwBuffer> all_;
  JbwBuffers view_ = {};
};

}  // namespace jbw

#endif  // JAX_BWGEMM_XLA_TYPES_H_

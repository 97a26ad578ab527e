// Between XLA's types and ours: what every handler of the library needs.
#ifndef JAX_BWGEMM_XLA_TYPES_H_
#define JAX_BWGEMM_XLA_TYPES_H_

#include "operands.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace jbw {

inline xla::ffi::Error ToFfi(const Status& status) {
  if (status.ok()) return xla::ffi::Error::Success();
  return xla::ffi::Error(static_cast<xla::ffi::ErrorCode>(status.code()), status.message());
}

inline JbwBuffer Describe(const xla::ffi::AnyBuffer& buffer) {
  JbwBuffer described = {
      static_cast<int32_t>(buffer.element_type()), static_cast<int32_t>(buffer.dimensions().size()), {}};
  for (size_t i = 0; i < buffer.dimensions().size() && i < 3; ++i) described.dims[i] = buffer.dimensions()[i];
  return described;
}

}  // namespace jbw

#endif  // JAX_BWGEMM_XLA_TYPES_H_

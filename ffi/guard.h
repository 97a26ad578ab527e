// The edge that no exception crosses: XLA's stages and the C ABI are called from code that cannot take one.
#ifndef JAX_BWGEMM_GUARD_H_
#define JAX_BWGEMM_GUARD_H_

#include <exception>

#include "status.h"

namespace jbw {

template <typename F>
Status Guard(F&& body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    return Internal("the launcher requires no exception, got ", error.what(), ": please report it");
  } catch (...) {
    return Internal("the launcher requires no exception, got an unknown one: please report it");
  }
}

}  // namespace jbw

#endif  // JAX_BWGEMM_GUARD_H_

// SHA-256 (FIPS 180-4), for telling a cubin from a corrupted one.
#ifndef JAX_BWGEMM_SHA256_H_
#define JAX_BWGEMM_SHA256_H_

#include <string>
#include <string_view>

namespace jbw {

std::string Sha256Hex(std::string_view data);  // 64 lower-case hexadecimal digits

}  // namespace jbw

#endif  // JAX_BWGEMM_SHA256_H_

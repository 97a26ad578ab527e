// The values of raised flags. A kernel's flags are not zeroed: what else lies in a workspace must not be taken for one.
#ifndef JAX_BWGEMM_TOKEN_H_
#define JAX_BWGEMM_TOKEN_H_

#include <atomic>
#include <cstdint>

namespace jbw {

// Never 0, which is a lowered flag, and never the same twice (within 2^64 - 1 values): an odd step visits every number
// once before it comes back.
class TokenSource {
 public:
  explicit TokenSource(uint64_t first) : next_(first) {}

  uint64_t Next() {
    uint64_t token;
    do token = next_.fetch_add(kStep, std::memory_order_relaxed);
    while (token == 0);
    return token;
  }

 private:
  static constexpr uint64_t kStep = 0x9E3779B97F4A7C15;

  std::atomic<uint64_t> next_;
};

// Of this process's source. It starts at a random number, so that flags that another process left are hardly ever ours.
uint64_t NewToken();

}  // namespace jbw

#endif  // JAX_BWGEMM_TOKEN_H_

#include "token.h"

#include <random>

namespace jbw {
namespace {

uint64_t Random() {
  std::random_device device;
  const uint64_t high = device(), low = device();
  return high << 32 | low;
}

}  // namespace

uint64_t NewToken() {
  static TokenSource source(Random());
  return source.Next();
}

}  // namespace jbw

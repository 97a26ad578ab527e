// What a step of the launcher returns: success, or whose fault it is and a sentence. Knows neither XLA nor CUDA.
#ifndef JAX_BWGEMM_STATUS_H_
#define JAX_BWGEMM_STATUS_H_

#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace jbw {

// The XLA FFI's own numbers, so that a code crosses the C ABI and the handler unchanged.
enum class Code : int {
  kOk = 0,
  kInvalidArgument = 3,     // the caller's fault
  kResourceExhausted = 8,   // of memory: nobody's
  kFailedPrecondition = 9,  // the machine's
  kInternal = 13,           // ours
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

inline void Append(std::string* text, std::string_view part) { text->append(part); }
inline void Append(std::string* text, const char* part) { text->append(part); }
inline void Append(std::string* text, char part) { text->push_back(part); }
inline void Append(std::string* text, const void* part) {
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%p", part);
  text->append(digits);
}
template <typename Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
void Append(std::string* text, Number part) {
  text->append(std::to_string(part));
}

// Text without iostreams: where a compiler links its own libstdc++ statically, a stream's locale facets are another
// copy's than the process's, and inserting a number crashes (seen with g++ 13.3 in a CUDA image).
template <typename... Parts>
std::string Cat(const Parts&... parts) {
  std::string text;
  (Append(&text, parts), ...);
  return text;
}

template <typename... Parts>
Status InvalidArgument(const Parts&... parts) {
  return Status(Code::kInvalidArgument, Cat(parts...));
}

template <typename... Parts>
Status FailedPrecondition(const Parts&... parts) {
  return Status(Code::kFailedPrecondition, Cat(parts...));
}

template <typename... Parts>
Status ResourceExhausted(const Parts&... parts) {
  return Status(Code::kResourceExhausted, Cat(parts...));
}

template <typename... Parts>
Status Internal(const Parts&... parts) {
  return Status(Code::kInternal, Cat(parts...));
}

}  // namespace jbw

#define JBW_RETURN_IF_ERROR(expression)                        \
  do {                                                         \
    if (::jbw::Status status_ = (expression); !status_.ok()) { \
      return status_;                                          \
    }                                                          \
  } while (false)

#endif  // JAX_BWGEMM_STATUS_H_

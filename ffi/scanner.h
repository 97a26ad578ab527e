// Reads a word of a recipe's text piece by piece. Every Take moves on only if it finds what it is asked for.
#ifndef JAX_BWGEMM_SCANNER_H_
#define JAX_BWGEMM_SCANNER_H_

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string_view>
#include <system_error>
#include <vector>

namespace jbw {

class Scanner {
 public:
  explicit Scanner(std::string_view text) : rest_(text) {}

  bool AtEnd() const { return rest_.empty(); }

  bool Take(std::string_view text) {
    if (rest_.substr(0, text.size()) != text) return false;
    rest_.remove_prefix(text.size());
    return true;
  }

  bool TakeInt(int32_t* value) {
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), *value);
    if (error != std::errc()) return false;
    rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
    return true;
  }

  // Letters, digits and underscores, at least one.
  bool TakeName(std::string_view* name) {
    size_t length = 0;
    while (length < rest_.size() && IsOfName(rest_[length])) ++length;
    *name = rest_.substr(0, length);
    rest_.remove_prefix(length);
    return length > 0;
  }

 private:
  static bool IsOfName(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  }

  std::string_view rest_;
};

// The words of `text`, which spaces separate.
inline std::vector<std::string_view> Words(std::string_view text) {
  std::vector<std::string_view> words;
  while (!text.empty()) {
    const size_t end = std::min(text.find(' '), text.size());
    if (end > 0) words.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return words;
}

}  // namespace jbw

#endif  // JAX_BWGEMM_SCANNER_H_

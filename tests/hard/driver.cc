// Drives the launcher through its C ABI, on the stand-in for the CUDA driver, with custom calls that were legal before
// they were damaged. Reads seeds (`seeds.py`) beside the cubin that they name. Ends with 1 and a sentence at the first
// thing that must not be; what a sanitizer finds is its own to say.
//
//   driver SEEDS random SEED COUNT THREADS   damaged calls, beside threads that share whole ones
//   driver SEEDS failures                    every call of the CUDA driver fails in turn
//   driver SEEDS lives COUNT                 whole lives; prints what is allocated, which must not grow
//   driver SEEDS timing THREADS STARTS       times are recorded and read while threads launch
#include <dlfcn.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "c_api.h"

namespace {

constexpr int kOk = 0, kInvalidArgument = 3, kFailedPrecondition = 9, kInternal = 13;
constexpr int kNumDevices = 2, kFailure = 700;
constexpr uintptr_t kAddress = 0x7f0000000000;
constexpr void* kStream = nullptr;

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::_Exit(1);  // other threads may be running
}

void Require(bool holds, const std::string& what) {
  if (!holds) Fail(what);
}

// What the stand-in has beside the CUDA driver's functions.
struct Fake {
  void (*params)(const size_t* sizes, size_t count);
  bool (*fail_nth)(int skipped, int result);
  void (*fail)(const char* function, int result);
  size_t (*libraries)();

  Fake() {
    void* library = dlopen(std::getenv("JAX_BWGEMM_LIBCUDA"), RTLD_NOW);
    Require(library, "no stand-in for the CUDA driver");
    Find(library, "fake_params", &params);
    Find(library, "fake_fail_nth", &fail_nth);
    Find(library, "fake_fail", &fail);
    Find(library, "fake_libraries", &libraries);
  }

 private:
  template <typename F>
  static void Find(void* library, const char* name, F* function) {
    *function = reinterpret_cast<F>(dlsym(library, name));
    Require(*function, name);
  }
};

struct Attribute {
  char type;
  std::string name, text;
};

// One custom call as it is said, to be damaged.
struct Said {
  bool is_repack = false;
  std::vector<Attribute> attributes;
  std::vector<JbwBuffer> buffers;
  int32_t num_operands = 0, num_results = 0;

  JbwBuffers view() const { return {buffers.data(), num_operands, num_results}; }
  Attribute* Find(const std::string& name) {
    for (Attribute& attribute : attributes) {
      if (attribute.name == name) return &attribute;
    }
    return nullptr;
  }
};

// As the C ABI takes them. Every text is a copy that ends where it ends, for a sanitizer to see what reads beyond.
class CAttributes {
 public:
  explicit CAttributes(const Said& said) : texts_(said.attributes) {
    for (const Attribute& attribute : texts_) {
      JbwAttribute c = {};
      c.name = attribute.name.c_str();
      c.type = attribute.type;
      if (c.type == 's') c.value.s = attribute.text.c_str();
      if (c.type == 'i') c.value.i = static_cast<int32_t>(std::strtoll(attribute.text.c_str(), nullptr, 10));
      if (c.type == 'f') c.value.f = std::strtof(attribute.text.c_str(), nullptr);
      all_.push_back(c);
    }
  }
  JbwAttributes view() const { return {all_.data(), all_.size()}; }

 private:
  const std::vector<Attribute> texts_;
  std::vector<JbwAttribute> all_;
};

std::vector<Said> ReadSeeds(const char* path) {
  std::ifstream file(path);
  std::vector<Said> seeds;
  Said said;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (word == "matmul" || word == "repack") {
      said = {};
      said.is_repack = word == "repack";
    } else if (word == "operand" || word == "result") {
      JbwBuffer buffer = {};
      words >> buffer.dtype >> buffer.rank >> buffer.dims[0] >> buffer.dims[1] >> buffer.dims[2];
      said.buffers.push_back(buffer);
      ++(word == "operand" ? said.num_operands : said.num_results);
    } else if (word == "end") {
      seeds.push_back(said);
    } else {
      Attribute attribute = {word[0], {}, {}};
      words >> attribute.name;
      std::getline(words >> std::ws, attribute.text);
      said.attributes.push_back(attribute);
    }
  }
  Require(seeds.size() > 10, "too few seeds");
  return seeds;
}

void SetDirectory(const std::string& seeds_path) {
  const std::string directory = seeds_path.substr(0, seeds_path.rfind('/'));
  const char* const directories[] = {"/nonexistent", directory.c_str()};
  jbw_set_artifact_dirs(directories, 2);
}

// What the launcher answered.
struct Answer {
  char text[1024] = "";
  int code;

  template <typename F>
  explicit Answer(F&& function) : code(function(text, sizeof(text))) {
    const std::string sentence = text;
    const bool is_known = code == kOk || code == kInvalidArgument || code == kFailedPrecondition || code == kInternal;
    Require(is_known && sentence.empty() == (code == kOk), "code " + std::to_string(code) + ", got: " + sentence);
    Require(sentence.find("requires no exception") == std::string::npos, sentence);
  }
  bool ok() const { return code == kOk; }
};

// How many bytes the kernel reads of each parameter: up to the next one.
std::vector<size_t> ParamSizes(const Said& said) {
  if (said.is_repack) {  // a damaged kind is refused
    const bool is_pad = std::any_of(said.attributes.begin(), said.attributes.end(),
                                    [](const Attribute& x) { return x.name == "kind" && x.text == "pad"; });
    if (is_pad) return {8, 8, 4, 4, 4, 4, 8, 8, 4, 4, 4, 4, 4};
    return {8, 8, 4, 4, 4, 4};
  }
  const CAttributes attributes(said);
  const JbwAttributes given = attributes.view();
  const JbwBuffers buffers = said.view();
  JbwLaunchPlan plan;
  const Answer answer(
      [&](char* text, size_t bytes) { return jbw_launch_plan(&given, &buffers, 66, 1, &plan, text, bytes); });
  if (!answer.ok()) return {};
  Require(plan.grid[0] > 0 && plan.grid[1] > 0 && plan.grid[2] > 0 && plan.grid[2] <= 65535, "a grid");
  std::vector<size_t> sizes;
  for (int i = 0; i < plan.num_params; ++i) {
    const int end = i + 1 < plan.num_params ? plan.param_offsets[i + 1] : plan.param_bytes;
    sizes.push_back(static_cast<size_t>(end - plan.param_offsets[i]));
  }
  return sizes;
}

// A call site of either kind.
class Site {
 public:
  Site(const Fake& fake, const Said& said, bool shows_buffers)
      : fake_(fake), is_repack_(said.is_repack), num_buffers_(said.buffers.size()), param_sizes_(ParamSizes(said)) {
    const CAttributes attributes(said);
    const JbwAttributes given = attributes.view();
    const JbwBuffers buffers = shows_buffers ? said.view() : JbwBuffers{};
    created_ = Answer([&](char* text, size_t bytes) {
                 return is_repack_ ? jbw_repack_call_create(&given, &buffers, &repack_, text, bytes)
                                   : jbw_call_create(&given, &buffers, &call_, text, bytes);
               }).code;
    Require((created_ == kOk) == (call_ || repack_), "a call that is created, or a reason");
  }
  Site(const Site&) = delete;
  ~Site() {
    if (call_) jbw_call_destroy(call_);
    if (repack_) jbw_repack_call_destroy(repack_);
  }

  int created() const { return created_; }

  Answer Initialize(int device, const JbwBuffers& buffers) {
    return Answer([&](char* text, size_t bytes) {
      return is_repack_ ? jbw_repack_call_initialize(repack_, device, &buffers, text, bytes)
                        : jbw_call_initialize(call_, device, &buffers, text, bytes);
    });
  }
  Answer Execute(int device, uintptr_t first = kAddress) const {
    std::vector<void*> pointers;
    for (size_t i = 0; i < num_buffers_; ++i) pointers.push_back(reinterpret_cast<void*>(first + i * 4096));
    fake_.params(param_sizes_.data(), param_sizes_.size());
    return Answer([&](char* text, size_t bytes) {
      return is_repack_ ? jbw_repack_call_execute(repack_, device, kStream, pointers.data(), text, bytes)
                        : jbw_call_execute(call_, device, kStream, pointers.data(), text, bytes);
    });
  }

 private:
  const Fake& fake_;
  const bool is_repack_;
  const size_t num_buffers_;
  const std::vector<size_t> param_sizes_;
  JbwCall* call_ = nullptr;
  JbwRepackCall* repack_ = nullptr;
  int created_;
};

class Damage {
 public:
  explicit Damage(uint64_t seed) : random_(seed) {}

  size_t Below(size_t bound) { return std::uniform_int_distribution<size_t>(0, bound - 1)(random_); }

  void To(Said* said) {
    for (size_t i = Below(4) ? 1 : 1 + Below(3); i > 0; --i) {
      if (Below(2) && !said->attributes.empty()) {
        ToAttribute(said);
      } else {
        ToBuffers(said);
      }
    }
  }

 private:
  int64_t Number() {
    constexpr int64_t kNumbers[] = {0,    1,    -1,    2,     3,         7,         8,         15,
                                    16,   17,   31,    32,    64,        127,       128,       129,
                                    255,  256,  257,   512,   513,       1023,      1024,      4095,
                                    4096, 4097, 65535, 65536, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN};
    const int64_t number = kNumbers[Below(std::size(kNumbers))];
    if (Below(4)) return number;
    return Below(2) ? static_cast<int64_t>(random_()) : int64_t{1} << Below(63);
  }

  void ToAttribute(Said* said) {
    const size_t at = Below(said->attributes.size());
    Attribute* attribute = &said->attributes[at];
    const size_t kind = Below(12);
    if (kind == 0) {
      said->attributes.erase(said->attributes.begin() + static_cast<std::ptrdiff_t>(at));
    } else if (kind == 1) {
      attribute->type = "ifsx"[Below(4)];
    } else if (kind == 2) {
      attribute->name = said->attributes[Below(said->attributes.size())].name;
    } else if (attribute->type == 's') {
      ToText(&attribute->text);
    } else {
      attribute->text = std::to_string(Number());
    }
  }

  void ToText(std::string* text) {
    const size_t from = Below(text->size() + 1), length = Below(std::min<size_t>(text->size() - from, 40) + 1);
    const size_t digit = text->find_first_of("0123456789", from);
    switch (Below(7)) {
      case 0:
        text->erase(from, length);
        break;
      case 1:
        text->insert(from, text->substr(Below(from + 1), length));
        break;
      case 2:
        text->insert(from, 1, static_cast<char>(Below(256)));
        break;
      case 3:
        text->insert(Below(text->size() + 1), 1, " :,[]%@+-?>/."[Below(13)]);
        break;
      case 4:
        for (size_t i = Below(8); i > 0; --i) *text += " " + *text;
        if (text->size() > 4096) text->resize(4096);
        break;
      case 5:
        ToWord(text, from);
        break;
      default:
        if (digit == std::string::npos) break;
        text->replace(digit, text->find_first_not_of("0123456789", digit) - digit, std::to_string(Number()));
    }
  }

  // The first word behind `from` becomes another one of a recipe's.
  void ToWord(std::string* text, size_t from) {
    constexpr const char* kWords[] = {"bytes", "l",       "l?",   "m",    "n",   "k",     "k+",    "batch",
                                      "tma",   "ptr",     "size", "step", "int", "token", "float", "l2",
                                      "int8",  "float32", "bf16", "u8",   "->",  ""};
    auto is_of_word = [](char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; };
    const auto begin = std::find_if(text->begin() + static_cast<std::ptrdiff_t>(from), text->end(), is_of_word);
    text->replace(begin, std::find_if_not(begin, text->end(), is_of_word), kWords[Below(std::size(kWords))]);
  }

  void ToBuffers(Said* said) {
    if (said->buffers.empty()) return;
    JbwBuffer* buffer = &said->buffers[Below(said->buffers.size())];
    switch (Below(6)) {
      case 0:
        buffer->rank = static_cast<int32_t>(Number());
        break;
      case 1:
        buffer->dtype = static_cast<int32_t>(Number());
        break;
      case 2:
        said->num_operands += said->num_operands > 0 && said->num_results < 3 ? -1 : 0;
        said->num_results = static_cast<int32_t>(said->buffers.size()) - said->num_operands;
        break;
      case 3:
        said->buffers.push_back(*buffer);
        ++said->num_results;
        break;
      default:
        ToSizes(said, *buffer);
    }
  }

  // One size, or all that are equal to it: that may still be a product.
  void ToSizes(Said* said, JbwBuffer buffer) {
    const int64_t old = buffer.dims[Below(3)], size = Number();
    const bool everywhere = Below(4);
    for (JbwBuffer& other : said->buffers) {
      for (int64_t& dim : other.dims) {
        if (dim == old && (everywhere || Below(3) == 0)) dim = size;
      }
    }
  }

  std::mt19937_64 random_;
};

// One life of a damaged call; true if it was launched.
bool DamagedLife(const Fake& fake, Damage* damage, Said said) {
  const bool is_late = damage->Below(4) == 0;  // buffers come with Initialize
  const Said whole = said;
  damage->To(&said);
  Site site(fake, said, !is_late);
  if (site.created() != kOk) return false;
  const int device =
      static_cast<int>(damage->Below(8) ? damage->Below(kNumDevices) : damage->Below(8)) - (damage->Below(16) == 0);
  const uintptr_t address = damage->Below(4) ? kAddress : kAddress + damage->Below(32);
  if (damage->Below(8) == 0) Require(!site.Execute(device).ok(), "Execute requires an Initialize");
  const Answer ready = site.Initialize(device, damage->Below(8) ? said.view() : whole.view());
  Require(ready.code != kInternal || std::strstr(ready.text, "requires a symbol"), ready.text);
  if (!ready.ok()) return false;
  const Answer done = site.Execute(device, address);
  Require(done.code != kInternal, done.text);  // the stand-in refuses what a driver would
  return done.ok();
}

void Random(const Fake& fake, const std::vector<Said>& seeds, uint64_t seed, size_t count, size_t num_threads) {
  std::vector<std::unique_ptr<Site>> shared;
  for (const Said& said : seeds) shared.push_back(std::make_unique<Site>(fake, said, true));
  std::atomic<size_t> num_launched{0};
  auto run = [&](size_t thread) {
    Damage damage(seed * 1000 + thread);
    for (size_t i = 0; i < count / num_threads; ++i) {
      num_launched += DamagedLife(fake, &damage, seeds[damage.Below(seeds.size())]);
      const size_t which = damage.Below(seeds.size());
      const int device = static_cast<int>(damage.Below(kNumDevices));
      Require(shared[which]->Initialize(device, seeds[which].view()).ok(), "a whole call is ready");
      Require(shared[which]->Execute(device).ok(), "a whole call is launched");
    }
  };
  std::vector<std::thread> threads;
  for (size_t i = 0; i < num_threads; ++i) threads.emplace_back(run, i);
  for (std::thread& thread : threads) thread.join();
  std::printf("%zu damaged calls, %zu of them launched\n", count, num_launched.load());
  Require(num_launched > count / 50 && num_launched < count, "some damages that nobody needs to refuse");
}

// A kernel of its own for each `life`: one that is cached would load nothing.
Said OwnKernel(Said said, int life) {
  said.Find("num_threads")->text = std::to_string(1 + life % 1024);
  said.Find("smem_bytes")->text = std::to_string(1 + life / 1024);
  return said;
}

// Creates, readies on a device, launches, destroys; the answer that ended it.
Answer Life(const Fake& fake, const Said& said) {
  Site site(fake, said, true);
  Require(site.created() == kOk, "a whole call is created");
  const Answer ready = site.Initialize(1, said.view());
  return ready.ok() ? site.Execute(1) : ready;
}

// The driver's functions are found by the first life: so many calls fail before one of them succeeds.
void Failures(const Fake& fake, const std::vector<Said>& seeds) {
  int life = 0, num_failures = 0;
  for (const Said& said : seeds) {
    for (const bool has_names : {true, false}) {
      fake.fail("cuGetErrorName", has_names ? 0 : kFailure);
      for (int skipped = 0;; ++skipped) {
        const size_t num_libraries = fake.libraries();
        fake.fail_nth(skipped, kFailure);
        const Said own = OwnKernel(said, ++life);
        const Answer failed = Life(fake, own);
        const bool came = fake.fail_nth(-1, 0);
        Require(came == !failed.ok(), std::string("a failed call of the driver is an error: ") + failed.text);
        if (!came) break;
        ++num_failures;
        const char* const name = has_names ? "CUDA_ERROR_FAKE" : "CUDA error 700";
        Require(std::strstr(failed.text, name), std::string("the driver's name of the error, got: ") + failed.text);
        const Answer later = Life(fake, own);
        Require(later.ok(), std::string("later calls work, got: ") + later.text);
        Require(fake.libraries() == num_libraries + 1, "a library for each kernel");
      }
    }
  }
  std::printf("%d calls of the CUDA driver failed in turn\n", num_failures);
  Require(num_failures > 500, "every call of the driver");
}

// The functions of the driver itself are looked for until they are there.
void FailuresOfLoading(const Fake& fake, const Said& said) {
  int num_failures = 0;
  for (int skipped = 0; skipped < 12; ++skipped) {  // cuDriverGetVersion and eleven symbols
    fake.fail_nth(skipped, kFailure);
    const Answer failed = Life(fake, said);
    Require(fake.fail_nth(-1, 0) && failed.code == kFailedPrecondition, "a driver that does not load is an error");
    Require(std::strstr(failed.text, skipped ? "requires a cu" : "CUDA_ERROR_FAKE"), failed.text);
    ++num_failures;
  }
  const Answer later = Life(fake, said);
  Require(later.ok(), std::string("later calls work, got: ") + later.text);
  std::printf("%d calls failed while the driver was loaded\n", num_failures);
}

size_t AllocatedBytes() { return mallinfo2().uordblks; }

void Lives(const Fake& fake, const std::vector<Said>& seeds, int count) {
  size_t allocated = 0;
  for (int life = 0; life <= count; ++life) {
    const Said& said = seeds[static_cast<size_t>(life) % seeds.size()];
    const Answer done = Life(fake, said);
    Require(done.ok(), done.text);
    if (life % 100 == 0) {
      int64_t own[8], total[8];
      jbw_timing_start(8);
      jbw_timing_read(own, total, 8);
    }
    if (life % (count / 10)) continue;
    std::printf("%8d lives: %8zu bytes allocated, %zu libraries\n", life, AllocatedBytes(), fake.libraries());
    if (life == count / 10) allocated = AllocatedBytes();
    if (life > count / 10) {
      Require(AllocatedBytes() <= allocated + 256, "memory is flat");
      Require(fake.libraries() < seeds.size(), "a library for each kernel, not for each life");
    }
  }
}

void Timing(const Fake& fake, const std::vector<Said>& seeds, size_t num_threads, int num_starts) {
  Site site(fake, seeds[0], true);
  Require(site.Initialize(0, seeds[0].view()).ok(), "a whole call is ready");
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (size_t i = 0; i < num_threads; ++i) {
    threads.emplace_back([&] {
      while (!is_over) Require(site.Execute(0).ok(), "a whole call is launched");
    });
  }
  size_t num_records = 0;
  for (int i = 0; i < num_starts; ++i) {
    int64_t own[64], total[64];
    jbw_timing_start(64);
    const uint64_t until = jbw_execute_count() + static_cast<uint64_t>(i % 100);
    while (jbw_execute_count() < until) std::this_thread::yield();
    const size_t count = jbw_timing_read(own, total, 64);
    Require(count <= 64, "at most as many records as were asked for");
    for (size_t j = 0; j < count; ++j) Require(own[j] >= 0 && own[j] <= total[j], "times of one launch");
    num_records += count;
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
  std::printf("%zu times of launches in %d recordings\n", num_records, num_starts);
  Require(num_records > 0, "times");
}

}  // namespace

int main(int argc, char** argv) {
  Require(argc >= 3, "driver SEEDS random|failures|lives|timing ...");
  const std::vector<Said> seeds = ReadSeeds(argv[1]);
  SetDirectory(argv[1]);
  const Fake fake;
  const std::string mode = argv[2];
  auto number = [&](int at) { return at < argc ? std::atoi(argv[at]) : 1; };
  if (mode == "random") {
    Random(fake, seeds, static_cast<uint64_t>(number(3)), static_cast<size_t>(number(4)),
           static_cast<size_t>(number(5)));
  } else if (mode == "failures") {
    FailuresOfLoading(fake, seeds[0]);
    Failures(fake, seeds);
  } else if (mode == "lives") {
    Lives(fake, seeds, number(3));
  } else if (mode == "timing") {
    Timing(fake, seeds, static_cast<size_t>(number(3)), number(4));
  } else {
    Fail("an unknown mode");
  }
  return 0;
}

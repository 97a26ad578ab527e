#include "stats.h"

#include <algorithm>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace jbw {

std::atomic<uint64_t> g_execute_count{0};
std::atomic<uint64_t> g_recording{0};

namespace {

// The records of the last recording. An Execute that began under an older one is not recorded.
struct Records {
  std::mutex mutex;
  uint64_t recording = 0;
  size_t capacity = 0;
  std::vector<std::pair<int64_t, int64_t>> times;  // own, total in ns
};

Records& Kept() {
  static Records* const records = new Records;  // never destroyed: threads may launch until the process ends
  return *records;
}

int64_t Nanoseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

}  // namespace

uint64_t ExecuteCount() { return g_execute_count.load(std::memory_order_relaxed); }

void StartTiming(size_t capacity) {
  Records& kept = Kept();
  std::lock_guard<std::mutex> lock(kept.mutex);
  kept.times = {};
  kept.capacity = capacity;
  g_recording.store(++kept.recording, std::memory_order_relaxed);
}

size_t ReadTiming(int64_t* own_ns, int64_t* total_ns, size_t capacity) {
  Records& kept = Kept();
  std::lock_guard<std::mutex> lock(kept.mutex);
  g_recording.store(0, std::memory_order_relaxed);
  for (size_t i = 0; i < std::min(capacity, kept.times.size()); ++i) {
    std::tie(own_ns[i], total_ns[i]) = kept.times[i];
  }
  return kept.times.size();
}

void ExecuteTimer::Record() const {
  const Clock::time_point end = Clock::now();
  Records& kept = Kept();
  std::lock_guard<std::mutex> lock(kept.mutex);
  if (recording_ != kept.recording || kept.times.size() >= kept.capacity) return;
  kept.times.emplace_back(Nanoseconds(before_launch_ - start_), Nanoseconds(end - start_));
}

}  // namespace jbw

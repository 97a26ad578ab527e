// What tests and benchmarks ask about Execute: how often it ran, and how long it took, ours and the driver's part.
#ifndef JAX_BWGEMM_STATS_H_
#define JAX_BWGEMM_STATS_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace jbw {

extern std::atomic<uint64_t> g_execute_count;
extern std::atomic<uint64_t> g_recording;  // which one runs; 0: timing is off

uint64_t ExecuteCount();

void StartTiming(size_t capacity);

// Stops timing and copies the first `capacity` records, in ns. Returns how many there are.
size_t ReadTiming(int64_t* own_ns, int64_t* total_ns, size_t capacity);

// Counts one Execute and, if timing is on, records it. Off, it costs an increment and a load.
class ExecuteTimer {
 public:
  ExecuteTimer() : recording_(g_recording.load(std::memory_order_relaxed)) {
    g_execute_count.fetch_add(1, std::memory_order_relaxed);
    if (recording_) start_ = Clock::now();
  }
  void BeforeLaunch() {
    if (recording_) before_launch_ = Clock::now();
  }
  void AfterLaunch() {
    if (recording_) Record();
  }

 private:
  using Clock = std::chrono::steady_clock;

  void Record() const;

  const uint64_t recording_;
  Clock::time_point start_, before_launch_;
};

}  // namespace jbw

#endif  // JAX_BWGEMM_STATS_H_

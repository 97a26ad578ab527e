#include "stats.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace jbw {

std::atomic<uint64_t> g_execute_count{0};
std::atomic<TimeRecorder*> g_time_recorder{nullptr};

class TimeRecorder {
 public:
  using Record = std::pair<int64_t, int64_t>;

  explicit TimeRecorder(size_t capacity) : capacity_(capacity) {}

  void Add(int64_t own_ns, int64_t total_ns) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (records_.size() < capacity_) records_.emplace_back(own_ns, total_ns);
  }
  std::vector<Record> records() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return records_;
  }

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;
  std::vector<Record> records_;
};

namespace {

std::mutex g_mutex;

// Recorders are kept for the process's life: an Execute on another thread may still hold an old one.
std::vector<std::unique_ptr<TimeRecorder>>& Recorders() {
  static auto* const recorders = new std::vector<std::unique_ptr<TimeRecorder>>;
  return *recorders;
}

int64_t Nanoseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

}  // namespace

uint64_t ExecuteCount() { return g_execute_count.load(std::memory_order_relaxed); }

void StartTiming(size_t capacity) {
  std::lock_guard<std::mutex> lock(g_mutex);
  Recorders().push_back(std::make_unique<TimeRecorder>(capacity));
  g_time_recorder.store(Recorders().back().get(), std::memory_order_release);
}

size_t ReadTiming(int64_t* own_ns, int64_t* total_ns, size_t capacity) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_time_recorder.store(nullptr);
  if (Recorders().empty()) return 0;
  const std::vector<TimeRecorder::Record> records = Recorders().back()->records();
  for (size_t i = 0; i < std::min(capacity, records.size()); ++i) {
    std::tie(own_ns[i], total_ns[i]) = records[i];
  }
  return records.size();
}

void ExecuteTimer::Record() const {
  const Clock::time_point end = Clock::now();
  recorder_->Add(Nanoseconds(before_launch_ - start_), Nanoseconds(end - start_));
}

}  // namespace jbw

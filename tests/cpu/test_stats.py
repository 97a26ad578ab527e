"""The recorder of times, as threads that launch and one that reads it see it; and what a failed look-up leaves."""

from __future__ import annotations

import pathlib
import resource
import subprocess
import sys

import fake_machine
import ffi_cases
import pytest
from fake_machine import COMPILER, FAILED_PRECONDITION, Machine

pytestmark = fake_machine.needs
ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = r"""
#include <thread>
#include <vector>
#include "stats.h"

int main() {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int j = 0; j < 2000; ++j) {
        jbw::ExecuteTimer timer;
        timer.BeforeLaunch();
        timer.AfterLaunch();
      }
    });
  }
  int64_t own[64], total[64];
  for (int i = 0; i < 200; ++i) {
    jbw::StartTiming(64);
    const size_t count = jbw::ReadTiming(own, total, 64);
    for (size_t j = 0; j < count; ++j) {
      if (own[j] < 0 || total[j] < own[j]) return 1;
    }
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}
"""


def test_threads_launch_while_times_are_read(tmp_path: pathlib.Path) -> None:
    """Under the thread sanitizer, where the compiler has one."""
    (tmp_path / "main.cc").write_text(PROGRAM)
    sanitizer = [COMPILER, "-std=c++17", "-g", "-fsanitize=thread", "-pthread"]
    sources = [ROOT / "ffi" / "stats.cc", tmp_path / "main.cc"]
    program = tmp_path / "program"
    made = subprocess.run([*sanitizer, f"-I{ROOT / 'ffi'}", "-o", program, *sources], capture_output=True, text=True)
    if made.returncode and "tsan" in made.stderr:
        pytest.skip("needs the thread sanitizer")
    assert made.returncode == 0, made.stderr
    done = subprocess.run([program], capture_output=True, text=True)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert (done.returncode, done.stderr) == (0, "")


def test_no_number_of_records_ends_the_process() -> None:
    code = "from jax_bwgemm.runtime import ffi; ffi.timing_start(1 << 60); print(ffi.timing_read(3))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_failed_look_up_leaves_nothing(machine: Machine) -> None:
    call, number, size = ffi_cases.request(), 20_000, 4000
    code, _, _ = machine.create(call, variant="x" * size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(number):
        assert machine.create(call, variant=f"{i:x>{size}}")[0] == code == FAILED_PRECONDITION
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < number * size // 1024 // 4

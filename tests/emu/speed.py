"""How fast the emulator is, all checks on, for a pair kernel and the product sizes that its goals name.

OPENBLAS_NUM_THREADS=1 python -m tests.emu.speed [512x512x256 2048x2048x2048]
"""

from __future__ import annotations

import resource
import sys
import time

from jax_bwgemm.emulator import Schedule
from tests.cases import Case, check
from tests.emu.matmul import run_matmul
from tests.emu.mutant import KERNELS
from tests.emu.shipped import facts, module

SHAPES = ("512x512x256", "2048x2048x2048")


def measure(shape: str) -> str:
    """One line: wall time without parsing, rate, peak memory of the process so far."""
    variant = KERNELS["pair"]
    case = Case(*map(int, shape.split("x")))
    a, b, bias = case.inputs()
    kernel = module(variant.name)
    start = time.perf_counter()
    out, counters = run_matmul(kernel, facts(variant), a, b, schedule=Schedule())
    seconds = time.perf_counter() - start
    check(out, case.reference(a, b, bias), case.out_dtype)
    rate = counters.instructions / seconds / 1000
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{shape}: {seconds:.2f} s, {rate:.0f} thousand warp instructions a second, {peak_mb:.0f} MB"


if __name__ == "__main__":
    for shape in sys.argv[1:] or SHAPES:
        print(measure(shape), flush=True)

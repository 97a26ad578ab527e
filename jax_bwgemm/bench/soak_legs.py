"""What a process of `bench --soak` does: `python -m jax_bwgemm.bench.soak_legs NAME JSON`. A leg prints what it sees
while it runs, and last a line of JSON that starts with RESULT. Without a GPU it runs, too, on what XLA computes there.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_bwgemm
from jax_bwgemm.bench import accuracy
from jax_bwgemm.bench.cases import EPILOGUES, FORMS, Case
from jax_bwgemm.bench.products import ours, plain
from jax_bwgemm.facts.problem import FP8_DTYPES
from jax_bwgemm.runtime import ffi

RESULT = "soak: "
Options = dict[str, str | bool]  # of XLA's compiler
NO_COMMAND_BUFFERS: Options = {"xla_gpu_enable_command_buffer": ""}
NO_AUTOTUNING: Options = {"xla_gpu_autotune_level": "0"}  # of what XLA computes: minutes of a thousand products
DTYPES = [
    ("bfloat16", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"),
    ("float32", "float32"), ("float8_e4m3fn", "bfloat16"),
]  # fmt: skip
# Of the relative error in the Frobenius norm: half a unit in the last place of the result, or what its sums lose.
BOUNDS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-14}
TF32_BOUND, FP8_BOUND = 2.0**-10, 2.0**-7
MAX_SAID = 20  # wrong products and errors that are kept


@dataclasses.dataclass(frozen=True)
class Load:
    """`peer`: "ours" or "xla". `rounds` of `seconds` each, by `threads`; sizes up to `largest`. Of `products`, the
    `first` one's number."""

    peer: str = "ours"
    rounds: int = 10
    seconds: float = 10.0
    threads: int = 8
    largest: int = 2048
    products: int = 0
    first: int = 0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Round:
    """What was there when nothing ran and all caches were dropped. `kernels`: different ones that programs had so far.
    Bytes; of the device the most used one."""

    seconds: float
    programs: int
    executions: int
    kernels: int
    host_bytes: int
    device_bytes: int
    device_peak_bytes: int


@dataclasses.dataclass
class Tally:
    """Of all threads."""

    programs: int = 0
    executions: int = 0
    said: list[str] = dataclasses.field(default_factory=list)
    num_wrong: int = 0
    num_errors: int = 0
    worst: float = 0.0  # error in parts of its bound
    kinds: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # of dtypes: how many, wrong, the worst
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def count(self, programs: int, executions: int, share: float, what: str, kind: str = "repeated") -> None:
        with self.lock:
            own = self.kinds.setdefault(kind, [0, 0, 0.0])
            own[:] = own[0] + programs, own[1] + (not share <= 1.0), max(own[2], share)
            self.programs += programs
            self.executions += executions
            self.worst = max(self.worst, share)
            if not share <= 1.0:  # NaN, too
                self.num_wrong += 1
                self._say(f"{what}: {share:.3g} times its bound")

    def fail(self, what: str, error: Exception) -> None:
        with self.lock:
            self.num_errors += 1
            self._say(f"{what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _say(self, text: str) -> None:
        if len(self.said) < MAX_SAID:
            self.said.append(text)
            print(text, flush=True)  # a run that is ended before its time has said it


def random_case(rng: random.Random, largest: int) -> Case:
    """Of any dtype, form and epilogue that ships, with sizes up to `largest`, half of them multiples of 8."""
    dtype, out_dtype = rng.choice(DTYPES)
    step = rng.choice((1, 8))
    m, n, k = (min(largest, -(-round(2 ** rng.uniform(0, largest.bit_length() - 1)) // step) * step) for _ in range(3))
    epilogue = rng.choice(
        [e for e in EPILOGUES if set(e.split("+")) <= {"", "bias", "relu", "gelu", "silu", "residual"}]
    )
    batch = rng.choice((1, 1, 1, 3))
    return Case(m, n, max(k, 8), batch, rng.choice(FORMS), dtype, out_dtype, epilogue if batch == 1 else "")


def bound(case: Case, peer: str) -> float:
    """XLA's product rounds after each step of an epilogue."""
    products = {"float32": TF32_BOUND, **dict.fromkeys(FP8_DTYPES, FP8_BOUND)}
    return max(BOUNDS[case.out_dtype] * (1 if peer == "ours" else 1 + len(case.steps)), products.get(case.dtype, 0.0))


def operands(case: Case, seed: int) -> dict[str, np.ndarray]:
    """Standard normal, a's scaled so that the result is, too: where an activation bends."""
    rng = np.random.default_rng(seed)
    made = {name: rng.standard_normal(shape, np.float32) for name, (shape, _) in case.operands.items()}
    made["a"] /= np.sqrt(case.k)
    return {name: x.astype(jnp.dtype(case.operands[name][1])) for name, x in made.items()}


def function(case: Case, peer: str) -> Callable[..., Any]:
    return ours(case, "ignore") if peer == "ours" else plain(case)


def share(case: Case, peer: str, given: dict[str, np.ndarray], out: Any) -> float:
    """The error in parts of its bound. That is of the result's norm or, where few elements happen to be small, of the
    sums' own, about 1 each: what sums and an activation lose is relative to those."""
    sample = accuracy.sample(case, given)
    scale = max(float(np.linalg.norm(sample.expected)), sample.expected.size**0.5)
    return float(sample.distance(np.asarray(out)) / scale / bound(case, peer))


def once(load: Load, tally: Tally, seed: int, device: Any, options: Options, repeats: int = 3) -> None:
    """Compiles a product that nobody has had before, runs it some times, compares the last one with float64."""
    rng = random.Random(f"{load.seed} {seed}")
    case = random_case(rng, load.largest)
    try:
        given = operands(case, seed)
        placed = {name: jax.device_put(x, device) for name, x in given.items()}
        call = function(case, load.peer)
        program = jax.jit(lambda *x: call(**dict(zip(placed, x, strict=True))))
        compiled = program.lower(*placed.values()).compile(compiler_options=options)
        for _ in range(repeats):
            out = compiled(*placed.values())
        what, kind = f"{case} seed {seed} on {device} {options}", f"{case.dtype} {case.out_dtype} {case.form}"
        tally.count(1, repeats, share(case, load.peer, given, out), what, kind)
    except Exception as error:  # a thread that ends would count as one that found nothing
        tally.fail(f"{case} seed {seed} on {device} {options}", error)


def option_sets() -> list[Options]:
    """Of XLA: command buffers, as it has them, and none."""
    return [{}, NO_COMMAND_BUFFERS] if jax.default_backend() == "gpu" else [{}]


def churn(load: Load) -> dict[str, Any]:
    """`threads` compile and run products of changing shapes on all devices, with command buffers and without; one more
    repeats a fixed set, whose bits must stay."""
    tally, devices, options = Tally(), jax.devices(), option_sets()
    print(f"{load.peer}: {load.threads} threads, {len(devices)} devices ({jax.default_backend()})", flush=True)
    print(f"{'s':>7} {'programs':>9} {'executions':>11} {'host MB':>9} {'device MB':>10} {'peak MB':>9}", flush=True)
    start, found = time.monotonic(), list[Round]()
    for index in range(load.rounds):
        until = time.monotonic() + load.seconds

        def work(thread: int, until: float = until, index: int = index) -> None:
            count = 0
            while count == 0 or time.monotonic() < until:
                seed = (index * load.threads + thread) * 1_000_000 + count
                once(load, tally, seed, devices[(thread + count) % len(devices)], options[count % len(options)])
                count += 1

        with ThreadPoolExecutor(load.threads + 1) as pool:
            running = [pool.submit(work, thread) for thread in range(load.threads)]
            running.append(pool.submit(_repeat, load, tally, until))
            for thread in running:
                thread.result()
        found.append(_quiet(time.monotonic() - start, tally))
        r = found[-1]
        sizes = (r.host_bytes, r.device_bytes, r.device_peak_bytes)
        print(f"{r.seconds:7.0f} {r.programs:9d} {r.executions:11d}", *(f"{x / 1e6:9.1f}" for x in sizes), flush=True)
    return {"load": dataclasses.asdict(load), "rounds": [dataclasses.asdict(x) for x in found]} | _outcome(tally)


def _repeat(load: Load, tally: Tally, until: float) -> None:
    """Products whose first results are right, and whose later ones have the same bits."""
    fixed = [Case(256, 512, 384), Case(64, 1024, 1024, epilogue="bias+relu"), Case(500, 70, 130, form="nt")]
    programs = []
    try:
        for i, case in enumerate(fixed):
            given = operands(case, i)
            program = jax.jit(functools.partial(function(case, load.peer)))
            placed = {name: jnp.asarray(x) for name, x in given.items()}
            first = np.asarray(program(**placed))
            tally.count(1, 1, share(case, load.peer, given, first), f"{case}, repeated")
            programs.append((case, program, placed, first.tobytes()))
        while time.monotonic() < until:
            for case, program, placed, want in programs:
                same = np.asarray(program(**placed)).tobytes() == want
                tally.count(0, 1, 0.0 if same else float("inf"), f"{case}, repeated: other bits")
    except Exception as error:
        tally.fail("repeated products", error)


def products(load: Load) -> dict[str, Any]:
    """So many random products against float64, by all threads and devices."""
    tally, devices = Tally(), jax.devices()
    options = [x | (NO_AUTOTUNING if jax.default_backend() == "gpu" else {}) for x in option_sets()]
    kernels = ffi.execute_count() if ffi.status() is None else 0

    def work(seed: int) -> None:
        once(load, tally, seed, devices[seed % len(devices)], options[seed % len(options)], repeats=1)
        if seed and seed % 1000 == 0:
            print(f"{seed} products, {tally.num_wrong} wrong, {tally.num_errors} errors", flush=True)

    with ThreadPoolExecutor(load.threads) as pool:
        list(pool.map(work, range(load.first, load.first + load.products)))
    kernels = (ffi.execute_count() if ffi.status() is None else 0) - kernels
    return {"load": dataclasses.asdict(load), "launches": kernels} | _outcome(tally)


def faults(load: Load) -> dict[str, Any]:
    """Too much memory, and a kernel that the driver refuses: exceptions of JAX's, behind which products are right."""
    tally, said = Tally(), {}
    once(load, tally, 0, jax.devices()[0], {})
    for name, fault in (("out of memory", _out_of_memory), ("a kernel that the driver refuses", _refused_kernel)):
        if (call := fault()) is None:
            said[name] = "not on this machine"
            continue
        try:
            jax.block_until_ready(call())
            said[name] = "nothing was raised"
            tally.fail(name, AssertionError("nothing was raised"))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {str(error)[:500]}"
        once(load, tally, len(said), jax.devices()[0], {})
    return {"load": dataclasses.asdict(load), "exceptions": said} | _outcome(tally)


def _out_of_memory() -> Callable[[], Any]:
    """A result of 2^44 bytes."""
    a, b = jnp.ones((2**22, 8), jnp.bfloat16), jnp.ones((8, 2**21), jnp.bfloat16)
    return lambda: jax.jit(functools.partial(jax_bwgemm.matmul, on_fallback="ignore"))(a, b)


def _refused_kernel() -> Callable[[], Any] | None:
    """With more threads than it was compiled for, and more shared memory than there is."""
    from jax_bwgemm.facts.arch import Arch
    from jax_bwgemm.facts.problem import Problem
    from jax_bwgemm.runtime import artifacts
    from jax_bwgemm.runtime.decision import kernels, target_arch
    from jax_bwgemm.runtime.launch import request

    arch = target_arch(None)
    if not isinstance(arch, Arch):
        return None
    problem = Problem(256, 256, 256)
    made = next(made for made in kernels(problem, arch)[1] if made.plan and not made.plan.swapped)
    assert made.plan is not None and made.entry is not None
    ffi.register(artifacts.launch_dirs())
    asked = request(made.plan, made.entry)
    attributes = ffi.as_hlo(dict(asked.attributes) | {"num_threads": 1024, "smem_bytes": 1 << 20})
    results = [jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in asked.results]
    one = jnp.ones((1, 256, 256), jnp.bfloat16)
    return lambda: jax.jit(lambda a, b: jax.ffi.ffi_call(ffi.TARGET_NAME, results)(a, b, **attributes))(one, one)


def _outcome(tally: Tally) -> dict[str, Any]:
    return {
        "programs": tally.programs,
        "executions": tally.executions,
        "wrong": tally.num_wrong,
        "errors": tally.num_errors,
        "worst_share_of_bound": tally.worst,
        "kinds": tally.kinds,
        "said": tally.said,
    }


def _quiet(seconds: float, tally: Tally) -> Round:
    """Every cache dropped, and what malloc keeps given back: what is left is held by somebody."""
    jax.clear_caches()
    jax_bwgemm.runtime.attempts.forget()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    stats = [device.memory_stats() or {} for device in jax.devices()]
    used, peak = (max(int(s.get(name, 0)) for s in stats) for name in ("bytes_in_use", "peak_bytes_in_use"))
    kernels = len(jax_bwgemm.stats().kernels)
    return Round(seconds, tally.programs, tally.executions, kernels, host_bytes(), used, peak)


def host_bytes() -> int:
    """Resident memory of this process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


LEGS = {"churn": churn, "products": products, "faults": faults}


def main() -> int:
    name, text = sys.argv[1:]
    print(RESULT + json.dumps(LEGS[name](Load(**json.loads(text)))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

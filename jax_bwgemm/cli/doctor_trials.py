"""Products on this machine's GPU, for `doctor`: `python -m jax_bwgemm.cli.doctor_trials` prints a finding a line.

Operands of -1, 0 and 1 make sums that every result's dtype holds exactly: a kernel is right, or it is not.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jax_bwgemm
from jax_bwgemm.cli.doctor_checks import Finding
from jax_bwgemm.runtime import ffi

SIZES = (256, 384, 256)  # m, n, k: no sum is beyond 256
RESULTS = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "float8_e4m3fn": "bfloat16",
    "float8_e5m2": "bfloat16",
    "int8": "int32",
    "uint8": "int32",
}  # of operands


def products(emulate: str | None = None) -> Iterator[Finding]:
    """A finding a dtype of operands, on the first GPU or in the emulator of a target."""
    for dtype, out_dtype in RESULTS.items():
        try:
            yield _product(dtype, out_dtype, emulate)
        except Exception as error:  # whatever it is, the next dtype has its turn
            yield Finding(f"product {dtype}", "problem", f"{type(error).__name__}: {_first_line(error)}")


def _product(dtype: str, out_dtype: str, emulate: str | None) -> Finding:
    m, n, k = SIZES
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0 if dtype == "uint8" else -1, 2, shape) for shape in ((m, k), (k, n)))
    operands = [jnp.asarray(x.astype(dtype)) for x in (a, b)]
    explained = jax_bwgemm.explain(*operands, out_dtype=out_dtype, emulate=emulate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jax_bwgemm.FallbackWarning)  # it is said here
        got = jax_bwgemm.matmul(*operands, out_dtype=out_dtype, emulate=emulate)
    what = f"product {dtype}"
    if wrong := int(np.count_nonzero(np.asarray(got).astype(np.int64) != a @ b)):
        text = f"{m}x{n}x{k} requires the exact sums, got {wrong} others of {m * n}, by {explained.variant or 'XLA'}"
        return Finding(
            what, "problem", text, "report it, and set JAX_BWGEMM_ARTIFACTS to an empty directory until then"
        )
    if explained.variant is None:
        return Finding(what, "warning", f"right, but XLA's, because {explained.reason}")
    return Finding(what, "ok", f"right, by {explained.variant}")


def capture() -> Finding:
    """Whether XLA replays a kernel from a command buffer (a CUDA graph), which runs no handler. It need not."""
    x = jnp.ones((512, 512), jnp.bfloat16)
    f = jax.jit(jax_bwgemm.matmul, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    counts, are_right = [], True
    for _ in range(4):  # eager, traced, then replayed
        before = ffi.execute_count()
        out = jax.block_until_ready(f(x, x))
        counts.append(ffi.execute_count() - before)
        are_right &= bool((out == 512).all())
        del out  # the same address again: a buffer that moved is traced anew
    if not are_right:
        return Finding("command buffer", "problem", "a product that is captured requires 512 everywhere, got others")
    if counts[-1] == 0:
        return Finding("command buffer", "ok", f"captured; handlers run in turn: {counts}")
    remedy = "see --xla_gpu_enable_command_buffer in XLA_FLAGS"
    return Finding("command buffer", "warning", f"not captured; handlers run in turn: {counts}", remedy)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def main() -> int:
    """Prints what there is to say as soon as it is known."""
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        remedy = "pip install 'jax[cuda13]', or 'jax[cuda12]' for a driver older than CUDA 13"
        _print(Finding("jax on the GPU", "problem", f"JAX requires a CUDA backend, got {_first_line(error)}", remedy))
        return 0
    for finding in products():
        _print(finding)
    _print(capture())
    return 0


def _print(finding: Finding) -> None:
    print(json.dumps(dataclasses.asdict(finding)), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

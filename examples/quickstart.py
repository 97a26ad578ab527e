"""What runs where, and that it is right: `python examples/quickstart.py`, on any machine.

Prints which kernel an H200 and a B200 would run and why, multiplies on the device at hand (without a Hopper or
Blackwell GPU XLA does, and says so), and compares the product and a gradient with `jnp.dot` and with float64. On a CPU
it also executes two Blackwell kernels in the PTX emulator, one of single CTAs and one of CTA pairs.
"""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_bwgemm
from jax_bwgemm.runtime import emulated

M, N, K = 512, 768, 1024
EMULATED = (512, 512, 256)
TILES = {"1-CTA": "128x256x64_cta1_cluster1x1", "2-CTA": "256x256x64_cta2_cluster2x1"}


def relative_error(got: jax.Array, want: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def random_operands(m: int, n: int, k: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)


def emulate_blackwell() -> None:
    """Both tiles cover 256 columns; a pair shares them, so that each of its CTAs loads half of B."""
    x, w = random_operands(*EMULATED)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    print(f"\nsm_100f kernels in the emulator, {'x'.join(map(str, EMULATED))}, every instruction checked:")
    print(f"  jnp.dot  {'':29} relative error {relative_error(jnp.dot(x, w), want):.2e}")
    b_bytes = {}
    for name, tile in TILES.items():
        matmul = functools.partial(jax_bwgemm.matmul, tile=tile, emulate="sm_100f", on_fallback="error")
        start = time.perf_counter()
        with emulated.recorded() as runs:
            error = relative_error(jax.jit(matmul)(x, w), want)
        seconds, counters = time.perf_counter() - start, runs[0].counters
        loaded = {operand: counters.tma_load_bytes[operand, 0] for operand in "ab"}
        b_bytes[name] = loaded["b"]
        print(f"  {name}    {tile:29} relative error {error:.2e}, {seconds:.1f} s, {counters.mmas} MMAs; ", end="")
        print(f"CTA 0 loads {loaded['a'] // 1024} KiB of A and {loaded['b'] // 1024} KiB of B")
        if error > 2**-8:
            raise SystemExit("the product is wrong")
    if 2 * b_bytes["2-CTA"] != b_bytes["1-CTA"]:
        raise SystemExit("a CTA of a pair should load half of B")
    print("  a CTA of a pair loads half the bytes of B for a tile of as many columns")


def main() -> None:
    large = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    for device in ("h200", "b200"):
        print(jax_bwgemm.explain(large, large, device=device), end="\n\n")

    x, w = random_operands(M, N, K)
    jax_bwgemm.stats(reset=True)
    ours, jnps = jax.jit(jax_bwgemm.matmul)(x, w), jax.jit(jnp.dot)(x, w)
    kernel = next(iter(jax_bwgemm.stats().kernels), "XLA")
    print(f"{M}x{N}x{K} on {jax.devices()[0].device_kind}, by {kernel}; jax {jax.__version__}")
    x64, w64 = np.asarray(x, np.float64), np.asarray(w, np.float64)
    print(f"relative error against float64: ours {relative_error(ours, x64 @ w64):.2e}, ", end="")
    print(f"jnp.dot {relative_error(jnps, x64 @ w64):.2e}")

    ct = jnp.asarray(np.random.default_rng(1).standard_normal((M, N)), jnp.bfloat16)
    d_w = {f: jax.jit(lambda ct, f=f: jax.vjp(f, x, w)[1](ct)[1])(ct) for f in (jax_bwgemm.matmul, jnp.dot)}
    want = x64.T @ np.asarray(ct, np.float64)
    errors = [relative_error(grad, want) for grad in d_w.values()]
    print(f"the same of a gradient:         ours {errors[0]:.2e}, jnp.dot {errors[1]:.2e}")
    if max(relative_error(ours, x64 @ w64), errors[0]) > 2**-8:
        raise SystemExit("the product is wrong")
    if jax.default_backend() == "cpu":
        emulate_blackwell()


if __name__ == "__main__":
    main()

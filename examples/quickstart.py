"""What runs where, and that it is right: `python examples/quickstart.py`, on any machine.

Prints which kernel an H200 and a B200 would run and why, multiplies on the device at hand (without a Hopper or
Blackwell GPU XLA does, and says so), and compares the product and a gradient with `jnp.dot` and with float64.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jax_bwgemm

M, N, K = 512, 768, 1024


def relative_error(got: jax.Array, want: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def main() -> None:
    large = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    for device in ("h200", "b200"):
        print(jax_bwgemm.explain(large, large, device=device), end="\n\n")

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((M, K)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((K, N)), jnp.bfloat16)
    print(f"{M}x{N}x{K} on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    ours, jnps = jax.jit(jax_bwgemm.matmul)(x, w), jax.jit(jnp.dot)(x, w)
    x64, w64 = np.asarray(x, np.float64), np.asarray(w, np.float64)
    print(f"relative error against float64: ours {relative_error(ours, x64 @ w64):.2e}, ", end="")
    print(f"jnp.dot {relative_error(jnps, x64 @ w64):.2e}")

    ct = jnp.asarray(rng.standard_normal((M, N)), jnp.bfloat16)
    d_w = {f: jax.jit(lambda ct, f=f: jax.vjp(f, x, w)[1](ct)[1])(ct) for f in (jax_bwgemm.matmul, jnp.dot)}
    want = x64.T @ np.asarray(ct, np.float64)
    errors = [relative_error(grad, want) for grad in d_w.values()]
    print(f"the same of a gradient:         ours {errors[0]:.2e}, jnp.dot {errors[1]:.2e}")
    if max(relative_error(ours, x64 @ w64), errors[0]) > 2**-8:
        raise SystemExit("the product is wrong")


if __name__ == "__main__":
    main()

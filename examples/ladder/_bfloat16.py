"""bfloat16 by numpy alone, as its 16 bits: random matrices, and how far a product is off. Knows no kernel."""

from __future__ import annotations

import numpy as np

BOUND = 2.0**-9  # relative Frobenius error: half a unit in the last place of bfloat16
POISON = 0xFFFF  # a NaN


def rounded(values: np.ndarray) -> np.ndarray:
    """float32 to the nearest bfloat16, ties to even; finite values."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    """To float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def normal(rows: int, cols: int, seed: int) -> np.ndarray:
    """A random matrix, standard normal."""
    return rounded(np.random.default_rng(seed).standard_normal((rows, cols), np.float32))


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a (m, k) b (n, k)^T in float64; b is widened in parts."""
    a64, step = widened(a).astype(np.float64), 1024
    parts = [a64 @ widened(b[i : i + step]).astype(np.float64).T for i in range(0, len(b), step)]
    return np.concatenate(parts, axis=1)


def relative_error(c: np.ndarray, exact: np.ndarray) -> float:
    """In the Frobenius norm; NaN if any element is."""
    return float(np.linalg.norm(widened(c) - exact) / (np.linalg.norm(exact) or 1.0))

"""float32 arithmetic that NumPy rounds once, against the way that is computed in float64: the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jax_bwgemm.emulator import floats

FUNCTIONS = {"add": (np.add, 2), "sub": (np.subtract, 2), "mul": (np.multiply, 2), "div": (np.divide, 2)}
FUNCTIONS["fma"] = floats._fma, 3
SPECIAL = (
    0,
    1 << 31,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    1,
    0x807FFFFF,
    0x3F800000,
    0x3F800001,
    0x33800000,
    0x34000000,
)


def words(rng: np.random.Generator) -> np.ndarray:
    """Any bits; infinities, NaN, zeros, subnormals and halves of last places; numbers of like size."""
    near = (rng.standard_normal(32) * 2.0 ** rng.integers(-30, 30, 32)).astype(np.float32).view(np.uint32)
    either = [rng.integers(0, 1 << 32, 32, dtype=np.uint32), rng.choice(np.array(SPECIAL, np.uint32), 32), near]
    return np.choose(rng.integers(0, 3, 32), either)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_bits(name: str) -> None:
    """Of vectors, of scalars and of both; and of pairs of floats in 64 bits."""
    (fn, count), rng = FUNCTIONS[name], np.random.default_rng(len(name))
    with np.errstate(all="ignore"):
        for turn in range(600):
            args: list[Any] = [words(rng) for _ in range(count)]
            args[0] = int(args[0][0]) if turn % 3 == 1 else args[0]
            args = [x if isinstance(x, int) else int(x[0]) for x in args] if turn % 5 == 1 else args
            assert np.array_equal(floats.apply(fn, "f32", 32, *args), floats.apply_once(fn, 32, *args)), args
            pairs = [rng.integers(0, 1 << 63, 32, dtype=np.uint64) for _ in range(count)]
            assert np.array_equal(floats.apply(fn, "f32", 64, *pairs), floats.apply_once(fn, 64, *pairs)), pairs


def test_a_half_of_the_last_place_that_is_not_quite_one() -> None:
    """1 + 2^-24 + 2^-100 lies beyond the middle between two float32s, which a float64 cannot tell."""
    bits = [int(np.float32(x).view(np.uint32)) for x in (2.0**-50, 2.0**-50, 1.0 + 2.0**-23)]
    x = int(np.float32(2.0**-12 * (1 + 2.0**-23)).view(np.uint32)), int(np.float32(2.0**-12).view(np.uint32))
    for args in (bits, [*x, int(np.float32(1.0).view(np.uint32))]):
        assert floats.apply_once(floats._fma, 32, *args) == floats.apply(floats._fma, "f32", 32, *args)
    assert floats.apply_once(floats._fma, 32, *x, int(np.float32(1.0).view(np.uint32))) == 0x3F800001

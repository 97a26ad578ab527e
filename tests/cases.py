"""The problems that tests on every kind of machine share: sizes around tiles, majors, dtypes, batches, epilogues.

Inputs are random, references are float64, and `check` states the bound per output dtype.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np

from jax_bwgemm.facts.epilogue import ACTIVATIONS as NAMES
from jax_bwgemm.facts.epilogue import Epilogue, Node, chain, steps
from jax_bwgemm.facts.variant import Variant

MAJORS = tuple(itertools.product("km", "nk"))
DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
    "uint8": np.uint8,
    "int32": np.int32,
}
GELU = 2 * math.sqrt(2 / math.pi)
GATES = ("gelu", "silu")  # x * sigmoid(...)
# Not 1 / (1 + exp(-x)), which overflows.
ACTIVATIONS: dict[str | None, Callable[[np.ndarray], np.ndarray]] = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": lambda x: x * (1 + np.tanh(GELU / 2 * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x * (1 + np.tanh(x / 2)) / 2,
    "sigmoid": lambda x: (1 + np.tanh(x / 2)) / 2,
    "tanh": np.tanh,
    "gelu_exact": lambda x: x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))) / 2,
    "squared_relu": lambda x: np.maximum(x, 0.0) ** 2,
    "leaky_relu": lambda x: np.maximum(x, 0.01 * x),
}
SHIPPED_ACTIVATIONS = (None, "relu", *GATES)
# Relative Frobenius error: half a unit in the last place of the result; float32 sums of a tensor core truncate.
BOUNDS = {
    "bfloat16": 2.0**-9,
    "float16": 2.0**-12,
    "float32": 2.0**-14,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "int32": 0.0,
}
TF32_BOUND = 2.0**-11  # half a unit in the last place of a TF32 operand


@dataclasses.dataclass(frozen=True)
class Case:
    """One product in the primitive's terms; `a_batch` and `b_batch` are `batch` or 1 (shared)."""

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    a_major: str = "k"
    b_major: str = "n"
    a_batch: int = 1
    b_batch: int = 1
    alpha: float = 1.0
    has_bias: bool = False
    activation: str | None = None
    b_dtype: str | None = None  # None: `dtype`
    c_major: str = "n"
    has_residual: bool = False

    def __str__(self) -> str:
        batch = f"{self.a_batch}+{self.b_batch}x" if self.batch > 1 else ""
        steps = "-".join(
            name
            for name, on in (
                ("scale", self.alpha != 1),
                ("bias", self.has_bias),
                (self.activation, self.activation),
                ("residual", self.has_residual),
            )
            if on
        )
        dtypes = f"{self.dtype}-{self.b_dtype}-{self.out_dtype}" if self.b_dtype else f"{self.dtype}-{self.out_dtype}"
        majors = self.a_major + self.b_major + ("m" if self.c_major == "m" else "")
        return f"{batch}{self.m}x{self.n}x{self.k}-{majors}-{dtypes}" + (steps and f"-{steps}")

    def inputs(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """a, b and bias as stored: (la, m, k) or (la, k, m), (lb, k, n) or (lb, n, k), (n,) or of an m-major result
        (m,)."""
        rng = np.random.default_rng(seed)
        a_rows, b_cols = (self.m, self.k), (self.k, self.n)
        a = _random(rng, (self.a_batch, *(a_rows if self.a_major == "k" else a_rows[::-1])), self.dtype)
        b_shape = (self.b_batch, *(b_cols if self.b_major == "n" else b_cols[::-1]))
        b = _random(rng, b_shape, self.b_dtype or self.dtype)
        extent = self.n if self.c_major == "n" else self.m
        return a, b, _random(rng, (extent,), self.out_dtype) if self.has_bias else None

    def residual(self, seed: int = 0) -> np.ndarray | None:
        """Stored as the result is; None without one."""
        rows_cols = (self.m, self.n) if self.c_major == "n" else (self.n, self.m)
        rng = np.random.default_rng([seed, 1])
        return _random(rng, (self.batch, *rows_cols), self.out_dtype) if self.has_residual else None

    def reference(
        self, a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, residual: np.ndarray | None = None
    ) -> np.ndarray:
        """(batch, m, n) in float64."""
        a, b = a.astype(np.float64), b.astype(np.float64)
        a = a if self.a_major == "k" else a.swapaxes(1, 2)
        b = b if self.b_major == "n" else b.swapaxes(1, 2)
        out = self.alpha * (a @ b)
        if bias is not None:
            out += bias.astype(np.float64)[None, :] if self.c_major == "n" else bias.astype(np.float64)[:, None]
        out = ACTIVATIONS[self.activation](out)
        if residual is None:
            return out
        residual = residual.astype(np.float64)
        return out + (residual if self.c_major == "n" else residual.swapaxes(1, 2))

    def slope(self, a: np.ndarray, b: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        """The activation's derivative, (batch, m, n) in float64; relu's at 0 is 0."""
        x = dataclasses.replace(self, activation=None).reference(a, b, bias)
        if self.activation == "relu":
            return (x > 0).astype(np.float64)
        step = 1e-30  # along the imaginary axis there is no cancellation
        return np.imag(ACTIVATIONS[self.activation](x + 1j * step)) / step

    @property
    def epilogue(self) -> Epilogue:
        found = chain(self.alpha, self.has_bias, self.activation, self.has_residual)
        return found if self.c_major == "n" else found.transposed

    @property
    def bound(self) -> float:
        """Of the relative error: the result's rounding, or its operands' to TF32."""
        return max(BOUNDS[self.out_dtype], TF32_BOUND if self.dtype == "float32" else 0.0)


def fused(kind: str, c_major: str = "n") -> Node:
    """The expression of "scale_bias_relu_residual", "identity" and the like, for a result of this major."""
    parts = kind.split("_")
    name = "_".join(part for part in parts if part not in ("scale", "bias", "residual", "identity")) or None
    found = chain(0.5 if "scale" in parts else 1.0, "bias" in parts, name, "residual" in parts)
    assert found.kind == kind
    return found.out if c_major == "n" else found.transposed.out


def has(variant: Variant, role: str) -> bool:
    """Whether its epilogue reads `role`."""
    return role in (*(x.role for x in variant.steps.operands), *dict(variant.steps.scalars))


def activation_of(variant: Variant) -> str | None:
    return next((step.op for step in steps(variant.epilogue) or () if step.op in NAMES), None)


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype in ("int8", "uint8"):
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max + 1, shape).astype(dtype)
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Frobenius norm of the difference over that of `want`."""
    norm = np.linalg.norm(want.ravel())
    difference = np.linalg.norm(np.asarray(got, np.float64).ravel() - want.ravel())
    return float(difference / norm) if norm else float(difference)


def check(got: np.ndarray, want: np.ndarray, out_dtype: str, num_roundings: int = 1) -> None:
    """Asserts shape and bound. `num_roundings`: how often a result was rounded to `out_dtype` on the way."""
    _check(got, want, num_roundings * BOUNDS[out_dtype])


def check_case(got: np.ndarray, want: np.ndarray, case: Case) -> None:
    """The same with the bound of `case`."""
    _check(got, want, case.bound)


def gate_error(x: np.ndarray, activation: str, out_dtype: str) -> np.ndarray:
    """By how much a kernel's gate of `x` may be wrong before it is rounded: tanh.approx was seen within 2**-10.9 on an
    H200; ex2 and a reciprocal, relative to the result until that is tiny."""
    if out_dtype not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        return 2.0**-18 * np.abs(ACTIVATIONS[activation](x)) + 2.0**-30 * np.abs(x)
    return 2.0**-11.9 * np.abs(x)


def _check(got: np.ndarray, want: np.ndarray, bound: float) -> None:
    assert got.shape == want.shape, f"{got.shape} for {want.shape}"
    error = relative_error(got, want)
    assert error <= bound, f"relative error {error:.2e}, over {bound:.2e}"


def _edges() -> list[Case]:
    """One size at a time around the tile sizes 64, 128 and 256, the others unremarkable; n and k keep 16-byte rows."""
    rows = [Case(m, 128, 128) for m in (1, 7, 63, 64, 65, 127, 129, 255, 256, 257, 511, 513)]
    cols = [Case(128, n, 128) for n in (8, 56, 64, 72, 120, 136, 248, 256, 264, 520)]
    depth = [Case(128, 128, k) for k in (8, 16, 56, 64, 72, 192, 1000)]
    return [*rows, *cols, *depth, Case(1, 8, 8), Case(129, 264, 72), Case(257, 520, 1032)]


def _batches() -> list[Case]:
    shared = [Case(72, 64, 80, 3, a_batch=a, b_batch=b) for a, b in ((3, 3), (3, 1), (1, 3))]
    return shared + [dataclasses.replace(c, a_major=x, b_major=y) for c in shared for x, y in MAJORS[1:]]


EDGES = _edges()
BY_MAJORS = [Case(m, n, k, a_major=x, b_major=y) for x, y in MAJORS for m, n, k in ((136, 72, 200), (264, 384, 128))]
BY_DTYPES = [
    Case(136, 200, 264, dtype=d, out_dtype=o)
    for d, o in itertools.product(("bfloat16", "float16"), ("bfloat16", "float16", "float32"))
]
BATCHES = _batches()
EPILOGUES = [
    Case(136, 200, 264, out_dtype=o, alpha=alpha, has_bias=has_bias, activation=activation)
    for o in ("bfloat16", "float32")
    for alpha, has_bias, activation in itertools.product((1.0, -0.5), (False, True), SHIPPED_ACTIVATIONS)
]
# Rows that TMA cannot step over: operands are padded, results stored by elements. Sizes of 0 are XLA's.
UNALIGNED = [Case(16, 1, 64), Case(16, 127, 64), Case(16, 128, 63), Case(15, 128, 64, a_major="m")]
EMPTY = [Case(0, 8, 8), Case(8, 0, 8), Case(8, 8, 0), Case(8, 8, 0, has_bias=True, activation="relu")]
ALL = [*EDGES, *BY_MAJORS, *BY_DTYPES, *BATCHES, *EPILOGUES, *UNALIGNED, *EMPTY]

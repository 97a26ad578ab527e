"""What was asked: one matrix product and what follows it. Knows no chip, no tile and no JAX."""

from __future__ import annotations

import dataclasses

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DTYPE_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
A_MAJORS = ("k", "m")
B_MAJORS = ("n", "k")
ACTIVATIONS = (None, "relu")


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """`activation(alpha * (a @ b) + bias)`, evaluated in float32 before the one rounding to the output dtype.

    `bias` has shape (n,) and the output's dtype. The fields say what happens; the operand itself travels beside.
    """

    alpha: float = 1.0
    has_bias: bool = False
    activation: str | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"`activation` requires one of {ACTIVATIONS}, got {self.activation!r}")

    @property
    def kind(self) -> str:
        """The name under which kernels are compiled: which steps there are, not their values."""
        steps = []
        if self.alpha != 1.0:
            steps.append("scale")
        if self.has_bias:
            steps.append("bias")
        if self.activation is not None:
            steps.append(self.activation)
        return "_".join(steps) or "identity"


@dataclasses.dataclass(frozen=True)
class Problem:
    """out[l, m, n] = epilogue(sum over k of a[l, m, k] * b[l, k, n]), accumulated in float32.

    A major names the contiguous dimension: `a` is stored as (l, m, k) if `a_major` is "k", else as (l, k, m);
    `b` as (l, k, n) if `b_major` is "n", else as (l, n, k). An operand whose `*_batch` is 1 is shared by all `batch`.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    a_dtype: str = "bfloat16"
    b_dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    a_major: str = "k"
    b_major: str = "n"
    a_batch: int = 1
    b_batch: int = 1
    epilogue: Epilogue = Epilogue()

    def __str__(self) -> str:
        batch = f"{self.batch}x" if self.batch != 1 else ""
        dtypes = f"{self.a_dtype}*{self.b_dtype}->{self.out_dtype}"
        return (
            f"{batch}{self.m}x{self.n}x{self.k} {dtypes} a:{self.a_major}-major b:{self.b_major}-major "
            f"{self.epilogue.kind}"
        )

    @property
    def is_static(self) -> bool:
        """False while a size is one of `jax.export`'s symbols."""
        return all(isinstance(size, int) for size in (self.m, self.n, self.k, self.batch))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to multiply: XLA knows the result, an epilogue of zeros or no elements."""
        return self.is_static and 0 in (self.m, self.n, self.k, self.batch)

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def min_bytes(self) -> int:
        """Device memory traffic if every operand is read once and the result written once."""
        a = self.a_batch * self.m * self.k * DTYPE_BYTES[self.a_dtype]
        b = self.b_batch * self.k * self.n * DTYPE_BYTES[self.b_dtype]
        return a + b + self.batch * self.m * self.n * DTYPE_BYTES[self.out_dtype]

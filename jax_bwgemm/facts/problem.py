"""What was asked: one matrix product and what follows it. Knows no chip, no tile and no JAX."""

from __future__ import annotations

import dataclasses
import re

from jax_bwgemm.facts.epilogue import Epilogue

DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
}
DTYPE_SHORT = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "s8",
    "uint8": "u8",
    "int32": "s32",
}
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
INT8_DTYPES = ("int8", "uint8")
A_MAJORS = ("k", "m")
B_MAJORS = ("n", "k")
C_MAJORS = ("n", "m")
COARSE_DTYPES = ("bfloat16", *FP8_DTYPES)  # of results that may be computed within 2**-12 of what they are made from


def dtype_bytes(dtype: str) -> int:
    """Of any dtype, by the bits that its name says; bool has none."""
    bits = re.search(r"\d+", dtype)
    return DTYPE_BYTES.get(dtype) or (-(-int(bits[0]) // 8) if bits else 1)


@dataclasses.dataclass(frozen=True)
class Array:
    """An operand beside a and b, or a result, as it is stored. `role`: what an epilogue calls it."""

    role: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Problem:
    """out[l, m, n] = epilogue(sum over k of a[l, m, k] * b[l, k, n]), accumulated in float32 (integers: int32). A gated
    epilogue reads the sums of a second b, `up`, beside it: of the same dtype, shape and major.

    float32 operands are rounded to TF32 by the tensor cores. A major names the contiguous dimension: `a` is stored as
    (l, m, k) if `a_major` is "k", else as (l, k, m); `b` as (l, k, n) if `b_major` is "n", else as (l, n, k); the
    result as (l, m, n) if `c_major` is "n", else as (l, n, m). An operand whose `*_batch` is 1 is shared by all
    `batch`. `promoted`: float8 products are summed in float32 registers, which Hopper's tensor cores do not keep.
    `symmetric`: b is a's transpose, and so are the matrices that the epilogue reads their own. `whole_k`: the k of one
    product that is computed in parts, else 0. a and b are one matrix each, of so many terms, of which each of the
    `batch` takes the next `k`, the last one what is left.
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
    c_major: str = "n"
    promoted: bool = False
    symmetric: bool = False
    whole_k: int = 0

    def __str__(self) -> str:
        batch = f"{self.batch}x" if self.batch != 1 else ""
        dtypes = f"{self.a_dtype}*{self.b_dtype}->{self.out_dtype}"
        majors = f"a:{self.a_major}-major b:{self.b_major}-major"
        if self.c_major != "n":
            majors += f" c:{self.c_major}-major"
        promoted = " promoted" if self.promoted else ""
        symmetric = " symmetric" if self.symmetric else ""
        parts = f" of {self.whole_k}" if self.whole_k else ""
        return f"{batch}{self.m}x{self.n}x{self.k} {dtypes} {majors} {self.epilogue.kind}{promoted}{symmetric}{parts}"

    @property
    def transposed(self) -> Problem:
        """The same product as C^T = B^T A^T: b's bytes are the new a, a's the new b, and the result's stay."""
        return dataclasses.replace(
            self,
            m=self.n,
            n=self.m,
            a_dtype=self.b_dtype,
            b_dtype=self.a_dtype,
            a_major="m" if self.b_major == "n" else "k",
            b_major="n" if self.a_major == "m" else "k",
            a_batch=self.b_batch,
            b_batch=self.a_batch,
            epilogue=self.epilogue.transposed,
            c_major="m" if self.c_major == "n" else "n",
        )

    @property
    def extras(self) -> tuple[Array, ...]:
        """The operands behind a and b: vectors, and matrices of the result's shape, all of its dtype; and numbers."""
        stored = (self.batch, self.m, self.n) if self.c_major == "n" else (self.batch, self.n, self.m)
        shapes = {"one": (1,), "n": (self.n,), "m": (self.m,), "mn": stored}
        dtypes = {"one": "float32"}
        found = ((x.role, shapes[x.place], dtypes.get(x.place, self.out_dtype)) for x in self.epilogue.operands)
        return tuple(Array(*own) for own in found)

    @property
    def results(self) -> tuple[Array, ...]:
        """The product's, and further ones of the epilogue."""
        stored = (self.batch, self.m, self.n) if self.c_major == "n" else (self.batch, self.n, self.m)
        return tuple(Array(role, stored, self.out_dtype) for role, _ in self.epilogue.results)

    @property
    def is_static(self) -> bool:
        """False while a size is one of `jax.export`'s symbols."""
        return all(isinstance(size, int) for size in (self.m, self.n, self.k, self.batch))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to multiply: XLA knows the result, an epilogue of zeros or no elements."""
        return self.is_static and 0 in (self.m, self.n, self.k, self.batch)

    @property
    def num_bs(self) -> int:
        """How many b there are: 2 of a gated product."""
        return 2 if self.epilogue.is_gated else 1

    @property
    def flops(self) -> int:
        """Of a symmetric product those of a triangle, as for BLAS's syrk."""
        return (self.m + 1 if self.symmetric else 2 * self.n) * self.batch * self.m * self.k * self.num_bs

    @property
    def min_bytes(self) -> int:
        """Device memory traffic if every operand is read once and the result written once, also of dtypes that no
        kernel has."""
        a = self.a_batch * self.m * self.k * dtype_bytes(self.a_dtype)
        b = self.num_bs * self.b_batch * self.k * self.n * dtype_bytes(self.b_dtype) * (not self.symmetric)
        out = self.batch * self.m * self.n * dtype_bytes(self.out_dtype)
        return a + b + out * (len(self.epilogue.results) + self.epilogue.num_matrices)

"""The products that are measured: which shapes, which operand forms, how they are written. Knows no clock."""

from __future__ import annotations

import dataclasses
import math
import re

from jax_bwgemm.problem import Problem

FORMS = ("nn", "nt", "tn")  # a then b; "t": stored transposed, as a gradient finds its operands
DEFAULT = (
    "8192x8192x8192",
    "4096x4096x4096",
    "8192x14336x4096",
    "2048x2048x2048",
    "1024x1024x1024",
    "512x4096x14336",
    "8*1024x1024x1024",
    "4096x4096x4096:nt",
    "4096x4096x4096:tn",
    "16384x16384x16384",
    "8192x8192x512",
    "5000x5000x5000",
    "1024x1024x65536",
    "256x6144x4096",
    "64x28672x4096",
    "64x4096x14336",
    "16x14336x4096",
    "32x1024x7168",
    "1x6144x4096",
    "4095x4097x4093",
    "4095x4090x4088",
    "8192x50257x768",
)
MAX_ROTATION = 32


@dataclasses.dataclass(frozen=True)
class Case:
    """`batch` products of (m, k) by (k, n), bfloat16 in and out."""

    m: int
    n: int
    k: int
    batch: int = 1
    form: str = "nn"

    @classmethod
    def from_str(cls, text: str) -> Case:
        """`[BATCH*]MxNxK[:FORM]`, the inverse of `str`."""
        match = re.fullmatch(r"(?:([1-9]\d*)\*)?([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(?::(nn|nt|tn))?", text)
        if match is None:
            raise ValueError(f"a shape requires the form [BATCH*]MxNxK[:nn|:nt|:tn], got {text!r}")
        batch, m, n, k, form = match.groups()
        return cls(int(m), int(n), int(k), int(batch or 1), form or "nn")

    def __str__(self) -> str:
        batch = f"{self.batch}*" if self.batch > 1 else ""
        form = f":{self.form}" if self.form != "nn" else ""
        return f"{batch}{self.m}x{self.n}x{self.k}{form}"

    @property
    def a_shape(self) -> tuple[int, ...]:
        return self._shape(self.k, self.m) if self.form[0] == "t" else self._shape(self.m, self.k)

    @property
    def b_shape(self) -> tuple[int, ...]:
        return self._shape(self.n, self.k) if self.form[1] == "t" else self._shape(self.k, self.n)

    @property
    def problem(self) -> Problem:
        a_major, b_major = "m" if self.form[0] == "t" else "k", "k" if self.form[1] == "t" else "n"
        return Problem(
            self.m, self.n, self.k, self.batch,
            a_major=a_major, b_major=b_major, a_batch=self.batch, b_batch=self.batch,
        )  # fmt: skip

    def _shape(self, rows: int, cols: int) -> tuple[int, ...]:
        return (self.batch, rows, cols) if self.batch > 1 else (rows, cols)


def rotation(case: Case, l2_bytes: int) -> int:
    """Copies of the operands to go round: twice the L2 cache, so that no product finds its operands there."""
    return max(1, min(MAX_ROTATION, math.ceil(2 * l2_bytes / case.problem.min_bytes)))

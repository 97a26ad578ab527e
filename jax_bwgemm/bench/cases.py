"""The products that are measured: shapes, forms, dtypes, epilogues, and how they are written. Knows no clock."""

from __future__ import annotations

import dataclasses
import math
import random
import re

from jax_bwgemm.facts.epilogue import ACTIVATIONS, chain
from jax_bwgemm.facts.problem import DTYPE_BYTES, DTYPE_SHORT, Problem
from jax_bwgemm.facts.units import unit
from jax_bwgemm.planner.measured import stand_in

FORMS = ("nn", "nt", "tn")  # a then b; "t": stored transposed, as a gradient finds its operands
EPILOGUES = (
    "",
    "swiglu",  # silu(a @ b) * (a @ up)
    *(
        "+".join(filter(None, (bias, activation, residual)))
        for bias in ("", "bias")
        for activation in ("", *ACTIVATIONS)
        for residual in ("", "residual")
        if bias or activation or residual
    ),
)
DEFAULT = (
    "8192x8192x8192",
    "4096x4096x4096",
    "2048x2048x2048",
    "1024x1024x1024",
    "16384x16384x16384",
    "8192x14336x4096",
    "8192x4096x14336",
    "4096x6144x4096",
    "8192x8192x512",
    "4096x2112x7168",
    "4096x128256x4096",
    "512x4096x14336",
    "1024x1024x65536",
    "256x6144x4096",
    "128x28672x8192",
    "64x28672x4096",
    "64x4096x14336",
    "32x1024x7168",
    "16x14336x4096",
    "8x28672x4096",
    "1x6144x4096",
    "5000x5000x5000",
    "4095x4097x4093",
    "4095x4090x4088",
    "8192x50257x768",
    "8*1024x1024x1024",
    "128*512x512x128",
    "4096x14336x8192:tn->f32",
    "4096x4096x4096:f32",
    "8192x8192x8192:nt:e4m3->bf16",
    "4096x8192x1024:bias+gelu",
    "4096x8192x1024:bias+relu",
    "4096x8192x1024:bias+silu+residual",
    "8192x14336x4096:swiglu",
)
LAYERS = (
    (768, 768), (768, 3072), (3072, 768), (768, 50257), (1024, 4096), (1536, 8960), (2048, 2048), (2048, 5632),
    (4096, 1024), (4096, 4096), (4096, 6144), (4096, 11008), (4096, 14336), (11008, 4096), (14336, 4096),
    (4096, 128256), (5120, 5120), (5120, 13824), (7168, 2112), (8192, 1024), (8192, 8192), (8192, 28672), (28672, 8192),
)  # fmt: skip
# (k, n) of models from 125 million to 70 billion parameters
MAX_ROTATION = 32
LARGEST, LEAST_FLOPS = 16384, 1e6  # of random products
_LONG = {short: long for long, short in DTYPE_SHORT.items()}
_PATTERN = re.compile(
    r"(?:([1-9]\d*)\*)?([1-9]\d*)x([1-9]\d*)x([1-9]\d*)"
    rf"(?::({'|'.join(FORMS)}))?(?::({'|'.join(_LONG)}))?(?:->({'|'.join(_LONG)}))?"
    rf"(?::({'|'.join(re.escape(epilogue) for epilogue in EPILOGUES if epilogue)}))?"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """`batch` products of (m, k) by (k, n), both of `dtype`, into `out_dtype`, and an epilogue, one of EPILOGUES."""

    m: int
    n: int
    k: int
    batch: int = 1
    form: str = "nn"
    dtype: str = "bfloat16"
    out_dtype: str = ""
    epilogue: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "out_dtype", self.out_dtype or self.dtype)

    @classmethod
    def from_str(cls, text: str) -> Case:
        """`[BATCH*]MxNxK[:FORM][:DTYPE][->OUT][:EPILOGUE]`, the inverse of `str`; OUT is DTYPE if it is not given."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            rule = "[BATCH*]MxNxK[:nn|:nt|:tn][:DTYPE][->DTYPE][:EPILOGUE], such as 64x64x64:nt:e4m3->bf16:bias+relu"
            raise ValueError(f"a shape requires the form {rule}, got {text!r}")
        batch, m, n, k, form, dtype, out_dtype, epilogue = match.groups()
        dtype = _LONG[dtype or "bf16"]
        out_dtype = _LONG[out_dtype] if out_dtype else dtype
        return cls(int(m), int(n), int(k), int(batch or 1), form or "nn", dtype, out_dtype, epilogue or "")

    def __str__(self) -> str:
        batch = f"{self.batch}*" if self.batch > 1 else ""
        form = f":{self.form}" if self.form != "nn" else ""
        dtype = f":{DTYPE_SHORT[self.dtype]}" if self.dtype != "bfloat16" else ""
        out = f"->{DTYPE_SHORT[self.out_dtype]}" if self.out_dtype != self.dtype else ""
        epilogue = f":{self.epilogue}" if self.epilogue else ""
        return f"{batch}{self.m}x{self.n}x{self.k}{form}{dtype}{out}{epilogue}"

    @property
    def steps(self) -> tuple[str, ...]:
        return tuple(self.epilogue.split("+")) if self.epilogue else ()

    @property
    def operands(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """{name: (shape, dtype)}, as stored: a, b, then what the epilogue reads."""
        a = (self.k, self.m) if self.form[0] == "t" else (self.m, self.k)
        b = (self.n, self.k) if self.form[1] == "t" else (self.k, self.n)
        stored = {"a": (self._stack(a), self.dtype), "b": (self._stack(b), self.dtype)}
        further = {
            "swiglu": ("up", (self._stack(b), self.dtype)),
            "bias": ("bias", ((self.n,), self.out_dtype)),
            "residual": ("residual", (self._stack((self.m, self.n)), self.out_dtype)),
        }
        return stored | dict(further[step] for step in self.steps if step in further)

    @property
    def problem(self) -> Problem:
        """The product (of swiglu, one of two) without an epilogue."""
        a_major, b_major = "m" if self.form[0] == "t" else "k", "k" if self.form[1] == "t" else "n"
        return Problem(
            self.m, self.n, self.k, self.batch, self.dtype, self.dtype, self.out_dtype,
            a_major=a_major, b_major=b_major, a_batch=self.batch, b_batch=self.batch,
        )  # fmt: skip

    @property
    def fused(self) -> Problem:
        """The product with its epilogue; of swiglu, the gated one."""
        if self.epilogue == "swiglu":
            return dataclasses.replace(self.problem, epilogue=unit("silu", is_gated=True))
        activation = next((step for step in self.steps if step in ACTIVATIONS), None)
        epilogue = chain(1.0, "bias" in self.steps, activation, "residual" in self.steps)
        return dataclasses.replace(self.problem, epilogue=epilogue)

    @property
    def tuned(self) -> tuple[Problem, ...]:
        """What a table should have the times of: the product alone, and with an epilogue that cannot borrow these."""
        return (self.problem,) if stand_in(self.fused) else (self.problem, self.fused)

    @property
    def flops(self) -> int:
        """Of the products; an epilogue's are not counted."""
        return self.fused.flops

    @property
    def min_bytes(self) -> int:
        """Every operand read once and the result written once."""
        read = sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in self.operands.values())
        return read + self.batch * self.m * self.n * DTYPE_BYTES[self.out_dtype]

    def _stack(self, matrix: tuple[int, int]) -> tuple[int, ...]:
        return (self.batch, *matrix) if self.batch > 1 else matrix


def random_cases(num: int, seed: int) -> list[Case]:
    """`num` different plain products in bfloat16 that nobody chose: m, n and k log-uniform in 1..LARGEST, all forms
    alike, of at least LEAST_FLOPS. Of two in three, all sizes are multiples of 8."""
    rng, found = random.Random(seed), dict[Case, None]()
    while len(found) < num:
        step = 1 if len(found) % 3 == 2 else 8
        m, n, k = (-(-round(2 ** rng.uniform(0, math.log2(LARGEST))) // step) * step for _ in range(3))
        case = Case(m, n, k, form=rng.choice(FORMS))
        if case.flops >= LEAST_FLOPS:
            found[case] = None
    return list(found)


def rotation(case: Case, l2_bytes: int) -> int:
    """Copies of the operands to go round: twice the L2 cache, so that no product finds its operands there, or what is
    left of one that is larger alone."""
    return max(1, min(MAX_ROTATION, math.ceil(2 * l2_bytes / case.min_bytes)))

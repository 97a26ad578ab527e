"""A variant: everything that is fixed when a kernel is compiled. One function names it; nothing parses a name."""

from __future__ import annotations

import dataclasses

from jax_bwgemm.problem import DTYPE_SHORT, Problem
from jax_bwgemm.tile import Tile


@dataclasses.dataclass(frozen=True)
class Variant:
    """One cubin. Shapes are dynamic: it serves every m, n, k and batch."""

    target: str
    a_dtype: str
    b_dtype: str
    out_dtype: str
    a_major: str
    b_major: str
    tile: Tile
    epilogue: str = "identity"

    @property
    def name(self) -> str:
        dtypes = "_".join(DTYPE_SHORT[d] for d in (self.a_dtype, self.b_dtype, self.out_dtype))
        return f"{self.target}_{dtypes}_{self.a_major}{self.b_major}_{self.tile}_{self.epilogue}"


def variant_for(problem: Problem, tile: Tile, target: str) -> Variant:
    """The variant that computes `problem` with `tile` on `target`."""
    return Variant(
        target,
        problem.a_dtype,
        problem.b_dtype,
        problem.out_dtype,
        problem.a_major,
        problem.b_major,
        tile,
        problem.epilogue.kind,
    )

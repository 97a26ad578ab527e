"""A variant: everything that is fixed when a kernel is compiled. One function names it; nothing parses a name."""

from __future__ import annotations

import dataclasses

from jax_bwgemm.arch import ARCHS
from jax_bwgemm.legality import why_not
from jax_bwgemm.problem import ACTIVATIONS, DTYPE_BYTES, DTYPE_SHORT, Epilogue, Problem
from jax_bwgemm.tile import Tile, is_tma_storable, load_box, store_box, swizzle_atom_bytes

STORES = ("tma", "threads")  # how the result leaves: rows that TMA can step over, or any rows


@dataclasses.dataclass(frozen=True)
class Variant:
    """One cubin. Shapes are dynamic: it serves every m, n, k and batch (that its `store` can step over)."""

    target: str
    a_dtype: str
    b_dtype: str
    out_dtype: str
    a_major: str
    b_major: str
    tile: Tile
    epilogue: str = "identity"
    c_major: str = "n"
    store: str = "tma"

    @property
    def activation(self) -> str | None:
        return next((name for name in ACTIVATIONS if name in self.epilogue.split("_")), None)

    @property
    def has_residual(self) -> bool:
        return self.epilogue.endswith("residual")

    @property
    def name(self) -> str:
        dtypes = "_".join(DTYPE_SHORT[d] for d in (self.a_dtype, self.b_dtype, self.out_dtype))
        majors = f"{self.a_major}{self.b_major}{self.c_major}"
        store = "" if self.store == "tma" else f"_{self.store}"
        return f"{self.target}_{dtypes}_{majors}_{self.tile}_{self.epilogue}{store}"


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
        problem.c_major,
        "tma" if is_tma_storable(problem) else "threads",
    )


def tma_boxes(variant: Variant) -> dict[str, tuple[tuple[int, int, int], int, int]]:
    """Per operand that TMA moves: the box of one instruction, innermost first, its swizzle span and what that moves as
    a whole, both in bytes."""
    tile = variant.tile
    facts = {}
    for operand, major, dtype in (("a", variant.a_major, variant.a_dtype), ("b", variant.b_major, variant.b_dtype)):
        box = load_box(tile, operand, major, dtype)
        facts[operand] = (*box, 1), box[0] * DTYPE_BYTES[dtype], swizzle_atom_bytes(dtype, major, variant.target)
    if variant.store == "tma":
        box = store_box(tile, variant.out_dtype, variant.c_major, variant.target)
        facts["c"] = (*box, 1), box[0] * DTYPE_BYTES[variant.out_dtype], 16
    if variant.has_residual:
        facts["r"] = facts["c"]
    return facts


def why_not_variant(variant: Variant) -> str | None:
    """`legality.why_not` for a problem that only this variant computes: what the build asks."""
    if variant.store not in STORES:
        return f"`store` requires one of {STORES}, got {variant.store!r}"
    steps = variant.epilogue.split("_")
    epilogue = Epilogue(2.0 if "scale" in steps else 1.0, "bias" in steps, variant.activation, "residual" in steps)
    if epilogue.kind != variant.epilogue:
        return f"`epilogue` requires the kind of an Epilogue, got {variant.epilogue!r}"
    size = 4096 if variant.store == "tma" else 4095
    problem = Problem(
        size,
        size,
        4096,
        a_dtype=variant.a_dtype,
        b_dtype=variant.b_dtype,
        out_dtype=variant.out_dtype,
        a_major=variant.a_major,
        b_major=variant.b_major,
        c_major=variant.c_major,
        epilogue=epilogue,
        promoted=variant.tile.promoted,
    )
    arch = next(arch for arch in ARCHS.values() if arch.target == variant.target)
    return why_not(variant.tile, problem, arch)

"""A variant: everything that is fixed when a kernel is compiled. One function names it; nothing parses a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_bwgemm.facts.arch import arch_of
from jax_bwgemm.facts.epilogue import ACC, UP, Epilogue, Moves, Node, Reduction, inputs, parse
from jax_bwgemm.facts.legality import why_not
from jax_bwgemm.facts.padding import store_of
from jax_bwgemm.facts.problem import DTYPE_BYTES, DTYPE_SHORT, Problem
from jax_bwgemm.facts.recipe import ALIGN_BYTES, Buffer, TensorMap
from jax_bwgemm.facts.resources import load_box, moves_of, store_box, store_cols, swizzle_atom_bytes, warp_rows
from jax_bwgemm.facts.tile import Tile

_ELEMENTS = {dtype: "u8" if size == 1 else DTYPE_SHORT[dtype] for dtype, size in DTYPE_BYTES.items()}  # of tensor maps
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
    epilogue: Node = ACC
    c_major: str = "n"
    store: str = "tma"
    seconds: tuple[tuple[str, Node], ...] = ()
    reductions: tuple[Reduction, ...] = ()

    @property
    def moves(self) -> Moves:
        return moves_of(self.tile, self.steps.moves)

    @property
    def steps(self) -> Epilogue:
        """The epilogue of any scalars, which are run-time parameters."""
        nodes = self.epilogue, *(node for _, node in self.seconds), *(x.node for x in self.reductions)
        roles = dict.fromkeys(x.role for node in nodes for x in inputs(node) if x.place == "scalar")
        return Epilogue(self.epilogue, tuple((role, 2.0) for role in roles), self.seconds, self.reductions)

    @property
    def name(self) -> str:
        dtypes = "_".join(DTYPE_SHORT[d] for d in (self.a_dtype, self.b_dtype, self.out_dtype))
        majors = f"{self.a_major}{self.b_major}{self.c_major}"
        store = "" if self.store == "tma" else f"_{self.store}"
        return f"{self.target}_{dtypes}_{majors}_{self.tile}_{self.steps.kind}{store}"

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and texts."""
        seconds = [[role, str(node)] for role, node in self.seconds]
        reductions = [[x.role, x.reducer, x.place, str(x.node)] for x in self.reductions]
        nodes = {"epilogue": str(self.epilogue), "seconds": seconds, "reductions": reductions}
        return dataclasses.asdict(self) | nodes

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Variant:
        """The inverse. ValueError or TypeError for anything else."""
        seconds = tuple((role, parse(text)) for role, text in _texts(fields, "seconds", 2))
        reductions = tuple(Reduction(x[0], x[1], x[2], parse(x[3])) for x in _texts(fields, "reductions", 4))
        nodes = {"epilogue": parse(fields["epilogue"]), "seconds": seconds, "reductions": reductions}
        return cls(**{**fields, "tile": Tile(**fields["tile"]), **nodes})


def _texts(fields: Mapping[str, Any], name: str, count: int) -> list[list[str]]:
    """Lists of a role, perhaps what is done, and an expression."""
    found: list[list[str]] = fields[name]
    is_listed = isinstance(found, list) and all(isinstance(own, list) for own in found)
    if not is_listed or any([type(x) for x in own] != [str] * count for own in found):
        raise ValueError(f"`{name}` requires lists of a role and an expression, {count} texts each, got {found!r}")
    return found


def variant_for(problem: Problem, tile: Tile, target: str) -> Variant:
    """The variant that computes `problem` with `tile` on `target`. A tile that stores `by_rows` has that of rows that
    TMA cannot step over."""
    return Variant(
        target,
        problem.a_dtype,
        problem.b_dtype,
        problem.out_dtype,
        problem.a_major,
        problem.b_major,
        dataclasses.replace(tile, by_rows=False),
        problem.epilogue.out,
        problem.c_major,
        store_of(tile, problem),
        problem.epilogue.seconds,
        problem.epilogue.reductions,
    )


def buffers(variant: Variant) -> tuple[Buffer, ...]:
    """What the variant's custom call takes and returns, in its order: THE list; whoever needs a buffer finds it here by
    its role."""
    out = ("l", "m", "n") if variant.c_major == "n" else ("l", "n", "m")
    threads_store = variant.store == "threads"  # to any address that elements may have
    more = "" if variant.tile.direct else "+"  # rows may be padded, or must not: threads step over any
    b_dims = ("l?", "k", f"n{more}") if variant.b_major == "n" else ("l?", "n", f"k{more}")
    a_dims = ("l?", "m", f"k{more}") if variant.a_major == "k" else ("l?", "k", f"m{more}")
    found = [Buffer("a", variant.a_dtype, a_dims)]
    bs = () if variant.tile.symmetric else b_roles(variant)  # else a's second tensor map is b's
    found += [Buffer(role, variant.b_dtype, b_dims) for role in bs]
    dims = {"one": ("1",), "n": ("n",), "m": ("m",), "mn": out}
    dtypes = {"one": "float32"}
    found += [
        Buffer(x.role, dtypes.get(x.place, variant.out_dtype), dims[x.place], 4 if x.place == "one" else ALIGN_BYTES)
        for x in variant.steps.operands
    ]
    align_bytes = DTYPE_BYTES[variant.out_dtype] if threads_store else ALIGN_BYTES
    found += [Buffer(role, variant.out_dtype, out, align_bytes, is_result=True) for role, _ in variant.steps.results]
    parts = {"n": ("l", f"m/{warp_rows(variant.tile, variant.target)}", "n"), "m": ("l", f"n/{_cols(variant)}", "m")}
    found += [Buffer(x.role, "float32", parts[x.place], is_result=True) for x in variant.reductions]
    if variant.tile.stream_k:
        found.append(Buffer("workspace", "uint8", ("bytes",), is_result=True))
    return tuple(found)


def _cols(variant: Variant) -> int:
    return store_cols(variant.tile, variant.out_dtype, variant.target)


def b_roles(variant: Variant) -> tuple[str, ...]:
    """Of the operands that a is multiplied with."""
    return ("b", UP.role) if variant.tile.gated else ("b",)


def places(variant: Variant) -> dict[str, int]:
    """The index of each buffer by its role; of a symmetric product, a is b, too."""
    found = {buffer.role: i for i, buffer in enumerate(buffers(variant))}
    return found | {"b": found["a"]} if variant.tile.symmetric else found


def tensor_maps(variant: Variant) -> tuple[TensorMap, ...]:
    """Of the buffers that TMA moves, of a direct tile none; a symmetric product's operand and result have two each."""
    tile, at = variant.tile, places(variant)
    if tile.direct:
        return ()
    maps = []
    b = variant.b_major, variant.b_dtype
    for role, major, dtype in (("a", variant.a_major, variant.a_dtype), *((role, *b) for role in b_roles(variant))):
        element = "tf32" if dtype == "float32" else _ELEMENTS[dtype]  # which TMA rounds on its way
        atom_bytes = swizzle_atom_bytes(dtype, major, variant.target)
        box = load_box(tile, "a" if role == "a" else "b", major, dtype)
        maps.append(_tensor_map(at[role], element, box, dtype, atom_bytes))
    box = store_box(tile, variant.out_dtype, variant.c_major, variant.target, variant.store, variant.moves)
    matrices = [x.role for x in variant.steps.operands if x.place == "mn"]
    moved = matrices + [role for role, _ in variant.steps.results] * (variant.store == "tma")
    element = _ELEMENTS[variant.out_dtype]
    maps += [_tensor_map(at[role], element, box, variant.out_dtype, 16) for role in moved]
    if variant.tile.symmetric:
        box = store_box(tile, variant.out_dtype, "m", variant.target)
        maps.append(_tensor_map(at["out"], element, box, variant.out_dtype, 16))
    return tuple(maps)


def _tensor_map(buffer: int, element: str, box: tuple[int, int], dtype: str, atom_bytes: int) -> TensorMap:
    return TensorMap(buffer, element, (*box, 1), box[0] * DTYPE_BYTES[dtype], atom_bytes)


def why_not_variant(variant: Variant) -> str | None:
    """`legality.why_not` for a problem that only this variant computes: what the build asks."""
    if variant.store not in STORES or (variant.tile.direct and variant.store == "tma"):
        legal = STORES[1:] if variant.tile.direct else STORES
        return f"`store` requires one of {legal}, got {variant.store!r}"
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
        epilogue=variant.steps,
        promoted=variant.tile.promoted,
        symmetric=variant.tile.symmetric,
    )
    arch = arch_of(variant.target)
    return why_not(variant.tile, problem, arch)

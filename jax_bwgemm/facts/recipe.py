"""What a launcher must know of a kernel's parameters: its buffers, their tensor maps, and where each leaf comes from.

Plain data and its text, the same in the manifest and in the custom call, where the launcher (`ffi/`) interprets it:
docs/architecture.md, "Kernel parameter block". Knows no tile, no kernel and no JAX.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

ALIGN_BYTES = 16  # of an address that TMA or a vector load takes
LEAF_BYTES = {
    "tma": 128, "tma2": 128, "ptr": 8, "size": 4, "step": 4, "int": 4, "float": 4, "l2": 8, "token": 8, "walk": 4
}  # fmt: skip
Attribute = int | float | str  # what a custom call says under one name: int32, float32 or text
OF_BUFFERS = ("tma", "tma2", "ptr", "step")  # sources that name a buffer by its index
MAPS = ("tma", "tma2")  # of a buffer, its first tensor map and its second


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An operand or a result: `a:bfloat16[l?,m,k+]%16`.

    `dims`, the contiguous one last, are of l (the batch), m, n and k, or 1 or "bytes". Behind a name "?" says that it
    may be 1, one matrix for the whole batch; "+" that zeros may follow where TMA cannot step over rows of that size;
    and "/16" that there is one for every 16, or for what is left.
    """

    role: str
    dtype: str
    dims: tuple[str, ...]
    align_bytes: int = ALIGN_BYTES
    is_result: bool = False

    def __str__(self) -> str:
        return f"{self.role}:{self.dtype}[{','.join(self.dims)}]%{self.align_bytes}"

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Of the `sizes` of its dimensions by their names; neither shared nor padded."""
        parts = (re.fullmatch(r"(\w+)[?+]*(?:/(\d+))?", dim) for dim in self.dims)
        known = {"1": 1, **sizes}
        return tuple(-(-known[part[1]] // int(part[2] or 1)) for part in parts if part)

    @classmethod
    def from_str(cls, text: str, is_result: bool = False) -> Buffer:
        role, dtype, dims, align_bytes = _parts(r"(\w+):(\w+)\[([\w?+/,]+)\]%(\d+)", text)
        return cls(role, dtype, tuple(dims.split(",")), int(align_bytes), is_result)


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """How TMA moves a buffer, given by its index: `0:bf16[64,128,1]/128/16`.

    `element` is the emulator's word for a CUtensorMapDataType. The box is that of one instruction, innermost dimension
    first, in elements. A swizzle's span comes before what it moves as a whole, its atom.
    """

    buffer: int
    element: str
    box: tuple[int, int, int]
    swizzle_bytes: int
    swizzle_atom_bytes: int

    def __str__(self) -> str:
        columns, rows, batch = self.box
        return f"{self.buffer}:{self.element}[{columns},{rows},{batch}]/{self.swizzle_bytes}/{self.swizzle_atom_bytes}"

    @classmethod
    def from_str(cls, text: str) -> TensorMap:
        buffer, element, *sizes = _parts(r"(\d+):(\w+)\[(\d+),(\d+),(\d+)\]/(\d+)/(\d+)", text)
        columns, rows, batch, span, atom = map(int, sizes)
        return cls(int(buffer), element, (columns, rows, batch), span, atom)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the parameter block: `int:raster_along_n[0..1]@404+4`; `offset` and `size` in bytes."""

    source: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.source}@{self.offset}+{self.size}"

    @classmethod
    def from_str(cls, text: str) -> Leaf:
        source, offset, size = _parts(r"([^@]+)@(\d+)\+(\d+)", text)
        return cls(source, int(offset), int(size))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All of it: buffers in the order of the custom call, operands first; leaves in the order of the kernel."""

    buffers: tuple[Buffer, ...]
    tensor_maps: tuple[TensorMap, ...]
    params: tuple[Leaf, ...]

    def __post_init__(self) -> None:
        named = {kind: {_index(leaf) for leaf in self.params if _kind(leaf) == kind} for kind in OF_BUFFERS}
        if unknown := set().union(*named.values()) - set(range(len(self.buffers))):
            raise ValueError(f"`params` requires buffers of 0..{len(self.buffers) - 1}, got {min(unknown)}")
        wanted = [i for kind in MAPS for i in named[kind]]
        if (mapped := sorted(facts.buffer for facts in self.tensor_maps)) != sorted(wanted):
            raise ValueError(f"`tensor_maps` requires those of buffers {sorted(wanted)}, got {mapped}")

    @property
    def operands(self) -> tuple[Buffer, ...]:
        return tuple(buffer for buffer in self.buffers if not buffer.is_result)

    @property
    def results(self) -> tuple[Buffer, ...]:
        return tuple(buffer for buffer in self.buffers if buffer.is_result)

    def texts(self) -> dict[str, str]:
        """By the names that the parts have in the manifest and in the custom call."""
        parts = {"buffers": (*self.operands, "->", *self.results), "tensor_maps": self.tensor_maps}
        return {name: " ".join(map(str, part)) for name, part in (parts | {"params": self.params}).items()}

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> Recipe:
        """The inverse of `texts`; ValueError for what cannot be read."""
        return cls(
            buffers(texts["buffers"]),
            tuple(map(TensorMap.from_str, texts["tensor_maps"].split())),
            tuple(map(Leaf.from_str, texts["params"].split())),
        )


def buffers(text: str) -> tuple[Buffer, ...]:
    """Operands, then results, of a recipe's text of them; ValueError for what cannot be read."""
    operands, _, results = text.partition("->")
    return (*map(Buffer.from_str, operands.split()), *(Buffer.from_str(part, True) for part in results.split()))


def map_sources(maps: Iterable[TensorMap]) -> tuple[str, ...]:
    """What the leaf of each of a recipe's tensor maps is called."""
    found: list[str] = []
    for facts in maps:
        first, second = (f"{kind}:{facts.buffer}" for kind in MAPS)
        found.append(second if first in found else first)
    return tuple(found)


def leaf_bytes(source: str) -> int:
    """What a leaf of this source takes in the parameter block."""
    return LEAF_BYTES[source.partition(":")[0]]


def _kind(leaf: Leaf) -> str:
    kind = leaf.source.partition(":")[0]
    if kind not in LEAF_BYTES:
        raise ValueError(f"a leaf's source requires one of {', '.join(LEAF_BYTES)}, got {leaf.source!r}")
    return kind


def _index(leaf: Leaf) -> int:
    return int(leaf.source.partition(":")[2])


def _parts(pattern: str, text: str) -> tuple[str, ...]:
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ValueError(f"a recipe requires texts of the form {pattern}, got {text!r}")
    return match.groups()

"""The parsed form of a PTX module: plain records, no behaviour."""

from __future__ import annotations

import dataclasses
from typing import Any


class Missing(LookupError):
    """An operand or a modifier that an instruction does not have."""


class Operands(tuple["Operand", ...]):
    """Of one instruction; `Missing` for one that is not there."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except IndexError:
            raise Missing("operands are missing") from None


class Modifiers(list[str]):
    """Behind an opcode's stem; `Missing` for one that is not there."""

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except IndexError:
            raise Missing("modifiers are missing") from None


@dataclasses.dataclass(frozen=True)
class Reg:
    """A register: its slot in a warp's register file. `bits` is 1 for a predicate."""

    slot: int
    bits: int
    name: str


@dataclasses.dataclass(frozen=True)
class Imm:
    """An integer, or the bit pattern of a float literal."""

    value: int


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A special register, a parameter, a shared variable or a label."""

    name: str
    scope: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Mem:
    """`[base + offset]`, or with `coords` a tensor map and its coordinates."""

    base: Operand
    offset: int = 0
    coords: tuple[Operand, ...] = ()


@dataclasses.dataclass(frozen=True)
class Vec:
    """`{a, b, ...}`."""

    items: tuple[Operand, ...]


@dataclasses.dataclass(frozen=True)
class Pair:
    """`d|p`."""

    first: Operand
    second: Operand


@dataclasses.dataclass(frozen=True)
class Not:
    """`!p`."""

    operand: Operand


@dataclasses.dataclass(frozen=True)
class Sink:
    """`_`: a discarded destination."""


Operand = Reg | Imm | Symbol | Mem | Vec | Pair | Not | Sink


@dataclasses.dataclass(frozen=True)
class Instr:
    """One instruction. `guard` is a predicate register, negated if `guard_not`."""

    line: int
    text: str
    opcode: str
    operands: Operands
    guard: Reg | None = None
    guard_not: bool = False


@dataclasses.dataclass(frozen=True)
class Param:
    """One kernel parameter; `offset` follows from natural alignment in declaration order."""

    name: str
    offset: int
    size: int
    align: int


@dataclasses.dataclass(frozen=True)
class SharedVar:
    """A shared variable; `size` 0 for the dynamic array."""

    name: str
    size: int
    align: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """One kernel. `labels` maps (scope, name) to an index into `body`."""

    name: str
    params: tuple[Param, ...]
    block: tuple[int, int, int] | None
    max_threads: int | None
    body: tuple[Instr, ...]
    labels: dict[tuple[tuple[int, ...], str], int]
    num_slots: int
    shared: tuple[SharedVar, ...] = ()


@dataclasses.dataclass(frozen=True)
class Module:
    """A PTX module."""

    version: str
    target: str
    entries: dict[str, Entry]

    @property
    def entry(self) -> Entry:
        """The only kernel of a module that has one."""
        if len(self.entries) != 1:
            raise KeyError(f"a module with one entry is required, got {sorted(self.entries)}")
        return next(iter(self.entries.values()))

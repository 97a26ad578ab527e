"""PTX text -> `syntax.Module`. Knows the grammar of what CuTeDSL emits, and the meaning of no instruction."""

from __future__ import annotations

import bisect
import dataclasses
import re

from jax_bwgemm.emulator.errors import PtxSyntaxError
from jax_bwgemm.emulator.operands import MAX_DIGITS, Reader
from jax_bwgemm.emulator.syntax import (
    Entry,
    Instr,
    Module,
    Operand,
    Param,
    Reg,
    SharedVar,
    Sink,
    Symbol,
)

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_LABEL = re.compile(r"([$%A-Za-z_][\w$]*)\s*:(?!:)")
_INSTR = re.compile(r"(?:@(!?)([%$A-Za-z_][\w$]*)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_NAME = r"[$%A-Za-z_][\w$]*"
_PARAM = re.compile(rf"\.param((?:\s+\.\w+(?:\s+\d+)?)*?)\s+({_NAME})(?:\[(\d+)\])?$")
_SHARED = re.compile(rf"\.shared\s+(?:\.align\s+(\d+)\s+)?\.([a-z]\d+)\s+({_NAME})(?:\[(\d*)\])?$")
_TYPE = re.compile(r"\.([busf]\d+(?:x2)?)\b")
_RANGE = re.compile(rf"({_NAME})<(\d+)>")
_IGNORED_DIRECTIVES = (".pragma", ".loc", ".file", ".branchtargets")
_BITS = {
    "pred": 1,
    "b128": 128,
    "f16x2": 32,
    "f32x2": 64,
    **{f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)},
    **{f"f{bits}": bits for bits in (16, 32, 64)},
}

# Of one kernel. Ours have some 6000 registers; the others are limits of hardware (CUDA programming guide).
MAX_REGISTERS = 1 << 16
MAX_PARAM_BYTES = 32764
MAX_SHARED_BYTES = 227 << 10
MAX_SCOPES = 64  # inside each other


def parse(text: str) -> Module:
    """Parses a module. Raises `PtxSyntaxError` with the line."""
    return _Parser(text).module()


@dataclasses.dataclass(frozen=True)
class _Range:
    """`%name<count>`: registers of consecutive slots."""

    first: int
    count: int
    bits: int


@dataclasses.dataclass
class _Scope:
    """One `{ }`: its path, and the registers declared in it (single names, and prefixes with a count)."""

    path: tuple[int, ...]
    names: dict[str, Reg] = dataclasses.field(default_factory=dict)
    ranges: dict[str, _Range] = dataclasses.field(default_factory=dict)


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
        self.pos = 0
        self.line_starts = [0] + [m.end() for m in re.finditer("\n", text)]
        self.shared: list[SharedVar] = []
        self._start_entry()

    def _start_entry(self) -> None:
        self.scopes: list[_Scope] = []
        self.num_scopes = 0
        self.num_slots = 0
        self.body: list[Instr] = []
        self.labels: dict[tuple[tuple[int, ...], str], int] = {}
        self.entry_shared: list[SharedVar] = []

    def line(self, pos: int | None = None) -> int:
        return bisect.bisect_right(self.line_starts, self.pos if pos is None else pos)

    def fail(self, message: str) -> PtxSyntaxError:
        return PtxSyntaxError(self.line(), message)

    def skip_space(self) -> bool:
        """Moves to the next statement; False at the end of the text."""
        while self.pos < len(self.text) and self.text[self.pos].isspace():
            self.pos += 1
        return self.pos < len(self.text)

    def until(self, stop: str) -> str:
        end = self.text.find(stop, self.pos)
        if end < 0:
            raise self.fail(f"`{stop}` is missing")
        piece = self.text[self.pos : end]
        self.pos = end + len(stop)
        return piece.strip()

    def module(self) -> Module:
        facts = {"version": "", "target": "", "address_size": ""}
        entries: dict[str, Entry] = {}
        while self.skip_space():
            if match := re.compile(r"\.(version|target|address_size)\s+(\S+)").match(self.text, self.pos):
                facts[match.group(1)] = match.group(2)
                self.pos = match.end()
            elif match := re.compile(rf"(?:\.visible\s+|\.weak\s+)?\.entry\s+({_NAME})").match(self.text, self.pos):
                self.pos = match.end()
                self._start_entry()
                entries[match.group(1)] = self.entry(match.group(1))
            elif match := re.compile(r"(?:\.extern\s+|\.visible\s+)?(?=\.shared)").match(self.text, self.pos):
                self.pos = match.end()
                self.shared.append(self.shared_var(self.until(";")))
            elif self.text.startswith((".file", ".loc", ".section"), self.pos):
                self.until("}" if self.text.startswith(".section", self.pos) else "\n")
            else:
                statement = self.text[self.pos : self.pos + 40].split("\n")[0]
                raise self.fail(f"unknown module-level statement `{statement}`")
        if not entries:
            raise self.fail("no .entry in the module")
        return Module(facts["version"], facts["target"], entries)

    def number(self, digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise self.fail(f"a number requires at most {MAX_DIGITS} digits, got {len(digits)}")
        return int(digits)

    def bits(self, kind: str) -> int:
        if kind not in _BITS:
            raise self.fail(f"unknown type `.{kind}`")
        return _BITS[kind]

    def at_most(self, what: str, limit: int, number: int) -> None:
        if number > limit:
            raise self.fail(f"a kernel requires at most {limit} {what}, got {number}")

    def alignment(self, digits: str) -> int:
        """A power of two."""
        align = self.number(digits)
        if align < 1 or align & (align - 1):
            raise self.fail(f"`.align` requires a power of two, got {align}")
        return align

    def shared_var(self, text: str) -> SharedVar:
        match = _SHARED.match(text)
        if not match:
            raise self.fail(f"unknown shared variable `{text}`")
        align, kind, name, count = match.groups()
        size = self.bits(kind) // 8
        elems = 1 if count is None else self.number(count or "0")
        self.at_most("bytes of shared memory", MAX_SHARED_BYTES, size * elems)
        return SharedVar(name, size * elems, self.alignment(align) if align else size)

    def entry(self, name: str) -> Entry:
        params = self.params() if self.skip_space() and self.text[self.pos] == "(" else ()
        block: tuple[int, int, int] | None = None
        max_threads: int | None = None
        for key, values in re.findall(r"\.(\w+)\s+([\d, ]+)", self.until("{")):
            numbers = [self.number(v) for v in values.replace(",", " ").split()]
            if not 1 <= len(numbers) <= 3:
                raise self.fail(f"`.{key}` requires 1 to 3 numbers, got {len(numbers)}")
            x, y, z = (numbers + [1, 1])[:3]
            if key == "reqntid":
                block = x, y, z
            elif key == "maxntid":
                max_threads = x * y * z
            elif key not in ("minnctapersm", "maxnreg", "reqnctapercluster", "maxclusterrank"):
                raise self.fail(f"unknown kernel directive `.{key}`")
        self.open_scope()
        while self.scopes:
            self.statement()
        shared = tuple(self.shared + self.entry_shared)
        return Entry(name, params, block, max_threads, tuple(self.body), self.labels, self.num_slots, shared)

    def params(self) -> tuple[Param, ...]:
        self.pos += 1
        params, offset = [], 0
        for piece in filter(None, (p.strip() for p in self.until(")").split(","))):
            match = _PARAM.match(piece)
            if not match:
                raise self.fail(f"unknown parameter `{piece}`")
            attrs, name, count = match.groups()
            type_match = _TYPE.search(attrs)
            if not type_match:
                raise self.fail(f"parameter without a type: `{piece}`")
            size = self.bits(type_match.group(1)) // 8
            explicit = None if ".ptr" in attrs else re.search(r"\.align\s+(\d+)", attrs)
            align = self.alignment(explicit.group(1)) if explicit else size
            size *= self.number(count or "1")
            offset = -(-offset // align) * align
            params.append(Param(name, offset, size, align))
            offset += size
        self.at_most("bytes of parameters", MAX_PARAM_BYTES, offset)
        return tuple(params)

    def open_scope(self) -> None:
        path = (*self.scopes[-1].path, self.num_scopes) if self.scopes else (0,)
        self.num_scopes += 1
        if len(path) > MAX_SCOPES:
            raise self.fail(f"scopes require a depth of at most {MAX_SCOPES}")
        self.scopes.append(_Scope(path))

    def statement(self) -> None:
        if not self.skip_space():
            raise self.fail("the kernel's `}` is missing")
        char = self.text[self.pos]
        if char == "{":
            self.pos += 1
            self.open_scope()
        elif char == "}":
            self.pos += 1
            self.scopes.pop()
        elif char == ";":
            self.pos += 1
        elif match := _LABEL.match(self.text, self.pos):
            self.pos = match.end()
            key = self.scopes[-1].path, match.group(1)
            if key in self.labels:
                raise self.fail(f"a second label `{match.group(1)}`")
            self.labels[key] = len(self.body)
        elif char == ".":
            self.directive()
        else:
            line = self.line()
            self.body.append(self.instr(line, self.until(";")))

    def directive(self) -> None:
        if self.text.startswith(".loc", self.pos):
            self.until("\n")
            return
        text = self.until(";")
        if text.startswith(".reg"):
            self.declare(text)
        elif text.startswith(".shared"):
            self.entry_shared.append(self.shared_var(text))
        elif not text.startswith(_IGNORED_DIRECTIVES):
            raise self.fail(f"unknown directive `{text}`")

    def declare(self, text: str) -> None:
        match = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S)
        if not match:
            raise self.fail(f"unknown declaration `{text}`")
        bits = self.bits(match.group(1))
        for name in (piece.strip() for piece in match.group(2).split(",")):
            ranged = _RANGE.fullmatch(name)
            if not ranged and not re.fullmatch(_NAME, name):
                raise self.fail(f"unknown declaration `{text}`")
            count = self.number(ranged.group(2)) if ranged else 1
            self.at_most("registers", MAX_REGISTERS, self.num_slots + count)
            if ranged:
                self.scopes[-1].ranges[ranged.group(1)] = _Range(self.num_slots, count, bits)
            else:
                self.scopes[-1].names[name] = Reg(self.num_slots, bits, name)
            self.num_slots += count

    def resolve(self, name: str) -> Operand:
        """A register of the innermost scope that declares it, else a symbol."""
        if name == "_":
            return Sink()
        numbered = re.fullmatch(rf"(.*?\D)(\d{{1,{MAX_DIGITS}}})", name)
        for scope in reversed(self.scopes):
            if name in scope.names:
                return scope.names[name]
            if numbered and (ranged := scope.ranges.get(numbered.group(1))):
                number = int(numbered.group(2))
                if number < ranged.count:
                    return Reg(ranged.first + number, ranged.bits, name)
        return Symbol(name, self.scopes[-1].path)

    def instr(self, line: int, text: str) -> Instr:
        match = _INSTR.fullmatch(text)
        if not match:
            raise PtxSyntaxError(line, f"not an instruction: `{text}`")
        negated, guard_name, opcode, rest = match.groups()
        guard = self.resolve(guard_name) if guard_name else None
        if guard is not None and not (isinstance(guard, Reg) and guard.bits == 1):
            raise PtxSyntaxError(line, f"a guard requires a predicate register, got `{guard_name}`")
        operands = Reader(self.resolve, line, rest).all()
        return Instr(line, " ".join(text.split()), opcode, operands, guard, bool(negated))

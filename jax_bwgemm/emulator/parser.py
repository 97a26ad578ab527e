"""PTX text -> `syntax.Module`. Knows the grammar of what CuTeDSL emits, and the meaning of no instruction."""

from __future__ import annotations

import bisect
import dataclasses
import re

from jax_bwgemm.emulator.errors import PtxSyntaxError
from jax_bwgemm.emulator.syntax import (
    Entry,
    Imm,
    Instr,
    Mem,
    Module,
    Not,
    Operand,
    Pair,
    Param,
    Reg,
    SharedVar,
    Sink,
    Symbol,
    Vec,
)

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_LABEL = re.compile(r"([$%A-Za-z_][\w$]*)\s*:(?!:)")
_INSTR = re.compile(r"(?:@(!?)([%$A-Za-z_][\w$]*)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_TOKEN = re.compile(r"\s*(0[fFdD][0-9a-fA-F]+|-?0[xX][0-9a-fA-F]+U?|-?\d+U?|[%$A-Za-z_][\w$.]*|[\[\]{}(),+|!<>=])")
_NAME = r"[$%A-Za-z_][\w$]*"
_PARAM = re.compile(rf"\.param((?:\s+\.\w+(?:\s+\d+)?)*?)\s+({_NAME})(?:\[(\d+)\])?$")
_SHARED = re.compile(rf"\.shared\s+(?:\.align\s+(\d+)\s+)?\.([a-z]\d+)\s+({_NAME})(?:\[(\d*)\])?$")
_TYPE = re.compile(r"\.(pred|[busf]\d+(?:x2)?)\b")
_IGNORED_DIRECTIVES = (".pragma", ".loc", ".file", ".branchtargets")


def parse(text: str) -> Module:
    """Parses a module. Raises `PtxSyntaxError` with the line."""
    return _Parser(text).module()


@dataclasses.dataclass
class _Scope:
    """One `{ }`: its path, and the registers declared in it (single names, and prefixes with a count)."""

    path: tuple[int, ...]
    names: dict[str, Reg] = dataclasses.field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


def _type_bits(name: str) -> int:
    return 1 if name == "pred" else int(re.sub(r"^[busf]|x2$", "", name))


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

    def shared_var(self, text: str) -> SharedVar:
        match = _SHARED.match(text)
        if not match:
            raise self.fail(f"unknown shared variable `{text}`")
        align, kind, name, count = match.groups()
        size = _type_bits(kind) // 8
        elems = 1 if count is None else int(count or 0)
        return SharedVar(name, size * elems, int(align or size))

    def entry(self, name: str) -> Entry:
        params = self.params() if self.skip_space() and self.text[self.pos] == "(" else ()
        block: tuple[int, int, int] | None = None
        max_threads: int | None = None
        for key, values in re.findall(r"\.(\w+)\s+([\d, ]+)", self.until("{")):
            numbers = [int(v) for v in values.replace(",", " ").split()]
            if key == "reqntid":
                block = (numbers + [1, 1])[0], (numbers + [1, 1])[1], (numbers + [1, 1])[2]
            elif key == "maxntid":
                max_threads = numbers[0] * (numbers + [1, 1])[1] * (numbers + [1, 1])[2]
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
            size = _type_bits(type_match.group(1)) // 8
            explicit = None if ".ptr" in attrs else re.search(r"\.align\s+(\d+)", attrs)
            align = int(explicit.group(1)) if explicit else size
            size *= int(count or 1)
            offset = -(-offset // align) * align
            params.append(Param(name, offset, size, align))
            offset += size
        return tuple(params)

    def open_scope(self) -> None:
        path = (*self.scopes[-1].path, self.num_scopes) if self.scopes else (0,)
        self.num_scopes += 1
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
            self.labels[self.scopes[-1].path, match.group(1)] = len(self.body)
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
        bits = _type_bits(match.group(1))
        for name in match.group(2).split(","):
            ranged = re.match(rf"\s*({_NAME})<(\d+)>\s*$", name)
            if ranged:
                self.scopes[-1].ranges[ranged.group(1)] = (self.num_slots, bits)
                self.num_slots += int(ranged.group(2))
            else:
                self.scopes[-1].names[name.strip()] = Reg(self.num_slots, bits, name.strip())
                self.num_slots += 1

    def resolve(self, name: str) -> Operand:
        """A register of the innermost scope that declares it, else a symbol."""
        if name == "_":
            return Sink()
        ranged = re.fullmatch(r"(.*?\D)(\d+)", name)
        for scope in reversed(self.scopes):
            if name in scope.names:
                return scope.names[name]
            if ranged and ranged.group(1) in scope.ranges:
                first, bits = scope.ranges[ranged.group(1)]
                return Reg(first + int(ranged.group(2)), bits, name)
        return Symbol(name, self.scopes[-1].path)

    def instr(self, line: int, text: str) -> Instr:
        match = _INSTR.fullmatch(text)
        if not match:
            raise PtxSyntaxError(line, f"not an instruction: `{text}`")
        negated, guard_name, opcode, rest = match.groups()
        guard = self.resolve(guard_name) if guard_name else None
        if guard is not None and not isinstance(guard, Reg):
            raise PtxSyntaxError(line, f"unknown guard `{guard_name}`")
        operands = _Operands(self, line, rest).all()
        return Instr(line, " ".join(text.split()), opcode, operands, guard, bool(negated))


class _Operands:
    """The comma-separated operands of one instruction."""

    def __init__(self, parser: _Parser, line: int, text: str) -> None:
        self.parser, self.line, self.text = parser, line, text
        self.tokens: list[str] = []
        pos = 0
        while text[pos:].strip():
            match = _TOKEN.match(text, pos)
            if not match:
                raise PtxSyntaxError(line, f"unreadable operand text `{text[pos:]}`")
            self.tokens.append(match.group(1))
            pos = match.end()

    def peek(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def take(self, expected: str | None = None) -> str:
        if not self.tokens or (expected and self.tokens[0] != expected):
            raise PtxSyntaxError(self.line, f"`{expected or 'an operand'}` is missing in `{self.text}`")
        return self.tokens.pop(0)

    def all(self) -> tuple[Operand, ...]:
        operands = []
        while self.tokens:
            operands.append(self.operand())
            if self.tokens:
                self.take(",")
        return tuple(operands)

    def operand(self) -> Operand:
        token = self.take()
        if token == "[":
            return self.memory()
        if token == "{":
            return Vec(self.list_until("}"))
        if token == "!":
            return Not(self.operand())
        first = self.atom(token)
        if self.peek() == "|":
            self.take()
            return Pair(first, self.atom(self.take()))
        return first

    def list_until(self, close: str) -> tuple[Operand, ...]:
        items = []
        while self.peek() != close:
            items.append(self.operand())
            if self.peek() != close:
                self.take(",")
        self.take(close)
        return tuple(items)

    def memory(self) -> Operand:
        base = self.atom(self.take())
        offset = 0
        coords: tuple[Operand, ...] = ()
        if self.peek() == "+":
            self.take()
        if re.fullmatch(r"-?\d+", self.peek()):
            offset = int(self.take())
        if self.peek() == ",":
            self.take()
            self.take("{")
            coords = self.list_until("}")
        self.take("]")
        return Mem(base, offset, coords)

    def atom(self, token: str) -> Operand:
        if re.match(r"0[fFdD]", token):
            return Imm(int(token[2:], 16))
        if re.match(r"-?\d", token):
            return Imm(int(token.rstrip("U"), 0))
        return self.parser.resolve(token)

"""The operands of one instruction: text -> records of `syntax`."""

from __future__ import annotations

import re
from collections.abc import Callable

from jax_bwgemm.emulator.errors import PtxSyntaxError
from jax_bwgemm.emulator.syntax import Imm, Mem, Not, Operand, Operands, Pair, Vec

MAX_NESTING = 64  # of brackets, in one instruction
MAX_DIGITS = 20  # of 64 bits
_TOKEN = re.compile(r"\s*(0[fFdD][0-9a-fA-F]+|-?0[xX][0-9a-fA-F]+U?|-?\d+U?|[%$A-Za-z_][\w$.]*|[\[\]{}(),+|!<>=])")


class Reader:
    """The comma-separated operands of one instruction."""

    def __init__(self, resolve: Callable[[str], Operand], line: int, text: str) -> None:
        self.resolve, self.line, self.text = resolve, line, text
        self.tokens: list[str] = []
        self.depth = 0
        pos, end = 0, len(text.rstrip())
        while pos < end:
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

    def all(self) -> Operands:
        operands = []
        while self.tokens:
            operands.append(self.operand())
            if self.tokens:
                self.take(",")
        return Operands(operands)

    def operand(self) -> Operand:
        token = self.take()
        self.depth += token in "[{!"
        if self.depth > MAX_NESTING:
            raise PtxSyntaxError(self.line, f"operands require a depth of at most {MAX_NESTING}")
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
            offset = self.number(self.take())
            if not -(1 << 31) <= offset < 1 << 31:
                raise PtxSyntaxError(self.line, f"an offset requires 32 bits, got {offset}")
        if self.peek() == ",":
            self.take()
            self.take("{")
            coords = self.list_until("}")
        self.take("]")
        return Mem(base, offset, coords)

    def number(self, text: str) -> int:
        """Of 64 bits, signed or not. `0f` and `0d` are the bits of a float, a leading 0 says octal."""
        negative, digits = text.startswith("-"), text.lstrip("-").rstrip("U")
        base = 16 if digits[:2].lower() in ("0x", "0f", "0d") else 8 if digits[0] == "0" else 10
        if len(digits) > MAX_DIGITS + 3 or (base == 8 and set(digits) & {"8", "9"}):
            raise PtxSyntaxError(self.line, f"`{text}` is no number")
        value = int(digits[2:] if base == 16 else digits, base)
        if value >= 1 << 64 or (negative and value > 1 << 63):
            raise PtxSyntaxError(self.line, f"a number requires at most 64 bits, got `{text}`")
        return -value if negative else value

    def atom(self, token: str) -> Operand:
        if token[0].isdigit() or token[0] == "-":
            return Imm(self.number(token))
        if not re.fullmatch(r"[%$A-Za-z_][\w$.]*", token):
            raise PtxSyntaxError(self.line, f"`{token}` stands where an operand is required in `{self.text}`")
        return self.resolve(token)

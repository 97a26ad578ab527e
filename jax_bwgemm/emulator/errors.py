"""What the emulator raises. A `Fault` is the kernel's mistake; the others are the caller's or the emulator's limits."""

from __future__ import annotations

import dataclasses


class EmulatorError(Exception):
    """Base of everything that the emulator raises on purpose."""


class PtxSyntaxError(EmulatorError):
    """Text that the front end cannot read."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"PTX line {line}: {message}")
        self.line = line


class UnsupportedInstruction(EmulatorError):
    """An opcode, modifier or operand form that no handler claims: never guessed."""

    def __init__(self, line: int, text: str, reason: str) -> None:
        super().__init__(f"PTX line {line}: `{text}`: {reason}")
        self.line = line


class LaunchError(EmulatorError):
    """Launch facts that do not fit the kernel."""


@dataclasses.dataclass(frozen=True)
class Where:
    """A place in a running kernel."""

    line: int
    text: str
    cta: int
    warp: int

    def __str__(self) -> str:
        return f"CTA {self.cta} warp {self.warp}, PTX line {self.line}: `{self.text}`"


class Fault(EmulatorError):
    """A rule that the kernel broke. `rule` is a stable short name; `where` the instruction that was executing."""

    def __init__(self, rule: str, message: str, where: Where | None = None) -> None:
        super().__init__(f"[{rule}] {message}" + (f"\n  at {where}" if where else ""))
        self.rule = rule
        self.message = message
        self.where = where

"""A benchmark's result: its file format, its limit, its tables. Measures nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jax_bwgemm.arch import Arch
from jax_bwgemm.problem import Problem

FORMAT = 1
HEADINGS = ("shape m x n x k", "ours us", "jnp.dot us", "ratio", "TFLOP/s", "of limit", "rel. error ours / jnp.dot")


@dataclasses.dataclass(frozen=True)
class Row:
    """One shape. Times are medians; low and high bound the middle half of the rounds. `ratio` > 1: ours is faster."""

    shape: str
    variant: str
    rotation: int
    ours_us: float
    ours_low_us: float
    ours_high_us: float
    peer_us: float
    peer_low_us: float
    peer_high_us: float
    limit_us: float
    tflops: float
    ours_error: float
    peer_error: float
    clock: dict[str, str]

    @property
    def ratio(self) -> float:
        return self.peer_us / self.ours_us

    @property
    def of_limit(self) -> float:
        return self.limit_us / self.ours_us


@dataclasses.dataclass(frozen=True)
class Result:
    """One run. `handler` holds medians in microseconds over `calls` Executes, or is empty."""

    arch: str
    method: str
    rounds: int
    machine: dict[str, str]
    handler: dict[str, float]
    rows: tuple[Row, ...]
    skipped: dict[str, str]


def limit_us(problem: Problem, arch: Arch) -> float:
    """No kernel is faster than the tensor cores' peak or than reading and writing every operand once."""
    return max(problem.flops / (arch.peak_tflops * 1e6), problem.min_bytes / (arch.memory_tb_per_s * 1e6))


def save(result: Result, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT} | dataclasses.asdict(result), indent=1) + "\n")


def load(path: Path) -> Result:
    """Raises ValueError for a file of another format, or with missing or unknown keys."""
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        found = fields.pop("format", None)
        if found != FORMAT:
            raise ValueError(f"format {FORMAT}, got {found!r}")
        fields["rows"] = tuple(Row(**row) for row in fields["rows"])
        return Result(**fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a result file requires what this version of `bench` writes, got {path}: {error}") from error


def cells(row: Row) -> tuple[str, ...]:
    """One table line, under HEADINGS."""
    return (
        row.shape,
        f"{row.ours_us:.1f}",
        f"{row.peer_us:.1f}",
        f"{row.ratio:.3f}",
        f"{row.tflops:.0f}",
        f"{100 * row.of_limit:.0f} %",
        f"{row.ours_error:.2e} / {row.peer_error:.2e}",
    )


def markdown(result: Result) -> str:
    """The table for README.md, with the conditions under it."""
    lines = [HEADINGS, tuple("---" if i == 0 else "---:" for i in range(len(HEADINGS))), *map(cells, result.rows)]
    table = ["| " + " | ".join(line) + " |" for line in lines]
    skipped = [f"Not measured: {shape}: {reason}" for shape, reason in result.skipped.items()]
    return "\n".join([*table, "", conditions(result), *skipped])


def conditions(result: Result) -> str:
    """One paragraph: how and on what the numbers were taken."""
    known = [f"{name} {value}" for name, value in result.machine.items() if name != "name"]
    text = f"{result.machine.get('name', result.arch)}, {', '.join(known)}. {result.method}, median of {result.rounds} "
    text += "alternating rounds, bfloat16, standard normal inputs. Ratio: jnp.dot's time over ours."
    if result.handler:
        own, total, calls = (result.handler[name] for name in ("own_us", "total_us", "calls"))
        text += f" Launch handler over {calls:.0f} calls: median {total:.2f} us, {own:.2f} us without cuLaunchKernelEx."
    return text

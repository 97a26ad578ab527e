"""A benchmark's result: its file format, its limits and its summary. Measures and draws nothing."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_bwgemm.bench.cases import Case
from jax_bwgemm.bench.peers import FLAG_SETS
from jax_bwgemm.facts.arch import Arch

FORMAT = 3
BEHIND = 0.97  # a ratio below this is counted in the summary
EXACT = 1e-12  # far below any dtype's relative error


@dataclasses.dataclass(frozen=True)
class Times:
    """Of one product: `us` is the median, low and high bound the middle half of the rounds.

    `error` is relative, against float64; `config` is the fastest of the product's, if it has several; `calls` are the
    custom calls and library fusions of the compiled program.
    """

    us: float
    low: float
    high: float
    error: float
    config: str = ""
    calls: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """One case. `variant` names our kernels, separated by commas; it is empty if ours ran XLA's, for the reason
    `fallback`. `unavailable` are the peers that were not measured, and why. Ratios > 1: ours is faster.

    Times are medians over `processes`, each of which compiled anew.

    `temperature_c` is that behind the last round, 0 if unknown. There is no clock: a burst is over before nvidia-smi
    answers, and what it says of a GPU at rest is another. A `Load` has one.
    """

    shape: str
    variant: str
    fallback: str
    rotation: int
    rounds: int
    limit_us: float
    ours: Times
    peers: dict[str, Times]
    unavailable: dict[str, str]
    temperature_c: float
    processes: int = 1

    @property
    def case(self) -> Case:
        return Case.from_str(self.shape)

    @property
    def default(self) -> Times:
        return self.peers["default"]

    @property
    def best(self) -> tuple[str, Times]:
        """(the set of flags, its times): XLA's fastest, by median."""
        return min(((name, self.peers[name]) for name in FLAG_SETS if name in self.peers), key=lambda x: x[1].us)

    @property
    def to_default(self) -> float:
        return self.default.us / self.ours.us

    @property
    def to_best(self) -> float:
        return self.best[1].us / self.ours.us

    @property
    def to_pallas(self) -> float | None:
        """None where Pallas was not measured."""
        return self.peers["pallas"].us / self.ours.us if "pallas" in self.peers else None

    @property
    def of_limit(self) -> float:
        return self.limit_us / self.ours.us

    @property
    def error_ratio(self) -> float:
        """Our relative error over the default peer's; 1 where neither has any, as for integers."""
        return (self.ours.error + EXACT) / (self.default.error + EXACT)


@dataclasses.dataclass(frozen=True)
class Load:
    """One product under continuous load, with the means of `samples` taken once a second, and their highest
    temperature."""

    shape: str
    product: str
    seconds: float
    tflops: float
    clock_mhz: float
    power_w: float
    temperature_c: float
    samples: int


@dataclasses.dataclass(frozen=True)
class Result:
    """One run. Behind each measurement of a row the GPU rested `pause` times as long; 0: it did not. `handler` holds
    medians in microseconds over `calls` Executes, or is empty. `skipped`: shapes that ours or XLA's default failed to
    compute, and how."""

    arch: str
    method: str
    pause: float
    machine: dict[str, str]
    handler: dict[str, float]
    rows: tuple[Row, ...]
    skipped: dict[str, str]
    sustained: tuple[Load, ...] = ()


@dataclasses.dataclass(frozen=True)
class Summary:
    """Geometric means of the ratios of all rows, and how many are below BEHIND against XLA's best."""

    rows: int
    to_default: float
    to_best: float
    behind_best: int


def summary(rows: Sequence[Row]) -> Summary:
    """Of at least one row; one that XLA computed for us counts as what it took."""
    to_default, to_best = [row.to_default for row in rows], [row.to_best for row in rows]
    behind = sum(ratio < BEHIND for ratio in to_best)
    return Summary(len(rows), statistics.geometric_mean(to_default), statistics.geometric_mean(to_best), behind)


def limits_us(case: Case, arch: Arch) -> tuple[float, float]:
    """(compute, memory): the tensor cores' peak at the highest clock, and moving every operand once at the rate of the
    device's record (of an H200, a copy's). What mostly reads, and finds a part in the L2 cache, may be faster than the
    latter. Compute is 0 where the tensor cores have no such instruction."""
    peak_flops_per_us = arch.num_sms * arch.clock_ghz * 1e3 * arch.flops_per_clk(case.dtype)
    compute_us = case.flops / peak_flops_per_us if peak_flops_per_us else 0.0
    return compute_us, case.min_bytes / (arch.memory_tb_per_s * 1e6)


def save(result: Result, path: Path) -> None:
    """The summary is written for readers of the file; `load` makes it anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"format": FORMAT, "summary": dataclasses.asdict(summary(result.rows))}
    path.write_text(json.dumps(head | dataclasses.asdict(result), indent=1) + "\n")


def load(path: Path) -> Result:
    """Raises ValueError for a file of another format, or with missing or unknown keys."""
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        found = fields.pop("format", None)
        if found != FORMAT:
            raise ValueError(f"format {FORMAT}, got {found!r}")
        del fields["summary"]
        fields["rows"] = tuple(_row(row) for row in fields["rows"])
        fields["sustained"] = tuple(Load(**load) for load in fields["sustained"])
        return Result(**fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a result file requires what this version of `bench` writes, got {path}: {error}") from error


def _row(fields: dict[str, Any]) -> Row:
    peers = {name: _times(times) for name, times in fields["peers"].items()}
    row = Row(**fields | {"ours": _times(fields["ours"]), "peers": peers})
    case = row.case  # ValueError if the shape is none
    if "default" not in peers:
        raise ValueError(f"times of XLA under its default flags for {case}, got {', '.join(peers) or 'none'}")
    return row


def _times(fields: dict[str, Any]) -> Times:
    return Times(**fields | {"calls": tuple(fields["calls"])})

"""What is asked of the ladder of `attempts`, what stands on it, and what that is priced at."""

from __future__ import annotations

import dataclasses
import math

from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.symbols import Symbols
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner import parts
from jax_bwgemm.planner.candidates import Candidate
from jax_bwgemm.planner.plan import Plan
from jax_bwgemm.planner.routes import Pair, Route
from jax_bwgemm.runtime.artifacts import Entry

CLEARLY = 1.05  # a fused kernel gives way only to what is predicted to be faster by more than the model's median error


@dataclasses.dataclass(frozen=True)
class Asked:
    """A product and who wants it: `is_transpose` as `routes` takes it, the others as `decide`; with `compiles`, a
    kernel that no rung has at hand may be compiled. `batch_invariant`: no rung is preferred for its price, which the
    number of rows enters. `symbols`: what the sizes stand for, where a program is exported."""

    problem: Problem
    device: str | None
    tile: Tile | None = None
    is_emulated: bool = False
    compiles: bool = False
    is_transpose: Pair = (False, False)
    batch_invariant: bool = False
    symbols: Symbols | None = None
    shares_device: bool = False


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A rung, of which `plan` says what it would run.

    `entry` is the kernel. Without one, the attempt `is_missing`, and has its kernel compiled; or it is XLA's, and
    `reason` says why. That it is expected to be done sooner than any tile of our lists (`is_sooner`) is no fallback; of
    a gated product that `is_composed`, both its products are then chosen alone. One that is XLA's `for_its_sizes`,
    though a kernel is at hand, need not be where a mesh divides it. With an entry, `reason` says why XLA has the
    epilogue, if the kernel is not `is_fused`. Of several `parts` of k, whose products the route and the plan are of,
    XLA has the sum, too. `us` is the price: of the kernel and of all passes over device memory that go with it.
    """

    route: Route
    plan: Plan | None = None
    entry: Entry | None = None
    is_fused: bool = True
    is_missing: bool = False
    is_composed: bool = False
    is_sooner: bool = False
    for_its_sizes: bool = False
    parts: int = 1
    us: float = 0.0
    reason: str | None = None

    @property
    def problem(self) -> Problem:
        """What the kernel computes, or parts of which it computes."""
        return self.route.problem if self.parts == 1 else parts.whole(self.route.problem)


@dataclasses.dataclass(frozen=True)
class Ladder:
    """In the order in which they are made, XLA's last. `considered`: the products whose kernels were judged. `illegal`:
    why the user's tile computes one of them in no way."""

    attempts: tuple[Attempt, ...]
    considered: tuple[Problem, ...] = ()
    illegal: str | None = None


def us_of(candidate: Candidate, is_measured: bool) -> float:
    """With what pads its operands; infinite where there is no such time."""
    if candidate.cost is None or (is_measured and candidate.measured_us is None):
        return math.inf
    return candidate.cost.us if not is_measured else (candidate.measured_us or 0.0) + candidate.cost.padding_us


def launched_us(us: float, plan: Plan) -> float:
    """With the launch, which a predicted time has and a measured one has not: what times of both kinds are compared
    by."""
    return us + (plan.arch.constants.launch_us if plan.record is not None else 0.0)


def least_us(plan: Plan | None) -> float:
    """What the best tile of our lists takes that XLA has, too, whether its cubin is there or not; as the plan's choice
    was made, by what was measured or by what is predicted."""
    tiles = plan.candidates if plan else ()
    candidates = (c for c in tiles if not (c.tile.symmetric or c.tile.direct or c.tile.by_rows))
    return min(
        (us_of(candidate, plan is not None and plan.record is not None) for candidate in candidates), default=math.inf
    )


def is_as_good_as_any(attempt: Attempt) -> bool:
    """No other way of computing the product is predicted to gain."""
    return attempt.us <= CLEARLY * least_us(attempt.plan)

"""`explain`: which kernel a `matmul` would run and why, as text, on any machine. Runs and compiles nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jax_bwgemm.arch import family
from jax_bwgemm.config import resolve
from jax_bwgemm.decision import decide
from jax_bwgemm.matmul import checked_params, stack
from jax_bwgemm.plan import Candidate, Plan
from jax_bwgemm.problem import DTYPE_BYTES, Problem
from jax_bwgemm.shape_rules import matmul_shape
from jax_bwgemm.tile import Tile, why_not_dtypes


@dataclasses.dataclass(frozen=True)
class Explanation:
    """`plan` is None without a device to plan for; `variant` is None if XLA takes over, and `reason` then says why.

    `emulate` is the target whose kernels run in the emulator, or "off".
    """

    problem: Problem
    plan: Plan | None = None
    variant: str | None = None
    reason: str | None = None
    emulate: str = "off"

    def __str__(self) -> str:
        size = f"{self.problem.flops / 1e9:.4g} GFLOP, {self.problem.min_bytes / 1e6:.4g} MB"
        candidates = _candidate_lines(self.plan) if self.plan else []
        return "\n".join([f"{self.problem} ({size})", *candidates, *self._verdict()])

    def _verdict(self) -> list[str]:
        if self.variant is None:
            return [f"runs XLA's dot_general, because {self.reason}"]
        if self.emulate != "off":
            where = f"in the emulator of {self.emulate}; on CUDA `emulate` is refused"
        else:
            where = "whose cubin is present"
        return [f"runs {self.variant}, {where}", *_choice_lines(self.plan)]


def explain(
    a: Any,
    b: Any,
    *,
    out_dtype: Any = None,
    alpha: float = 1.0,
    bias: Any = None,
    activation: str | None = None,
    tile: Tile | str | None = None,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
) -> Explanation:
    """What `matmul` with the same arguments would run on a GPU, or in the emulator, and why: print it.

    Args:
      a: array, tracer or `jax.ShapeDtypeStruct`; only its shape and dtype are read.
      b: the same.
      out_dtype: as for `matmul`; so are alpha, bias, activation, tile and on_fallback.
      device: "h100", "h200", "b200" or "b300"; None for the `config`'s, else the CUDA device of this process.
      emulate: "sm_90a", "sm_100a", "sm_103a" or "off"; None for the `config`'s.

    Returns:
      An `Explanation`; its `str` shows the problem, each candidate tile with its predicted time or the reason why it
      is out, what was chosen and why, or which fallback runs and why.

    Raises:
      As `matmul`.

    Example:
      >>> x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
      >>> print(jax_bwgemm.explain(x, x, device="b200"))
    """
    matmul_shape(a.shape, b.shape)
    params = checked_params(a, b, out_dtype=out_dtype, alpha=alpha, bias=bias, activation=activation, tile=tile)
    problem = _problem(a, b, bias, params)
    if reason := why_not_dtypes(problem):
        return Explanation(problem, reason=reason)
    settings = resolve(on_fallback, device, emulate)
    decision = decide(problem, settings.planned_device, params["tile"], settings.is_emulated)
    variant = decision.entry.name if decision.entry else None
    return Explanation(problem, decision.plan, variant, decision.reason, settings.emulate)


def _problem(a: Any, b: Any, bias: Any, params: dict[str, Any]) -> Problem:
    problems = []

    def pose(a: jax.Array, b: jax.Array) -> None:
        problems.append(stack(a, b).problem(bias, params))

    jax.eval_shape(pose, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b)))
    return problems[0]


def _candidate_lines(plan: Plan) -> list[str]:
    width = max(len(str(candidate.tile)) for candidate in plan.candidates)
    head = f"{'on ' + plan.arch.name:<{width + 3}} {'predicted':>12} {'of peak':>8} {'waves':>6}  bound by"
    return [head, *(_candidate_line(candidate, plan, width) for candidate in plan.candidates)]


def _candidate_line(candidate: Candidate, plan: Plan, width: int) -> str:
    mark = "->" if candidate.tile == plan.tile else "  "
    line = f"{mark} {candidate.tile!s:<{width}}"
    if c := candidate.cost:
        line += f" {c.us:9.1f} us {100 * c.utilisation:6.1f} % {c.waves:6d}  {c.bound:<12}"
        return (line + ("  cubin not available" if candidate.reason else "")).rstrip()
    return line + f"  out: {candidate.reason}"


def _choice_lines(plan: Plan | None) -> list[str]:
    if plan is None or plan.tile is None:
        return []
    along = "columns" if plan.raster_along_n else "rows"
    return [
        f"  tile:  {_why_tile(plan)}",
        f"  pairs: {_why_cta_group(plan.tile, plan)}",
        f"  order: groups of {plan.raster_group} {along} of cluster tiles, so that concurrent ones share the L2 cache",
    ]


def _why_tile(plan: Plan) -> str:
    mine = next(c.cost for c in plan.candidates if c.tile == plan.tile)
    rivals = [(c.cost.us, c) for c in plan.candidates if c.cost and c.tile != plan.tile]
    if mine is None or not rivals:
        return "the only candidate"
    us, best = min(rivals, key=lambda rival: rival[0])
    if us >= mine.us:
        return f"predicted to be the fastest, {us - mine.us:.1f} us before {best.tile}"
    if best.reason is None:
        return f"as fast as {best.tile} within the model's error, and reads less from the L2 cache"
    return f"the best whose cubin is available; {best.tile} would be {mine.us - us:.1f} us faster"


def _why_cta_group(tile: Tile, plan: Plan) -> str:
    if family(plan.arch.target) == "hopper":
        return "1-CTA; pairs came with Blackwell"
    if tile.cta_group == 1:
        return "1-CTA; no pair is predicted to be faster here"
    kib = tile.load_n * tile.k_tile * DTYPE_BYTES[plan.problem.b_dtype] // 1024
    return f"2-CTA; each CTA of a pair loads half of B ({kib} KiB a stage) and one instruction feeds both"

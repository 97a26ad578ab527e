"""`emulate`: one product on the PTX emulator, on any machine, under hostile schedules and against float64."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jax_bwgemm.cli.explain import DTYPES
from jax_bwgemm.cli.outputs import check_file
from jax_bwgemm.facts.arch import ARCHS, TARGETS, by_name
from jax_bwgemm.facts.epilogue import ACTIVATIONS, chain
from jax_bwgemm.facts.legality import why_not
from jax_bwgemm.facts.problem import A_MAJORS, B_MAJORS, C_MAJORS, INT8_DTYPES, Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import variant_for
from jax_bwgemm.runtime import jit_build
from jax_bwgemm.runtime.config import Config

if TYPE_CHECKING:
    from jax_bwgemm.runtime.decision import Decision
    from jax_bwgemm.runtime.emulated import Kernel

HELP = "run a kernel in the PTX emulator: error, counts, trace and timeline; needs no GPU"
SCHEDULES = ("eager", "lazy", "loads-eager", "mmas-eager", "random")
_MAJORS = [x + y + z for z in ("", *C_MAJORS) for x in A_MAJORS for y in B_MAJORS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default="sm_100f", choices=TARGETS, help="(default: %(default)s)")
    parser.add_argument("--cta-group", type=int, choices=(1, 2), help="only tiles of one CTA, or of a pair")
    parser.add_argument("--tile", help="for example 256x256x64_cta2_cluster2x1 (default: the planner's)")
    parser.add_argument("--shape", default="512x512x256", metavar="[BATCH*]MxNxK", help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="of the operands")
    parser.add_argument("--b-dtype", choices=DTYPES, help="of the second operand, if it differs")
    parser.add_argument("--out-dtype", choices=DTYPES, help="of the result (default: that of a; int32 for integers)")
    parser.add_argument("--majors", default="kn", choices=_MAJORS, help="contiguous dimensions of a, b and the result")
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--activation", choices=ACTIVATIONS)
    parser.add_argument("--device", choices=ARCHS, help="planned for (default: one of the target's)")
    parser.add_argument("--clusters", type=int, metavar="N", help="that run at once; 1: one walks all tiles")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="of inputs and schedules")
    parser.add_argument("--schedule", choices=SCHEDULES, help="when asynchronous work completes (default: each)")
    parser.add_argument("--counts", action="store_true", help="what each CTA and each output tile takes")
    parser.add_argument("--trace", nargs="?", const="0:0", metavar="CTA:WARP", help="print what this warp executes")
    parser.add_argument("--timeline", type=Path, metavar="OUT.json", help="write a trace for ui.perfetto.dev")


def run(args: argparse.Namespace) -> int:
    from jax_bwgemm.cli import emulate_runs as runs
    from jax_bwgemm.emulator import EmulatorError

    for name in ("seeds", "clusters"):
        if (number := getattr(args, name)) is not None and number < 1:
            raise ValueError(f"`--{name}` requires at least 1, got {number}")
    if args.timeline:
        check_file(args.timeline)
    problem = _problem(args)
    kernel = _kernel(args, problem)
    watched, schedule = _place(args.trace, kernel), runs.schedules(args.schedule, 0)[-1]
    print(f"{kernel.entry.name}\n{problem} on grid {'x'.join(map(str, kernel.plan.grid))}")
    try:
        if watched:
            runs.trace(kernel, schedule, *watched)
        if args.timeline:
            runs.timeline(kernel, schedule, args.timeline)
        results = list(runs.results(kernel, args.schedule, args.seeds))
    except EmulatorError as error:
        print(f"the emulator stopped the kernel: {error}", file=sys.stderr)
        return 1
    runs.show(results)
    if args.counts:
        runs.show_counts(kernel, results[-1].counters)
    return 0 if all(result.is_right for result in results) else 1


def _problem(args: argparse.Namespace) -> Problem:
    match = re.fullmatch(r"(?:([1-9]\d*)\*)?([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", args.shape)
    if match is None:
        raise ValueError(f"`--shape` requires the form [BATCH*]MxNxK, got {args.shape!r}")
    batch, *sizes = (int(size or 1) for size in match.groups())
    m, n, k = sizes
    a_dtype, b_dtype = DTYPES[args.dtype], DTYPES[args.b_dtype or args.dtype]
    own_dtype = "int32" if a_dtype in INT8_DTYPES else a_dtype
    out_dtype = DTYPES[args.out_dtype] if args.out_dtype else own_dtype
    a_major, b_major, c_major = (args.majors + "n")[:3]
    if not abs(args.alpha) <= float(np.finfo(np.float32).max):  # nor is NaN
        raise ValueError(f"`--alpha` requires a number that is finite in float32, got {args.alpha:g}")
    epilogue = chain(args.alpha, args.bias, args.activation)  # of the caller's product: its bias lies along rows
    epilogue = epilogue if c_major == "n" else epilogue.transposed
    dtypes, majors = (a_dtype, b_dtype, out_dtype), (a_major, b_major)
    return Problem(m, n, k, batch, *dtypes, *majors, batch, batch, epilogue, c_major)


def _kernel(args: argparse.Namespace, problem: Problem) -> Kernel:
    """The planner's choice among the tiles that the arguments leave."""
    from jax_bwgemm.runtime.decision import decide
    from jax_bwgemm.runtime.emulated import kernel_of

    device = Config(device=args.device, emulate=args.arch).planned_device
    assert device is not None  # each target that can be emulated has one
    decisions = [decide(problem, device, tile, is_emulated=True) for tile in _tiles(args, problem, device)]

    def predicted_us(decision: Decision) -> float:
        chosen = decision.plan.chosen if decision.plan and decision.entry else None
        return chosen.cost.us if chosen and chosen.cost else float("inf")

    best = min(decisions, key=predicted_us)
    if best.entry is None:
        raise ValueError(f"{best.reason}{_how_to_build(best)}")
    return kernel_of(best, problem, args.clusters)


def _tiles(args: argparse.Namespace, problem: Problem, device: str) -> list[Tile | None]:
    """What to plan with: None for all tiles."""
    if args.cta_group is None:
        return [Tile.from_str(args.tile) if args.tile else None]
    given = [Tile.from_str(args.tile)] if args.tile else _all_tiles(problem, device)
    tiles = [tile for tile in given if tile.cta_group == args.cta_group]
    if not tiles:
        what = f"the tile {args.tile}" if args.tile else args.arch
        raise ValueError(f"`--cta-group` requires {given[0].cta_group} with {what}, got {args.cta_group}")
    return [*tiles]


def _all_tiles(problem: Problem, device: str) -> list[Tile]:
    """Those that can compute the problem, not its transpose; all, if none can."""
    from jax_bwgemm.planner.candidates import candidates

    found = candidates(problem, by_name(device))
    tiles = [c.tile for c in found if not c.swapped and why_not(c.tile, problem, by_name(device)) is None]
    return tiles or [c.tile for c in found]


def _how_to_build(decision: Decision) -> str:
    """A command, if all that is missing is a cubin, and the build makes one that would do."""
    plan = decision.plan
    legal = [c for c in plan.candidates if c.cost] if plan else []
    if plan is None or plan.tile is not None or not legal:
        return ""
    wanted = [variant_for(c.problem, c.tile, plan.arch.target_of(c.problem.a_dtype)) for c in legal]
    if one := jit_build.first_shipped(wanted):
        return f" (just this one: `{jit_build.COMMAND} --only '{one.name}'`)"
    return f"; {jit_build.NOT_SHIPPED}: give another tile, epilogue, dtype or other majors"


def _place(text: str | None, kernel: Kernel) -> tuple[int, int] | None:
    """(CTA, warp) to trace."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        raise ValueError(f"`--trace` requires the form CTA:WARP, got {text!r}")
    cta, warp = map(int, match.groups())
    num_ctas, num_warps = int(np.prod(kernel.plan.grid)), kernel.entry.num_threads // 32
    if cta >= num_ctas or warp >= num_warps:
        raise ValueError(f"`--trace` requires a CTA below {num_ctas} and a warp below {num_warps}, got {text}")
    return cta, warp

"""`bench --orders`: what the planner's order of tiles, and what it asks of the L2 cache, lose against others.

The planner's kernel of each product runs in every order (`planner/order`), and with and without its larger operand let
go first. The result file has all times, for whoever changes those rules.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_bwgemm.bench import kernel_times, machine, pool, regret
from jax_bwgemm.bench.candidates import gpu_arch, gpu_clock
from jax_bwgemm.bench.finals import order_name, orders
from jax_bwgemm.cli.drawing import progress_bar
from jax_bwgemm.facts.arch import Arch, by_name
from jax_bwgemm.facts.geometry import operand_bytes
from jax_bwgemm.facts.padding import padding
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner.cost import roofline_us
from jax_bwgemm.planner.plan import Plan
from jax_bwgemm.runtime.decision import decide

FORMAT = 1
LEAST, LEAST_TERMS, MOST_US = 64, 256, 250.0  # rows and columns, and terms; of the roofline
DRAWN = 8  # products for each that is kept


def main(
    num: int, seed: int, rounds: int, path: Path | None, commit: str, of: str = "all", num_processes: int = 1
) -> int:
    """`of`: one of `regret.SAMPLES`; of "all", half are layers."""
    if num < 1:
        raise ValueError(f"`--orders` requires at least 1, got {num}")
    pool.share_memory(num_processes)
    arch = gpu_arch("`bench --orders`")
    path = machine.result_path(path, "orders", arch.name)
    facts = {"arch": arch.name, "seed": seed, "rounds": rounds, "machine": machine.describe(commit)}
    problems, found = sample(num, seed, arch, of), dict[int, dict[str, Any]]()
    if not problems:
        raise ValueError(f"`--orders` requires bfloat16 products of some size that TMA loads, got none of `--of {of}`")
    time = functools.partial(measure, arch=arch, rounds=rounds)
    with progress_bar("products") as progress:
        for num_done, (i, times) in enumerate(pool.each(time, problems, num_processes)):
            if times:
                found[i] = times
                lines = ",\n".join(json.dumps(found[i]) for i in sorted(found))
                head = json.dumps({"format": FORMAT, "facts": facts}).removesuffix("}")
                path.write_text(f'{head}, "products": [\n{lines}\n]}}\n')
            progress(num_done + 1, len(problems))
    timed = list(found.values())
    if not timed:
        raise ValueError(f"`--orders` requires kernels, got none: {decide(problems[0], None, None).reason}")
    for what in ("orders", "hints"):
        statistics = regret.statistics([lost(x[what], x["chosen"][what]) for x in timed])
        said = ", ".join(f"{name} {100 * value:.1f} %" for name, value in statistics.items())
        print(f"the planner's {what} lose, against the best: {said}, of {len(timed)} products")
    print(f"wrote {path}")
    return 0


def sample(num: int, seed: int, arch: Arch, of: str = "all") -> list[Problem]:
    """At most `num` products that TMA loads and some of whose operands several tiles read."""
    if of != "all":
        return _tried(regret.SAMPLES[of](DRAWN * num, seed, arch), arch)[:num]
    anything = _tried(regret.sample(DRAWN * num, seed, arch), arch)
    layers = _tried(regret.sample_of_layers(num, seed, arch), arch)
    return list(dict.fromkeys((*anything[: num - num // 2], *layers[: num // 2])))


def _tried(problems: list[Problem], arch: Arch) -> list[Problem]:
    return [problem for problem in problems if _is_tried(problem, arch)]


def _is_tried(problem: Problem, arch: Arch) -> bool:
    is_half = problem.a_dtype == problem.out_dtype == "bfloat16"
    is_large = min(problem.m, problem.n) >= LEAST and problem.k >= LEAST_TERMS
    is_aligned = not any(padding(problem, operand) for operand in "ab")
    return is_half and is_large and is_aligned and roofline_us(problem, arch) <= MOST_US


def measure(problem: Problem, arch: Arch, rounds: int) -> dict[str, Any] | None:
    """The microseconds of the planner's kernel by orders and by hints; None where it is not at hand, or a direct one,
    which says nothing to the cache."""
    chosen = decide(problem, None, None)
    own, all_us = chosen.plan, {}
    if chosen.entry is None or own is None or own.tile is None or own.tile.direct:
        return None
    for what, plans in (("orders", orders(own)), ("hints", hints(own))):
        first, *rest = (dataclasses.replace(chosen, plan=plan) for plan in plans.values())
        # Once more in front: the GPU has rested while programs were compiled, and is slow to start.
        _, *times_us = gpu_clock(problem, [first, first, *rest], arch, rounds, most=1)
        all_us[what] = {name: round(us, 3) for name, us in zip(plans, times_us, strict=True)}
    names = {"orders": order_name(own.raster_group, own.raster_along_n), "hints": hint_name(own.a_l2, own.b_l2)}
    return {
        "problem": kernel_times.fields_of(problem),
        "tile": str(own.tile),
        "swapped": own.swapped,
        "chosen": names,
    } | all_us


def load(path: Path) -> tuple[Arch, list[tuple[Tile, Problem, dict[str, Any]]]]:
    """Of each product its tile, what the kernel sees, and what the file says."""
    fields = json.loads(path.read_text())
    found = []
    for said in fields["products"]:
        asked = kernel_times.problem_of(said["problem"])
        found.append((Tile.from_str(said["tile"]), asked.transposed if said["swapped"] else asked, said))
    return by_name(fields["facts"]["arch"]), found


def hints(plan: Plan) -> dict[str, Plan]:
    """Of the larger operand; the other one is not spoken of."""
    a, b = operand_bytes(plan.problem)
    none = dataclasses.replace(plan, a_l2="normal", b_l2="normal")
    first = dataclasses.replace(none, a_l2="evict_first") if a > b else dataclasses.replace(none, b_l2="evict_first")
    return {hint_name(x.a_l2, x.b_l2): x for x in (none, first)}


def hint_name(a_l2: str, b_l2: str) -> str:
    return "evict_first" if "evict_first" in (a_l2, b_l2) else "normal"


def lost(times_us: Mapping[str, float], chosen: str) -> float:
    """0.1 for what takes 10 % longer than the best."""
    return times_us[chosen] / min(times_us.values()) - 1

"""Compiles variants and runs them in the emulator, against float64, under hostile schedules.

    python -m tests.emu.check_variant --target sm_100f --tile 256x256x64_cta2_cluster2x1 --majors mkn --out float32
    python -m tests.emu.check_variant --target sm_90a --shipped --seeds 2

`--shipped` checks every shipped tile of the target. Exits with 1 if anything fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

from jax_bwgemm.emulator import Counters, EmulatorError, Schedule, parse
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts.arch import family_of
from jax_bwgemm.facts.shipped import SHIPPED_TILES
from jax_bwgemm.facts.tile import Tile, k_tile
from jax_bwgemm.facts.variant import Variant, why_not_variant
from jax_bwgemm.kernels.aot.compile import compile_variant
from tests.cases import Case, check_case, fused
from tests.emu.matmul import Facts, case_of, facts_of, run_matmul


def compiled(variant: Variant) -> tuple[Module, Facts]:
    """The parsed kernel and its launch facts."""
    assert why_not_variant(variant) is None, why_not_variant(variant)
    with tempfile.TemporaryDirectory() as dump:
        kernel = compile_variant(variant, Path(dump))
    return parse(kernel.ptx), facts_of(variant, kernel)


def run_case(
    module: Module, facts: Facts, case: Case, schedule: Schedule, max_clusters: int | None = 1, seed: int = 0
) -> Counters:
    """Raises what the emulator reports, or AssertionError with the error's size."""
    a, b, bias = case.inputs(seed)
    residual = case.residual(seed)
    out, counters = run_matmul(
        module, facts, a, b, case.alpha, bias, residual, max_clusters, 2, seed % 2, schedule,
        raster_order=seed // 2 % 2,
    )  # fmt: skip
    check_case(out, case.reference(a, b, bias, residual), case)
    return counters


def check(variant: Variant, shape: tuple[int, int, int], seeds: int) -> bool:
    """All schedules for each seed; prints one line a run."""
    module, facts = compiled(variant)
    good = True
    for seed in range(seeds):
        for schedule in Schedule.standard(seed):
            start = time.perf_counter()
            try:
                counters = run_case(module, facts, case_of(variant, *shape, 1, 2), schedule, 1 + seed, seed)
                verdict = f"ok, {counters.instructions} instructions, {counters.mmas} MMAs"
            except (EmulatorError, AssertionError) as error:
                good, verdict = False, f"{type(error).__name__}: {error}"
            print(f"{variant.name} {shape} {schedule.name} {time.perf_counter() - start:.2f}s {verdict}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm_100f")
    parser.add_argument("--tile", type=Tile.from_str, default=Tile(256, 256, cta_group=2, cluster_m=2))
    parser.add_argument("--shipped", action="store_true")
    parser.add_argument("--majors", default="knn", help="of a, b and the result")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--b-dtype", help="default: that of a")
    parser.add_argument("--out", default="bfloat16")
    parser.add_argument("--epilogue", default="identity")
    parser.add_argument("--store", default="tma")
    parser.add_argument("--shape", default="264,528,208", help="m,n,k")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    shipped = (tile for tile in SHIPPED_TILES[family_of(args.target).name] if not tile.promoted)
    tiles = tuple(shipped) if args.shipped else (args.tile,)
    m, n, k = map(int, args.shape.split(","))
    results = []
    for tile in tiles:
        own = dataclasses.replace(tile, k_tile=k_tile(args.dtype))
        dtypes = args.dtype, args.b_dtype or args.dtype, args.out
        node = fused(args.epilogue, args.majors[2])
        variant = Variant(args.target, *dtypes, *args.majors[:2], own, node, args.majors[2], args.store)
        results.append(check(variant, (m, n, k), args.seeds))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

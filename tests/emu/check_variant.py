"""Compiles variants and runs them in the emulator, against float64, under hostile schedules.

    python -m tests.emu.check_variant --target sm_100a --tile 256,256,64,2,2,1 --majors mk --out float32
    python -m tests.emu.check_variant --target sm_90a --shipped --seeds 2

`--shipped` checks every shipped tile of the target. Exits with 1 if anything fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from jax_bwgemm.arch import family
from jax_bwgemm.emulator import Counters, EmulatorError, Schedule, parse
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.kernels.compile import compile_variant
from jax_bwgemm.tile import SHIPPED_TILES, Tile
from jax_bwgemm.variant import Variant
from tests.cases import Case
from tests.cases import check as check_result
from tests.emu.matmul import Facts, facts_of, run_matmul


def compiled(variant: Variant) -> tuple[Module, Facts]:
    """The parsed kernel and its launch facts."""
    with tempfile.TemporaryDirectory() as dump:
        kernel = compile_variant(variant, Path(dump))
    return parse(kernel.ptx), facts_of(variant, kernel)


def case_of(variant: Variant, m: int, n: int, k: int, a_batch: int = 1, b_batch: int = 1) -> Case:
    """The problem that exercises all of a variant's epilogue."""
    return Case(
        m, n, k, max(a_batch, b_batch), variant.a_dtype, variant.out_dtype, variant.a_major, variant.b_major, a_batch,
        b_batch, 0.5 if "scale" in variant.epilogue else 1.0, "bias" in variant.epilogue,
        "relu" if "relu" in variant.epilogue else None,
    )  # fmt: skip


def run_case(
    module: Module, facts: Facts, case: Case, schedule: Schedule, max_clusters: int | None = 1, seed: int = 0
) -> Counters:
    """Raises what the emulator reports, or AssertionError with the error's size."""
    a, b, bias = case.inputs(seed)
    out, counters = run_matmul(
        module, facts, a, b, case.alpha, bias, max_clusters, 2, seed % 2, schedule, strict_tmem_wait=True
    )
    check_result(out, case.reference(a, b, bias), case.out_dtype)
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
    parser.add_argument("--target", default="sm_100a")
    parser.add_argument("--tile", default="256,256,64,2,2,1", help="mma_m,mma_n,k_tile,cta_group,cluster_m,cluster_n")
    parser.add_argument("--shipped", action="store_true")
    parser.add_argument("--majors", default="kn", help="of a and b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", default="bfloat16")
    parser.add_argument("--epilogue", default="identity")
    parser.add_argument("--shape", default="264,520,200", help="m,n,k")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    tile = Tile(*map(int, args.tile.split(",")))
    tiles = SHIPPED_TILES[family(args.target)] if args.shipped else (tile,)
    shape = tuple(map(int, args.shape.split(",")))
    results = [
        check(
            Variant(args.target, args.dtype, args.dtype, args.out, *args.majors, each, args.epilogue),
            (shape[0], shape[1], shape[2]),
            args.seeds,
        )
        for each in tiles
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

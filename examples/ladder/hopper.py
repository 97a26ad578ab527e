"""The four Hopper loops beside each other: on a GPU their times, off one their counts in the emulator.

python examples/ladder/hopper.py [--m M --n N --k K] [--json OUT] [--emulate]
python examples/ladder/hopper.py --build DIR     # where CuTeDSL is: four cubins, and what a launcher must know
python examples/ladder/hopper.py --from DIR      # where a Hopper GPU is: needs only numpy and the driver
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import _launch
import hopper_measure
from _driver import CudaError, Hang, arch

RUNGS = ("hopper_naive", "hopper_prefetch", "hopper_compiler_prefetch", "hopper_warp_specialised")
TARGET = "sm_90a"
SHAPE, SIZE_STEP = (8192, 8192, 8192), 8  # m, n, k; 16 bytes: what TMA can step over


def main() -> None:
    """Exits with an error if a product is wrong, or what was asked for cannot be run here."""
    parser, args = _arguments()
    if args.build:
        _launch.write(args.build, compiled())
        print(f"wrote {len(RUNGS)} cubins and {_launch.INDEX} to {args.build}; now `hopper.py --from` it on a GPU")
    elif args.source or (not args.emulate and _has_gpu()):
        _on_gpu(args, _launch.read(args.source) if args.source else compiled())
    elif args.json:
        parser.error(f"`--json` requires a GPU of {TARGET}, got none: it holds what was measured")
    else:
        _in_the_emulator()


def _arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description="The four Hopper loops beside each other.")
    for name, size in zip("mnk", SHAPE, strict=True):
        parser.add_argument(f"--{name}", type=int, default=size, help=f"on a GPU; a multiple of {SIZE_STEP}")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--build", type=Path, metavar="DIR", help="compile only, into this folder")
    where.add_argument("--from", type=Path, metavar="DIR", dest="source", help="run what --build wrote")
    where.add_argument("--emulate", action="store_true", help="in the emulator, even where there is a GPU")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write what was measured")
    parser.add_argument("--commit", default="", help="for --json: the commit that was measured")
    args = parser.parse_args()
    sizes = [args.m, args.n, args.k]
    if any(size <= 0 or size % SIZE_STEP for size in sizes):
        parser.error(f"`--m --n --k` require positive multiples of {SIZE_STEP}, got {sizes}")
    return parser, args


def compiled() -> list[tuple[_launch.Facts, bytes]]:
    """By CuTeDSL, which needs no GPU."""
    try:
        from _common import compile_rung, rung_of
    except ImportError as error:
        raise SystemExit(
            f"compiling requires CuTeDSL and jax_bwgemm ({error}): `--build` elsewhere, then `--from`"
        ) from error
    rungs = [rung_of(name) for name in RUNGS]
    return [(rung.facts(compile_rung(rung).entry), compile_rung(rung).cubin) for rung in rungs]


def _has_gpu() -> bool:
    try:
        return arch() == TARGET
    except CudaError:
        return False


def _on_gpu(args: argparse.Namespace, programs: hopper_measure.Programs) -> None:
    try:
        result = hopper_measure.measure(programs, (args.m, args.n, args.k), args.commit)
    except Hang as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)  # the driver would wait for the kernel
    except CudaError as error:
        raise SystemExit(f"the loops require a GPU of {TARGET} and its driver, got: {error}") from error
    hopper_measure.show(result)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def _in_the_emulator() -> None:
    try:
        import hopper_table
    except ImportError as error:
        raise SystemExit(f"no GPU of {TARGET}, and the emulator requires CuTeDSL and jax_bwgemm: {error}") from error
    print(f"no {TARGET} GPU is used: in the emulator, {'x'.join(map(str, hopper_table.SHAPE))}, loads and MMAs late\n")
    print(hopper_table.table(RUNGS))


if __name__ == "__main__":
    main()

"""`bench`: our kernels against jnp.dot on this machine's GPU, or the table of a result file."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "measure our kernels against jnp.dot, or render a result file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", metavar="[BATCH*]MxNxK[:nn|:nt|:tn]", help="default: a fixed list")
    parser.add_argument("--rounds", type=int, default=21, help="alternating rounds a shape (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="result file (default: bench/results/DEVICE.json)")
    parser.add_argument("--commit", default="", help="what was measured, for a copy outside its git checkout")
    parser.add_argument("--render", type=Path, metavar="RESULT", help="print RESULT as a markdown table; needs no GPU")


def run(args: argparse.Namespace) -> int:
    if args.render:
        from jax_bwgemm.bench import report

        print(report.markdown(report.load(args.render)))
        return 0
    from jax_bwgemm.bench import run as bench

    return bench.main(args.shapes, args.rounds, args.json, args.commit)

"""`bench`: our kernels against jnp.dot on this machine's GPU, or the table of a result file."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "measure our kernels against jnp.dot, or render a result file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", metavar="[BATCH*]MxNxK[:nn|:nt|:tn]", help="default: a fixed list")
    parser.add_argument("--rounds", type=int, default=21, help="alternating rounds a shape (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="result file (default: bench/results/DEVICE.json)")
    parser.add_argument("--tune", action="store_true", help="instead: time all kernels of --shapes for the planner")
    parser.add_argument("--table", type=Path, metavar="FILE", help="what --tune writes (default: the user's table)")
    parser.add_argument("--regret", type=int, metavar="N", help="instead: what the model's choices lose, N products")
    parser.add_argument("--seed", type=int, default=0, help="of the products of --regret (default: %(default)s)")
    parser.add_argument("--commit", default="", help="what was measured, for a copy outside its git checkout")
    parser.add_argument("--render", type=Path, metavar="RESULT", help="print RESULT as a markdown table; needs no GPU")


def run(args: argparse.Namespace) -> int:
    if args.render:
        from jax_bwgemm.bench import report

        print(report.markdown(report.load(args.render)))
        return 0
    if args.tune:
        from jax_bwgemm.bench import tune

        return tune.main(args.shapes, args.rounds, args.table, args.commit)
    if args.regret is not None:
        from jax_bwgemm.bench import regret

        return regret.main(args.regret, args.seed, args.rounds, args.json, args.commit)
    from jax_bwgemm.bench import run as bench

    return bench.main(args.shapes, args.rounds, args.json, args.commit)

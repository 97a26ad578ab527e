"""`explain M N K`: which kernel, which tile and why, for any device on any machine."""

from __future__ import annotations

import argparse

from jax_bwgemm.arch import ARCHS
from jax_bwgemm.problem import A_MAJORS, ACTIVATIONS, B_MAJORS, DTYPE_BYTES, DTYPE_SHORT, Epilogue, Problem
from jax_bwgemm.tile import Tile, why_not_dtypes

HELP = "say which kernel would compute a product, and why"
DTYPES = {short: name for name, short in DTYPE_SHORT.items()} | {name: name for name in DTYPE_BYTES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for size in ("m", "n", "k"):
        parser.add_argument(size, type=int, metavar=size.upper())
    parser.add_argument("--device", default="h200", choices=ARCHS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="of the operands")
    parser.add_argument("--out-dtype", choices=DTYPES, help="of the result (default: that of the operands)")
    parser.add_argument("--a-major", default="k", choices=A_MAJORS, help="the contiguous dimension of a")
    parser.add_argument("--b-major", default="n", choices=B_MAJORS, help="the contiguous dimension of b")
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--activation", choices=[name for name in ACTIVATIONS if name])
    parser.add_argument("--tile", help="the only candidate, for example 128x256x64_cta1_cluster2x1")


def run(args: argparse.Namespace) -> int:
    from jax_bwgemm.decision import decide
    from jax_bwgemm.explain import Explanation

    problem, tile = _problem(args), Tile.from_str(args.tile) if args.tile else None
    if reason := why_not_dtypes(problem):
        print(Explanation(problem, reason=reason))
        return 0
    decision = decide(problem, args.device, tile)
    variant = decision.entry.name if decision.entry else None
    print(Explanation(problem, decision.plan, variant, decision.reason))
    return 0


def _problem(args: argparse.Namespace) -> Problem:
    for name in ("m", "n", "k", "batch"):
        if getattr(args, name) < 1:
            raise ValueError(f"`{name}` requires at least 1, got {getattr(args, name)}")
    dtype = DTYPES[args.dtype]
    epilogue = Epilogue(args.alpha, args.bias, args.activation)
    out_dtype = DTYPES[args.out_dtype] if args.out_dtype else dtype
    sizes, majors = (args.m, args.n, args.k, args.batch), (args.a_major, args.b_major)
    return Problem(*sizes, dtype, dtype, out_dtype, *majors, args.batch, args.batch, epilogue)

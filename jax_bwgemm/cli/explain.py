"""`explain M N K`: which kernel, which tile and why, for any device on any machine."""

from __future__ import annotations

import argparse

from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.epilogue import ACTIVATIONS, chain
from jax_bwgemm.facts.legality import why_not_dtypes
from jax_bwgemm.facts.problem import A_MAJORS, B_MAJORS, DTYPE_BYTES, DTYPE_SHORT, Problem
from jax_bwgemm.facts.tile import Tile

HELP = "say which kernel would compute a product, and why"
DTYPES = {short: name for name, short in DTYPE_SHORT.items()} | {name: name for name in DTYPE_BYTES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for size in ("m", "n", "k"):
        parser.add_argument(size, type=int, nargs="?", metavar=size.upper())
    parser.add_argument("--device", default="h200", choices=ARCHS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="of the operands")
    parser.add_argument("--b-dtype", choices=DTYPES, help="of the second operand, if it differs")
    parser.add_argument("--out-dtype", choices=DTYPES, help="of the result (default: that of the operands)")
    parser.add_argument("--a-major", default="k", choices=A_MAJORS, help="the contiguous dimension of a")
    parser.add_argument("--b-major", default="n", choices=B_MAJORS, help="the contiguous dimension of b")
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--activation", choices=ACTIVATIONS)
    parser.add_argument("--residual", action="store_true")
    parser.add_argument("--tile", help="the only candidate, for example 128x256x64_cta1_cluster2x1")
    parser.add_argument("--published", action="store_true", help="the cost model beside published figures instead")
    parser.add_argument("--choices", action="store_true", help="what is chosen for many products instead, a line each")


def run(args: argparse.Namespace) -> int:
    from jax_bwgemm.cli.explain_choices import text
    from jax_bwgemm.cli.explain_published import table
    from jax_bwgemm.explain import Explanation, explain_problem

    if args.published or args.choices:
        print(table() if args.published else text())
        return 0
    problem, tile = _problem(args), Tile.from_str(args.tile) if args.tile else None
    if reason := why_not_dtypes(problem):
        print(Explanation(problem, reason=reason))
        return 0
    print(explain_problem(problem, args.device, tile))
    return 0


def _problem(args: argparse.Namespace) -> Problem:
    for name in ("m", "n", "k", "batch"):
        if (getattr(args, name) or 0) < 1:
            raise ValueError(f"`{name}` requires at least 1, got {getattr(args, name)}")
    a_dtype, b_dtype = DTYPES[args.dtype], DTYPES[args.b_dtype or args.dtype]
    if a_dtype != b_dtype and not args.out_dtype:
        raise ValueError(f"`--out-dtype` requires a dtype for operands that differ, got none for {a_dtype}, {b_dtype}")
    epilogue = chain(args.alpha, args.bias, args.activation, args.residual)
    out_dtype = DTYPES[args.out_dtype] if args.out_dtype else a_dtype
    sizes, majors = (args.m, args.n, args.k, args.batch), (args.a_major, args.b_major)
    return Problem(*sizes, a_dtype, b_dtype, out_dtype, *majors, args.batch, args.batch, epilogue)

"""`explain M N K`: which kernel, which tile and why, for any device on any machine; or those of a whole function."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_bwgemm.cli.outputs import check_file
from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.epilogue import ACTIVATIONS, chain
from jax_bwgemm.facts.legality import why_not_dtypes
from jax_bwgemm.facts.problem import A_MAJORS, B_MAJORS, DTYPE_BYTES, DTYPE_SHORT, Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.runtime.config import current, variable

HELP = "say which kernel would compute a product, and why"
DEVICE = "h200"
PLOTS = (".pdf", ".png", ".svg")
DTYPES = {short: name for name, short in DTYPE_SHORT.items()} | {name: name for name in DTYPE_BYTES}

_OF_A_PRODUCT = (
    "batch", "dtype", "b_dtype", "out_dtype", "a_major", "b_major", "alpha", "bias", "activation", "residual", "tile",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for size in ("m", "n", "k"):
        parser.add_argument(size, type=int, nargs="?", metavar=size.upper())
    parser.add_argument("--device", choices=ARCHS, help=f"(default: {variable('device')}, else {DEVICE})")
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
    parser.add_argument(
        "--function", metavar="MODULE:NAME", help="a callable that returns (f, *args): all products of f(*args) instead"
    )
    parser.add_argument(
        "--install", action="store_true", help="of --function: JAX's own products, too, as `install()` takes them over"
    )
    parser.add_argument("--json", action="store_true", help="as one object")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw tiles, waves and order, or a function's times")
    parser.add_argument("--published", action="store_true", help="the cost model beside published figures instead")
    parser.add_argument("--choices", action="store_true", help="what is chosen for many products instead, a line each")


def run(args: argparse.Namespace) -> int:
    from jax_bwgemm.cli.explain_choices import text
    from jax_bwgemm.cli.explain_published import table

    if args.install and not args.function:
        raise ValueError("`--install` requires `--function`, got none: a product by its sizes is ours")
    if args.published and args.choices:
        raise ValueError("`explain` requires `--published` or `--choices`, got both")
    if args.published or args.choices:
        if args.json or args.plot or args.function:
            raise ValueError(
                "`--json`, `--plot` and `--function` require neither `--published` nor `--choices`, got one"
            )
        _check_alone(args, "--published" if args.published else "--choices", ("device", *_OF_A_PRODUCT))
        print(table() if args.published else text())
        return 0
    args.device = args.device or current().planned_device or DEVICE
    if args.plot:
        _check_plot(args.plot)
    return _function(args) if args.function else _product(args)


def _check_alone(args: argparse.Namespace, option: str, others: Sequence[str]) -> None:
    """ValueError if any of the `others`, which `option` has no use for, is given beside it."""
    if sizes := [str(size) for size in (args.m, args.n, args.k) if size is not None]:
        raise ValueError(f"`{option}` requires no sizes beside it, got {' '.join(sizes)}")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = parser.parse_args([])
    if given := [name for name in others if getattr(args, name) != getattr(defaults, name)]:
        got = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"`{option}` requires no option of a single product beside it, got {got}")


def _check_plot(path: Path) -> None:
    if path.suffix not in PLOTS:
        raise ValueError(f"`--plot` requires a file that ends with one of {', '.join(PLOTS)}, got {str(path)!r}")
    from jax_bwgemm.cli import explain_plot  # noqa: F401  which misses matplotlib now

    check_file(path)


def _product(args: argparse.Namespace) -> int:
    from jax_bwgemm.cli.explain_json import of_product
    from jax_bwgemm.explain import Explanation, explain_problem

    problem, tile = _problem(args), Tile.from_str(args.tile) if args.tile else None
    reason = why_not_dtypes(problem)
    found = Explanation(problem, reason=reason) if reason else explain_problem(problem, args.device, tile)
    print(json.dumps(of_product(found), indent=1) if args.json else found)
    if args.plot:
        from jax_bwgemm.cli import explain_plot

        explain_plot.product(found, args.plot)
    return 0


def _function(args: argparse.Namespace) -> int:
    """JAX's own products are explained with `--install`, and counted without."""
    from jax_bwgemm import installed
    from jax_bwgemm.cli.explain_json import of_function
    from jax_bwgemm.explain import explain

    _check_alone(args, "--function", _OF_A_PRODUCT)
    f, *operands = _load(args.function)
    with installed():
        whole: Any = explain(f, *operands, device=args.device)  # a `FunctionExplanation`, for f is callable
    found: Any = whole if args.install else explain(f, *operands, device=args.device)
    others = max(0, len(whole.products) - len(found.products))
    if args.json:
        print(json.dumps(of_function(found) | {"left_to_jax": others}, indent=1))
    else:
        print(found)
        if others:
            print(f"and {others} of JAX's own (`@`, einsum), which `jax_bwgemm.install()` takes over: see --install")
    if args.plot:
        from jax_bwgemm.cli import explain_plot

        explain_plot.function(found, args.plot)
    return 0


def _load(text: str) -> Sequence[Any]:
    """(f, *args), as the callable says that `text` names; modules are looked for where the user is, too."""
    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    is_named = module and name and not module.startswith(".")  # no package, to which that is relative
    made = getattr(importlib.import_module(module), name, None) if is_named else None
    given = made() if callable(made) and _takes_nothing(made) else None
    if not isinstance(given, tuple) or not given or not callable(given[0]):
        rule = "`--function` requires MODULE:NAME, a callable without arguments that returns (f, *args)"
        returned = f", which returns {given!r}" if callable(made) and _takes_nothing(made) else ""
        raise ValueError(f"{rule}, got {text!r}{returned}")
    return given


def _takes_nothing(function: Any) -> bool:
    """Whether it can be called without arguments."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):  # it cannot, or does not say
        return False
    return True


def _problem(args: argparse.Namespace) -> Problem:
    if args.k is None:
        given = " ".join(str(size) for size in (args.m, args.n) if size is not None)
        missing = ", ".join(name for name in ("m", "n", "k") if getattr(args, name) is None)
        raise ValueError(f"`explain` requires m, n and k, got {given or 'none'}: give {missing}, too")
    for name in ("m", "n", "k", "batch"):
        if getattr(args, name) < 1:
            raise ValueError(f"`{name}` requires at least 1, got {getattr(args, name)}")
    a_dtype, b_dtype = DTYPES[args.dtype], DTYPES[args.b_dtype or args.dtype]
    if a_dtype != b_dtype and not args.out_dtype:
        raise ValueError(f"`--out-dtype` requires a dtype for operands that differ, got none for {a_dtype}, {b_dtype}")
    epilogue = chain(args.alpha, args.bias, args.activation, args.residual)
    out_dtype = DTYPES[args.out_dtype] if args.out_dtype else a_dtype
    sizes, majors = (args.m, args.n, args.k, args.batch), (args.a_major, args.b_major)
    return Problem(*sizes, a_dtype, b_dtype, out_dtype, *majors, args.batch, args.batch, epilogue)

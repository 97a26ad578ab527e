"""`bench`: our kernels against XLA and others on this machine's GPU, or the tables and plots of a result file."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from jax_bwgemm.cli.outputs import check_directory, check_file

HELP = "measure our kernels against XLA and others, or render a result file"
SUSTAINED_SHAPES = ("8192x8192x8192", "8192x14336x4096")  # and a layer of an MLP
PRODUCTS = ""  # what is measured without any of these
MODES = (
    "render", "fill", "merge", "tune", "regret", "orders", "fit", "calibrate", "calibrate_xla", "cover", "spare",
    "meshes", "collectives", "models", "layers", "gram", "decode", "power", "soak", "lowering",
)  # fmt: skip
TAKEN_BY = {  # options that others would drop without a word
    "shapes": (PRODUCTS, "tune", "power"),
    "random": (PRODUCTS,),
    "peers": (PRODUCTS,),
    "sustained": (PRODUCTS,),
    "sustained_shapes": (PRODUCTS,),
    "processes": (PRODUCTS, "tune", "regret", "orders"),
    "plots": (PRODUCTS, "render", "merge"),
    "table": ("tune",),
    "of": ("regret", "orders"),
    "device": ("cover",),
    "budget": ("cover",),
    "anew": ("cover",),
    "products": ("soak",),
    "steps": ("fit",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shape = "[BATCH*]MxNxK[:FORM][:DTYPE][->DTYPE][:EPILOGUE]"
    parser.add_argument("--shapes", nargs="+", metavar=shape, help="default: a fixed list")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="random products, which nobody tuned")
    parser.add_argument(
        "--peers",
        default="default,cublaslt,no-triton",
        metavar="NAMES",
        help="XLA's default flags and cublaslt, no-triton or pallas, separated by commas, or all (%(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=15, help="alternating rounds a shape, at least (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="more rounds, until these passed (%(default)s)")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="medians over so many whole runs (1); of --tune, --regret, --orders: side by side, and of --tune "
        "the finals by three of them",
    )
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="RESULT", help="instead: one result of several runs, with medians"
    )
    parser.add_argument(
        "--sustained", type=float, default=0.0, metavar="SECONDS", help="continuous load of ours and XLA, such as 30"
    )
    parser.add_argument(
        "--sustained-shapes",
        nargs="+",
        default=SUSTAINED_SHAPES,
        metavar="SHAPE",
        help="default: two large ones; in bursts, too",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="result file (default: bench/results/DEVICE.json)")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw a roofline and the ratios, as SVG and PNG")
    parser.add_argument("--tune", action="store_true", help="instead: time the kernels of --shapes for the planner")
    parser.add_argument("--table", type=Path, metavar="FILE", help="what --tune writes (default: the user's table)")
    parser.add_argument("--regret", type=int, metavar="N", help="instead: what the planner's choices lose, N products")
    parser.add_argument(
        "--of",
        choices=("all", "cases", "layers", "fused", "parts", "tall"),
        default="all",
        help="of --regret and --orders: any products, those of --random, layers of models and squares, layers with an "
        "epilogue, parts of long sums, or many rows (default: %(default)s)",
    )
    parser.add_argument("--orders", type=int, metavar="N", help="instead: orders of tiles and L2 hints, N products")
    parser.add_argument("--fit", type=Path, nargs="+", metavar="FILE", help="instead: the model's constants, refitted")
    parser.add_argument(
        "--calibrate",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="instead: what corrects the model's times, refitted",
    )
    parser.add_argument(
        "--calibrate-xla",
        type=Path,
        nargs="+",
        metavar="RESULT",
        help="instead: what XLA is expected to take, refitted",
    )
    parser.add_argument("--cover", type=int, metavar="N", help="instead: what the catalogue lacks, N products a class")
    parser.add_argument("--device", default="h200", help="of --cover, which needs no GPU (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=40, help="kernels that --cover names (default: %(default)s)")
    parser.add_argument("--anew", action="store_true", help="of --cover: as if no kernel shipped")
    parser.add_argument(
        "--spare", type=Path, nargs="+", metavar="FILE", help="instead: kernels that products of --regret hardly miss"
    )
    parser.add_argument("--meshes", action="store_true", help="instead: products over all GPUs, ours and jnp's")
    parser.add_argument("--collectives", action="store_true", help="instead: collective matmul, overlapped and not")
    parser.add_argument("--models", action="store_true", help="instead: a transformer block's training step")
    parser.add_argument("--layers", action="store_true", help="instead: feed-forward blocks, forward and back")
    parser.add_argument("--gram", action="store_true", help="instead: a @ a.T, and Newton-Schulz's iteration")
    parser.add_argument("--decode", action="store_true", help="instead: a decoding step through 32 layers")
    parser.add_argument("--lowering", action="store_true", help="instead: tracing and lowering, ours and jnp's; no GPU")
    parser.add_argument(
        "--power", type=float, metavar="SECONDS", help="instead: energy of long products, each way so long"
    )
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="instead: long runs, or of 0 --products alone")
    parser.add_argument(
        "--products", type=int, default=10_000, help="of --soak, against float64; or 0 (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=300, help="of the search of --fit (default: %(default)s)")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of whatever draws or fits (default: %(default)s)",
    )
    parser.add_argument("--commit", default="", help="what was measured, for a copy outside its git checkout")
    parser.add_argument("--render", type=Path, metavar="RESULT", help="print RESULT as markdown; needs no GPU")
    parser.add_argument(
        "--fill", type=Path, metavar="PAGE", help="the tables of a page of documentation anew, from our results"
    )


def run(args: argparse.Namespace) -> int:
    _check_options(args)
    _check_outputs(args)
    if args.render:
        return _render(args)
    if args.fill:
        from jax_bwgemm.bench import page

        return page.main(args.fill)
    if args.merge:
        return _merge(args)
    if args.tune:
        from jax_bwgemm.bench import tune

        return tune.main(args.shapes, args.rounds, args.table, args.commit, args.processes)
    if args.regret is not None:
        from jax_bwgemm.bench import regret

        return regret.main(args.regret, args.seed, args.rounds, args.json, args.commit, args.of, args.processes)
    if args.orders is not None:
        from jax_bwgemm.bench import orders

        return orders.main(args.orders, args.seed, args.rounds, args.json, args.commit, args.of, args.processes)
    if args.fit:
        from jax_bwgemm.bench import fit

        return fit.main(args.fit, args.steps, args.seed)
    if args.calibrate:
        from jax_bwgemm.bench import calibrate

        return calibrate.main(args.calibrate, args.json, args.seed)
    if args.calibrate_xla:
        from jax_bwgemm.bench import calibrate_xla

        return calibrate_xla.main(args.calibrate_xla, args.json, args.seed)
    if args.cover is not None:
        from jax_bwgemm.bench import cover

        return cover.main(args.cover, args.device, args.seed, args.budget, args.anew)
    if args.spare:
        from jax_bwgemm.bench import spare

        return spare.main(args.spare)
    if args.meshes:
        from jax_bwgemm.bench import meshes

        return meshes.main(args.rounds, args.json, args.commit, args.seconds)
    if args.collectives:
        from jax_bwgemm.bench import collectives

        return collectives.main(args.rounds, args.json, args.commit)
    if args.models:
        from jax_bwgemm.bench import models

        return models.main(args.rounds, args.json, args.commit)
    if args.layers:
        from jax_bwgemm.bench import layers

        return layers.main(args.rounds, args.json, args.commit)
    if args.gram:
        from jax_bwgemm.bench import gram

        return gram.main(args.rounds, args.json, args.commit)
    if args.decode:
        from jax_bwgemm.bench import decode

        return decode.main(args.rounds, args.json, args.commit)
    if args.power is not None:
        from jax_bwgemm.bench import power

        return power.main(args.power, args.shapes, args.json, args.commit)
    if args.soak is not None:
        from jax_bwgemm.bench import soak
        from jax_bwgemm.bench.candidates import gpu_arch
        from jax_bwgemm.bench.soak_legs import Load

        gpu_arch("`bench --soak`")
        return soak.main(args.soak, args.products, args.json, args.commit, Load(seed=args.seed))
    if args.lowering:
        from jax_bwgemm.bench import lowerings

        return lowerings.main(args.rounds)
    return _measure(args)


def _check_options(args: argparse.Namespace) -> None:
    """ValueError for options of which one would be dropped."""
    given = [name for name in MODES if not any(getattr(args, name) is x for x in (None, False))]  # 0 counts
    if len(given) > 1:
        raise ValueError(f"`bench` requires one benchmark at a time, got {' and '.join(map(_option, given))}")
    if args.random < 0:
        raise ValueError(f"`--random` requires at least 1, got {args.random}")
    mode = given[0] if given else PRODUCTS
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = parser.parse_args([])
    for name, takers in TAKEN_BY.items():
        if mode not in takers and getattr(args, name) != getattr(defaults, name):
            rule = " or ".join(_option(taker) if taker else "products alone" for taker in takers)
            got = _option(mode) if mode else "products"
            raise ValueError(f"`{_option(name)}` requires {rule}, got {got}: leave it out")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_outputs(args: argparse.Namespace) -> None:
    """Now, not after minutes of measuring: what cannot be written is missed, and matplotlib."""
    for path in filter(None, (args.json, args.table)):
        check_file(path)
    if args.plots:
        check_directory(args.plots)
        from jax_bwgemm.bench import plots  # noqa: F401
    fits = args.fit or args.calibrate or args.calibrate_xla
    writes_none = any((args.render, args.fill, args.tune, fits, args.spare, args.lowering)) or not (
        args.regret is None and args.cover is None
    )
    if args.processes < 1:
        raise ValueError(f"`--processes` requires at least 1, got {args.processes}")
    if args.merge and not args.json:
        raise ValueError("`--merge` requires a file for its result: pass --json OUT")
    if not args.json and not writes_none:
        from jax_bwgemm.bench.machine import RESULTS

        try:
            check_directory(RESULTS)
        except OSError as error:
            raise ValueError(f"`bench` requires a place for its results, got {error}: pass --json OUT") from None


def _render(args: argparse.Namespace) -> int:
    from jax_bwgemm.bench import report, tables

    print(tables.markdown(args.render))
    if args.plots:
        from jax_bwgemm.bench import plots

        plots.draw(report.load(args.render), args.plots)
    return 0


def _merge(args: argparse.Namespace) -> int:
    from jax_bwgemm.bench import merge

    return _show(merge.read(args.merge), args.json, args.plots)


def _measure(args: argparse.Namespace) -> int:
    from jax_bwgemm.bench import peers, report
    from jax_bwgemm.bench import run as bench
    from jax_bwgemm.bench.cases import DEFAULT, Case, random_cases

    drawn = map(str, random_cases(args.random, args.seed)) if args.random else ()
    shapes = (*(args.shapes or ()), *drawn) or DEFAULT
    sustained_shapes = args.sustained_shapes if args.sustained else ()
    settings = bench.Settings(
        cases=[Case.from_str(text) for text in dict.fromkeys((*shapes, *sustained_shapes))],
        peers=peers.parse(args.peers),
        rounds=args.rounds,
        seconds=args.seconds,
        commit=args.commit,
        sustained=args.sustained,
        sustained_cases=[Case.from_str(text) for text in sustained_shapes],
    )

    path_of = functools.partial(_path_of, args)
    if args.processes > 1:
        from jax_bwgemm.bench import merge

        result = merge.measure(settings, args.processes, path_of)
    else:
        result = bench.measure(settings, lambda result: report.save(result, path_of(result)))
    return _show(result, path_of(result), args.plots)


def _path_of(args: argparse.Namespace, result: Any) -> Path:
    from jax_bwgemm.bench.machine import RESULTS

    name = f"random/{result.arch}-{args.seed}" if args.random else result.arch
    path: Path = args.json or RESULTS / f"{name}.json"
    return path


def _show(result: Any, path: Path, plots_path: Path | None) -> int:
    from jax_bwgemm.bench import report, table

    table.show(result)
    report.save(result, path)
    print(f"wrote {path}")
    if plots_path:
        from jax_bwgemm.bench import plots

        plots.draw(result, plots_path)
    return 1 if result.skipped else 0

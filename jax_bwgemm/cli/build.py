"""`build`: the ahead-of-time build with a progress bar. Decides nothing about kernels."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from jax_bwgemm.cli.drawing import progress_bar
from jax_bwgemm.cli.outputs import check_directory
from jax_bwgemm.facts.arch import TARGETS, family_of

HELP = "compile the catalogue to cubins, PTX and a manifest; needs CuTeDSL, no GPU"
DEFAULT_OUT = Path(__file__).parent.parent / "_artifacts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default=",".join(TARGETS), help="targets, separated by commas (default: %(default)s)")
    parser.add_argument("--only", metavar="PATTERN", help="build only variants whose name matches this glob")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a CPU)")
    parser.add_argument("--packs", type=Path, metavar="DIR", help="then pack what is in --out as a wheel has it")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="directory (default: the package's _artifacts)")


def run(args: argparse.Namespace) -> int:
    from jax_bwgemm.kernels.aot import make
    from jax_bwgemm.kernels.aot.catalog import catalogue, repacks

    if args.jobs is not None and args.jobs < 1:
        raise ValueError(f"`--jobs` requires at least 1, got {args.jobs}")
    if args.packs:
        check_directory(args.packs)
    start = time.monotonic()
    targets = _targets(args.arch)
    variants = make.select([*catalogue(targets), *repacks(targets)], args.only)

    def on_wait() -> None:
        print(f"waiting for another build in {args.out}", file=sys.stderr)

    with _terminable(), progress_bar("kernels") as progress:
        whole = () if args.only else targets
        report = make.build(variants, args.out, args.jobs, progress, on_wait, whole)
    seconds = time.monotonic() - start
    print(f"{report.num_built} built, {report.num_kept} up to date, {len(report.failures)} refused: ", end="")
    print(f"{args.out} in {seconds:.1f} s")
    for failure in report.failures:
        print(f"refused {failure.name}: {failure.reason}", file=sys.stderr)
    if args.packs and not report.failures:
        _pack(args.out, args.packs)
    return 1 if report.failures else 0


def _pack(source: Path, out: Path) -> None:
    from jax_bwgemm.kernels.aot.pack import pack

    counts = pack(source, out)
    num_bytes = sum(path.stat().st_size for path in out.iterdir())
    packed = ", ".join(f"{count} for {target}" for target, count in counts.items())
    print(f"packed {packed}: {out}, {num_bytes / 1e6:.1f} MB")


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the build as Ctrl-C does: its processes are killed and the manifest lists what is done."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _targets(text: str) -> list[str]:
    targets = [part.strip() for part in text.split(",") if part.strip()]
    for target in targets:
        family_of(target)
    if not targets:
        raise ValueError(f"`--arch` requires at least one of {', '.join(TARGETS)}, got {text!r}")
    return targets

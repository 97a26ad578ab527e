"""Cubins of random epilogues, for `test_random_expressions.py` on a machine without CuTeDSL:

    python -m tests.gpu.expressions build DIR                               # where CuTeDSL is: minutes of a core
    JAX_BWGEMM_ARTIFACTS=DIR python -m pytest tests/gpu/test_random_expressions.py

Always the same epilogues, of a small tile each. What the build refuses, such as a kernel that spills, is listed with
the reason; ends with 1 if that is more than one in twenty.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jax_bwgemm.facts.arch import TARGETS
from jax_bwgemm.facts.variant import why_not_variant
from jax_bwgemm.kernels.aot import make
from tests.expressions import seeded

NAME = "expressions.json"  # beside the manifest
COUNT = 300
MOST_REFUSED = 1 / 20


@dataclasses.dataclass(frozen=True)
class Listing:
    """Of a directory: kernels of `seeded(0)` to `seeded(count - 1)`; `refused`: why it has none of some, by seed."""

    target: str
    count: int
    refused: dict[str, str]


def listing(directories: Iterable[Path]) -> Listing | None:
    """Of the first directory that has one."""
    found = [path for directory in directories if (path := directory / NAME).is_file()]
    return Listing(**json.loads(found[0].read_text())) if found else None


def build(directory: Path, target: str, count: int, jobs: int | None = None) -> Listing:
    """Brings a directory up to date."""
    variants = {seed: seeded(seed).variant(target) for seed in range(count)}
    reasons = {variant.name: why for variant in variants.values() if (why := why_not_variant(variant))}
    wanted = {variant.name: variant for variant in variants.values() if variant.name not in reasons}
    report = make.build(list(wanted.values()), directory, jobs, lambda done, of: print(f"{done} of {of}", flush=True))
    reasons |= {failure.name: failure.reason for failure in report.failures}
    refused = {str(seed): reasons[variant.name] for seed, variant in variants.items() if variant.name in reasons}
    found = Listing(target, count, refused)
    (directory / NAME).write_text(json.dumps(dataclasses.asdict(found), indent=1) + "\n")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build"])
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--target", choices=TARGETS, default="sm_90a", help="(%(default)s)")
    parser.add_argument("--count", type=int, default=COUNT, help="of epilogues (%(default)s)")
    parser.add_argument("--jobs", type=int, help="processes (default: one a CPU)")
    args = parser.parse_args(arguments)
    found = build(args.directory, args.target, args.count, args.jobs)
    for seed, reason in found.refused.items():
        print(f"refused: {seed}: {reason}")
    print(f"{args.directory}: {found.count - len(found.refused)} of {found.count} random epilogues for {found.target}")
    return int(len(found.refused) > MOST_REFUSED * found.count)


if __name__ == "__main__":
    sys.exit(main())

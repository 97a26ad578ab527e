"""Kernels that ship under NVIDIA's compute-sanitizer: a seeded sample of the catalogue of this GPU's target.

    python -m tests.gpu.sanitize --variants 40 --tools memcheck racecheck synccheck --json build/sanitize.json

Each tool runs a process of its own, which runs every kernel of the sample once, on a problem of a few tiles with edges,
in a batch of two. Ends with 1 if a tool reports an error. A tool that is at its limit is ended, and what it has said by
then is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_bwgemm.facts.variant import Variant

TOOLS = ("memcheck", "racecheck", "synccheck")
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed)")
KEPT_LINES = 40  # of a report
LIMIT_S = 3000  # a sanitizer slows a kernel down by hundreds
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")  # of the tool, behind PATH


def sample(names: Sequence[str], num: int, seed: int) -> list[str]:
    """Of the names in any order, always the same."""
    return sorted(random.Random(seed).sample(sorted(names), min(num, len(names))))


def sanitizer() -> str | None:
    """Its path."""
    return shutil.which("compute-sanitizer", path=os.pathsep.join((os.environ.get("PATH", ""), *PLACES)))


def command(program: str, tool: str, names: Sequence[str]) -> list[str]:
    child = [sys.executable, "-m", "tests.gpu.sanitize", "--child", *names]
    return [program, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all", *child]


def verdict(text: str, code: int) -> dict[str, Any]:
    """A tool's own count, and the lines of what it blames."""
    counts = [int(next(filter(None, found), "0")) for found in SUMMARY.findall(text)]
    blamed = [line for line in text.splitlines() if line.startswith("=========")]
    return {
        "errors": sum(counts) if counts else None,
        "exit_code": code,
        "ran": len(re.findall(r"^ran ", text, re.MULTILINE)),
        "report": blamed[:KEPT_LINES],
    }


def is_clean(found: dict[str, Any], num: int) -> bool:
    return found["errors"] == 0 and found["exit_code"] == 0 and found["ran"] == num


def child(names: Sequence[str]) -> int:
    """Runs each kernel once. The driver's allocator, so that what lies beyond an array is not another one's."""
    os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
    from tests.gpu import test_variants

    for entry in (entry for entry in test_variants.ALL if entry.name in names):
        check = test_variants._check if entry in test_variants.ENTRIES else test_variants._check_expression
        check(entry, shape_of(entry.variant), seed=1)
        print(f"ran {entry.name}", flush=True)
    return 0


def shape_of(variant: Variant) -> tuple[int, int, int, int]:
    """m, n, k and batch: more than a cluster tile, by what TMA can step over in every dtype."""
    tile = variant.tile
    return tile.cluster_m * tile.cta_m + 16, tile.cluster_n * tile.out_n + 16, 2 * tile.k_tile + 16, 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=40, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (%(default)s)")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds of a tool (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--child", nargs="+", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # this process and its child share the GPU
    if args.child:
        return child(args.child)
    if (program := sanitizer()) is None:
        print("sanitize requires NVIDIA's compute-sanitizer in PATH, got none: it comes with the CUDA toolkit")
        return 2
    from tests.gpu import test_variants

    names = sample([entry.name for entry in test_variants.ALL], args.variants, args.seed)
    if not names:
        print("sanitize requires a Hopper or Blackwell GPU and its cubins, got none")
        return 2
    content: dict[str, Any] = {"seed": args.seed, "variants": names, "tools": {}}
    for tool in args.tools:
        try:
            done = subprocess.run(command(program, tool, names), capture_output=True, text=True, timeout=args.limit)
            found = verdict(done.stdout + done.stderr, done.returncode)
        except subprocess.TimeoutExpired as late:
            said = (late.stdout or b"") + (late.stderr or b"")  # bytes, whatever `text` says
            found = verdict(said.decode(errors="replace"), -1)
            found["report"] = [f"no end within {args.limit:g} s", *found["report"]]
        content["tools"][tool] = found
        print(f"{tool}: {found['ran']} of {len(names)} kernels ran, {found['errors']} errors", flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(is_clean(found, len(names)) for found in content["tools"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Kernels that ship under NVIDIA's compute-sanitizer: a seeded sample of the catalogue of this GPU's target.

    python -m tests.gpu.sanitize --variants 40 --tools memcheck racecheck synccheck --json build/sanitize.json

Each tool has a process of its own, which runs every kernel of the sample once, on a problem of a few tiles with edges,
in a batch of two, all at the same time. Ends with 1 if a tool reports an error. A tool that is at its limit is ended,
and what it has said by then is kept.

racecheck follows cluster barriers, not arrivals at the barriers of other CTAs, by which the CTAs that divide k wait for
each other before they go (`drained` of `kernels/split_k`). On some runs on an H200 it took them to read from a CTA that
"might have already exited"; never the same kernel behind a cluster barrier. That sentence about such a kernel, and no
other, is counted apart, as `explained`. The emulator, whose rules `exit-in-flight` and `exited-cta` know both barriers,
runs these kernels and mutants of them (tests/emu/test_hopper.py).
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jax_bwgemm.bench import machine
from jax_bwgemm.facts.variant import Variant

TOOLS = ("memcheck", "racecheck", "synccheck")
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed)")
EXPLAINED = re.compile(
    r"^=+ Potential invalid __shared__ .*\n=+ +at \S+_cluster\d+x\d+x[248]_.*\n=+ +by thread .*\n"
    r"=+ +Address \S+ is located in a block that might have already exited$",
    re.MULTILINE,
)
ERRORS = 9  # the exit code that says that there are some
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
    options = ["--error-exitcode", str(ERRORS), "--print-limit", "0", "--show-backtrace", "no"]
    return [program, "--tool", tool, *options, "--target-processes", "all", *child]


def verdict(text: str, code: int) -> dict[str, Any]:
    """A tool's own count, without what is explained above, and the lines of what it blames."""
    counts = [int(next(filter(None, found), "0")) for found in SUMMARY.findall(text)]
    explained = len(EXPLAINED.findall(text))
    blamed = [line for line in EXPLAINED.sub("", text).splitlines() if line.startswith("=========")]
    return {
        "errors": sum(counts) - explained if counts else None,
        "explained": explained,
        "exit_code": code,
        "ran": len(re.findall(r"^ran ", text, re.MULTILINE)),
        "report": blamed[:KEPT_LINES],
    }


def run(program: Sequence[str], limit_s: float) -> dict[str, Any]:
    """The verdict of what a tool said until it ended, or was at its limit."""
    try:
        done = subprocess.run(program, capture_output=True, text=True, timeout=limit_s)
        return verdict(done.stdout + done.stderr, done.returncode)
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"") + (late.stderr or b"")  # bytes, whatever `text` says
        found = verdict(said.decode(errors="replace"), -1)
        return found | {"report": [f"no end within {limit_s:g} s", *found["report"]]}


def is_clean(found: dict[str, Any], num: int) -> bool:
    code = ERRORS if found["explained"] else 0
    return found["errors"] == 0 and found["exit_code"] == code and found["ran"] == num


def child(names: Sequence[str]) -> int:
    """Runs each kernel once. The driver's allocator, so that what lies beyond an array is not another one's."""
    os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
    from tests.gpu import test_gram_on_gpu, test_variants

    for entry in (entry for entry in test_variants.ALL if entry.name in names):
        m, n, k, batch = shape_of(entry.variant)
        if entry.variant.tile.symmetric:
            test_gram_on_gpu.test_kernels(entry.variant, max(m, n), k, batch)
        else:
            check = test_variants._check if entry in test_variants.ENTRIES else test_variants._check_expression
            check(entry, (m, n, k, batch), seed=1)
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
    parser.add_argument("--commit", default="", help="what was tried, for a copy outside its git checkout")
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
    facts = machine.describe(args.commit)
    with ThreadPoolExecutor(len(args.tools)) as pool:
        reports = pool.map(lambda tool: run(command(program, tool, names), args.limit), args.tools)
        tools = dict(zip(args.tools, reports, strict=True))
    for tool, found in tools.items():
        explained = f", {found['explained']} explained" if found["explained"] else ""
        print(f"{tool}: {found['ran']} of {len(names)} kernels ran, {found['errors']} errors{explained}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": facts, "seed": args.seed, "variants": names, "tools": tools}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(is_clean(found, len(names)) for found in tools.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Many random products under `deterministic="batch"`, by several processes: their rows' bits (`tests/invariance.py`).

    python -m tests.gpu.invariance --count 10000 --seconds 220

Case i is always the same. Ends with 1 if bits differ or anything but a refusal was raised; prints a table last, and
from which case on the next call goes on where time is up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

BLOCK = 10  # cases of a task
SAME, DIFFERENT, REFUSED, FAILED = "same", "different", "refused", "failed"
COLUMNS = (SAME, DIFFERENT, REFUSED, FAILED)
Found = list[tuple[str, str, str]]  # of each case: its dtypes, what was found, and words


def examine(first: int) -> Found:
    """A block of cases."""
    import jax

    from jax_bwgemm.runtime.config import FallbackError
    from tests.invariance import differing, random_case

    found: Found = []
    for seed in range(first, first + BLOCK):
        case = random_case(seed)
        kind = " ".join(case.dtypes)
        try:
            ways = differing(case)
            found.append((kind, DIFFERENT if ways else SAME, f"{case}: {ways}" if ways else ""))
        except FallbackError:  # no kernel has it, and that was said
            found.append((kind, REFUSED, ""))
        except Exception as error:
            found.append((kind, FAILED, f"{case}: {type(error).__name__}: {error}"))
        jax.clear_caches()
    return found


def table(found: Found) -> list[str]:
    """A row for each triple of dtypes, and the sum."""
    counts = Counter((kind, what) for kind, what, _ in found) + Counter(("all", what) for _, what, _ in found)
    kinds = [*sorted({kind for kind, _, _ in found}), "all"]
    rows = [f"{kind:<40}" + "".join(f"{counts[kind, what]:>10}" for what in COLUMNS) for kind in kinds]
    return [f"{'dtypes':<40}" + "".join(f"{what:>10}" for what in COLUMNS), *rows]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="case (%(default)s)")
    parser.add_argument("--count", type=int, default=10_000, help="of cases (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no case is begun later (no limit)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--commit", default="", help="what was tried, for a copy outside its git checkout")
    args = parser.parse_args(arguments)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # all of them share the GPU
    until, end = time.monotonic() + args.seconds, args.first + args.count
    found: Found = []
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        firsts = iter(range(args.first, end, BLOCK))
        at, running = args.first, [pool.apply_async(examine, (x,)) for x in itertools.islice(firsts, args.processes)]
        while running:
            found += running.pop(0).get()
            at += BLOCK
            if time.monotonic() < until and (first := next(firsts, None)) is not None:
                running.append(pool.apply_async(examine, (first,)))
    for _, what, words in found:
        if words:
            print(f"{what}: {words}")
    print(f"cases {args.first} to {at - 1}" + (f"; go on with --first {at}" if at < end else ""))
    print(*table(found), sep="\n")
    if args.json:
        from jax_bwgemm.bench import machine

        counts = {kind: dict(Counter(what for x, what, _ in found if x == kind)) for kind in {x for x, _, _ in found}}
        said = [words for _, _, words in found if words]
        facts = machine.describe(args.commit)
        content = {"machine": facts, "cases": [args.first, at], "kinds": counts, "said": said}
        args.json.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    return int(any(what in (DIFFERENT, FAILED) for _, what, _ in found))


if __name__ == "__main__":
    sys.exit(main())

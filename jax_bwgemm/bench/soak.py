"""`bench --soak MINUTES`: long runs, with what must not grow, go wrong or end. Each leg is a process of its own.

Host memory is compared with that of the same run of jnp.matmul, which runs beside it: what XLA keeps for a program that
it compiled is XLA's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jax_bwgemm.bench import machine
from jax_bwgemm.bench.soak_legs import RESULT, Load
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.runtime.decision import target_arch

ROUNDS, PROCESSES = 10, 8
DEVICE_SLACK_BYTES = 1 << 20  # of what lives across a round: a constant or two
HOST_SLACK_BYTES, HOST_FACTOR = 64 << 20, 1.25  # above XLA's own growth, whose allocators differ by as much
KERNEL_BYTES = 1 << 19  # that the driver (580) keeps of a kernel once it is loaded: 251 of them took 466 to 508 kB each


def main(minutes: float, products: int, path: Path | None, commit: str, load: Load | None = None) -> int:
    """Ours and XLA's beside each other, on the same GPUs; no minutes: products alone; no products: the rest alone, as
    beside another process that has them. Returns 1 if anything must not be as it was."""
    if minutes < 0 or products < 0 or not (minutes or products):
        raise ValueError(f"`--soak` requires minutes or `--products`, got {minutes:g} and {products}")
    arch, load = target_arch(None), load or Load()
    if path is None and isinstance(arch, Arch):
        path = Path(__file__).parent / "results" / "soak" / f"{arch.name}.json"
    content: dict[str, Any] = {"machine": machine.describe(commit), "minutes": minutes}
    if products:
        content["products"] = merged(run("products", shares(load, products)))
    if minutes:
        load = dataclasses.replace(load, rounds=ROUNDS, seconds=60 * minutes / ROUNDS)
        content["faults"] = run("faults", [load])[0]
        content["ours"], content["xla"] = run("churn", [load, dataclasses.replace(load, peer="xla")])
    broken = findings(content)
    content["findings"] = broken
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"wrote {path}")
    if products:
        print(*table(content["products"]), sep="\n")
    print(*(broken or ["nothing grew, nothing was wrong, nothing ended"]), sep="\n")
    return 1 if broken else 0


def shares(load: Load, products: int) -> list[Load]:
    """Of processes, for Python's lock lets threads trace one at a time."""
    each = -(-products // max(1, min(PROCESSES, (os.cpu_count() or 1) // 2, products)))
    firsts = range(0, products, each)
    return [dataclasses.replace(load, first=x, products=min(each, products - x)) for x in firsts]


def merged(legs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several processes' products as one leg."""
    kinds: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for leg in legs:
        for kind, (num, wrong, worst) in leg.get("kinds", {}).items():
            own = kinds[kind]
            own[:] = own[0] + num, own[1] + wrong, max(own[2], worst)
    counts = ("launches", "programs", "executions", "wrong", "errors")
    return {
        **{name: sum(leg.get(name, 0) for leg in legs) for name in counts},
        "worst_share_of_bound": max(leg.get("worst_share_of_bound", 0.0) for leg in legs),
        "kinds": dict(sorted(kinds.items())),
        "said": [text for leg in legs for text in leg.get("said", ())],
        **next(({"ended": leg["ended"]} for leg in legs if "ended" in leg), {}),
    }


def table(leg: dict[str, Any]) -> list[str]:
    """Of products, by dtypes and form: how many, how many of them wrong, and the worst error in parts of its bound."""
    kinds = {
        **leg.get("kinds", {}),
        "all": [leg.get("programs", 0), leg.get("wrong", 0), leg.get("worst_share_of_bound", 0)],
    }
    rows = [f"{kind:<28} {num:>9} {wrong:>6} {worst:>8.3f}" for kind, (num, wrong, worst) in sorted(kinds.items())]
    return [f"{'products':<28} {'programs':>9} {'wrong':>6} {'of bound':>8}", *rows]


def run(leg: str, loads: Sequence[Load]) -> list[dict[str, Any]]:
    """What processes found that ran at the same time. One that ends early, or hangs, is a finding."""
    command = [sys.executable, "-m", "jax_bwgemm.bench.soak_legs", leg]
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OPENBLAS_NUM_THREADS": "1"}  # a GPU, and the cores
    environment = os.environ | shared
    started = [
        subprocess.Popen(
            [*command, json.dumps(dataclasses.asdict(load))], stdout=subprocess.PIPE, text=True, env=environment
        )
        for load in loads
    ]
    with ThreadPoolExecutor(len(loads)) as pool:  # all are read: none waits for a full pipe
        return list(pool.map(_read, started, loads))


def _read(process: subprocess.Popen[str], load: Load) -> dict[str, Any]:
    """Its lines as they come; the last one is its result. A process that hangs is killed."""
    limit = 600 + 3 * load.rounds * load.seconds + load.products  # seconds
    killer = threading.Timer(limit, process.kill)
    killer.start()
    found: dict[str, Any] = {}
    with process:
        for line in process.stdout or ():
            if line.startswith(RESULT):
                found = json.loads(line.removeprefix(RESULT))
            else:
                print(f"  {line.rstrip()}", flush=True)
    killer.cancel()
    return found if process.returncode == 0 and found else found | {"ended": process.returncode}


def findings(content: dict[str, Any]) -> list[str]:
    """What must not be, as sentences."""
    legs: dict[str, Any] = {name: content[name] for name in ("products", "faults", "ours", "xla") if name in content}
    found = [
        f"{name} requires a process that ends with 0, got {leg['ended']}"
        for name, leg in legs.items()
        if "ended" in leg
    ]
    whole = {name: leg for name, leg in legs.items() if "ended" not in leg}
    for name, leg in whole.items():
        if leg["wrong"] or leg["errors"]:
            found.append(
                f"{name} requires no wrong product and no error, got {leg['wrong']} and {leg['errors']}: {leg['said']}"
            )
    for name in ("ours", "xla"):
        grown = growth(whole[name], "device_bytes") if name in whole else 0
        if grown > DEVICE_SLACK_BYTES:
            found.append(f"device memory of {name} requires to stay, got {grown} bytes more after the second round")
    if {"ours", "xla"} <= whole.keys():
        mine, theirs = (growth(whole[name], "host_bytes") for name in ("ours", "xla"))
        programs, xla_programs = (growth(whole[name], "programs") for name in ("ours", "xla"))
        most = HOST_SLACK_BYTES + HOST_FACTOR * max(0.0, theirs / max(1, xla_programs)) * programs
        most += KERNEL_BYTES * growth(whole["ours"], "kernels")
        if mine > most:
            found.append(f"host memory of ours requires at most {most:.0f} bytes more, as XLA's grows, got {mine}")
    return found


def growth(leg: dict[str, Any], what: str) -> int:
    """From the second round, behind which all that is loaded once is there, to the last."""
    rounds = leg["rounds"]
    return int(rounds[-1][what] - rounds[min(1, len(rounds) - 1)][what])

"""What a result depends on beside the code: device, driver, clocks, versions, commit. Reads only, sets nothing."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

STATIC = ("name", "driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")
RESULTS = Path(__file__).parent / "results"
COMMIT_VARIABLE = "JAX_BWGEMM_COMMIT"
NOW = ("clocks.sm", "power.draw", "temperature.gpu")


def describe(given_commit: str = "") -> dict[str, str]:
    """Flat facts for a result file; what cannot be had is left out, but for the commit."""
    versions = {name: _version(name) for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax_bwgemm")}
    facts = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(given_commit),
        **versions,
    }
    return {name: value for name, value in (query(STATIC) | facts).items() if value}


def result_path(given: Path | None, benchmark: str, device: str) -> Path:
    """Where a result goes: what is `given`, or the benchmark's own file of the device. Its folder is there then."""
    path = given or RESULTS / benchmark / f"{device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def query(fields: Sequence[str]) -> dict[str, str]:
    """nvidia-smi's answer for the first GPU; empty without nvidia-smi."""
    text = _output(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"])
    return dict(zip(fields, (value.strip() for value in text.split(",")), strict=False)) if text else {}


def number(text: str) -> float:
    """Of nvidia-smi's "1980 MHz"; 0 for what it does not know, such as "[N/A]"."""
    first, *_ = text.split() or [""]
    return float(first) if first.replace(".", "", 1).isdigit() else 0.0


def commit(given: str = "") -> str:
    """The checkout's commit, "+" appended if files differ from it; outside a checkout `given`, else COMMIT_VARIABLE's.

    "unknown" where nothing says. ValueError if `given` is not the checkout's.
    """
    given = given or os.environ.get(COMMIT_VARIABLE, "")
    root = Path(__file__).resolve().parent.parent.parent
    top, _, revision = _output(["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"]).partition("\n")
    if not revision or Path(top) != root:  # no checkout, or another project's around an installed package
        return given or "unknown"
    if given and not revision.startswith(given.removesuffix("+")):
        raise ValueError(f"`--commit` requires this checkout's, {revision[:12]}, got {given}: leave it out")
    return revision[:12] + ("+" if _output(["git", "-C", str(root), "status", "--porcelain"]) else "")


def _output(command: list[str]) -> str:
    if not shutil.which(command[0]):
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""

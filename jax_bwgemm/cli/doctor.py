"""`doctor`: what is installed, what the machine has, and so whether and why our kernels would run.

Nothing here may fail for want of a driver, a GPU, a library or a cubin: saying so is the job. Exit status 0: no
problem; 1: a problem, whose line says what mends it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator

from jax_bwgemm._version import __version__
from jax_bwgemm.cli import doctor_checks as checks
from jax_bwgemm.cli import doctor_gpus as gpus
from jax_bwgemm.cli.doctor_checks import Finding
from jax_bwgemm.facts.arch import Arch

HELP = "check versions, library, kernels, cache, driver and GPUs, multiply on them, and say what would run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one object: ok, package_version and findings")


def run(args: argparse.Namespace) -> int:
    findings = []
    for finding in examine():
        findings.append(finding)
        if not args.json:
            print(finding, flush=True)  # products take a while
    is_ok = all(finding.state != "problem" for finding in findings)
    if args.json:
        found = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"ok": is_ok, "package_version": __version__, "findings": found}, indent=1))
    return 0 if is_ok else 1


def examine() -> Iterator[Finding]:
    """All findings; what would run comes last."""
    on_gpus, archs = gpus.examine()
    findings = [checks.python(), checks.jax(bool(archs)), checks.library()]
    findings += [*checks.kernels({arch.target for arch in archs}), *checks.caches(), *checks.times(archs), *on_gpus]
    yield from findings
    if archs and all(finding.state != "problem" for finding in findings):
        for finding in gpus.trials():
            findings.append(finding)
            yield finding
    yield verdict(archs, findings)


def verdict(archs: list[Arch], findings: list[Finding]) -> Finding:
    """What computes a product on the first GPU that has kernels."""
    if not archs:
        return Finding("runs", "warning", "XLA's own dot, for want of a GPU; `explain` and `emulate` work for any")
    if wrong := list(dict.fromkeys(finding.what for finding in findings if finding.state == "problem")):
        return Finding("runs", "problem", f"XLA's own dot, or nothing, until this is mended: {', '.join(wrong)}")
    return Finding("runs", "ok", f"our kernels for {archs[0].target}, planned as {archs[0].name}")

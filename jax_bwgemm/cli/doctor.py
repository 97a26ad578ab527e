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
from jax_bwgemm.facts.arch import Arch, by_name
from jax_bwgemm.runtime.config import Config, variable

HELP = "check versions, settings, library, kernels, cache, driver and GPUs, multiply on them, and say what would run"


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
    set_to, asked = checks.settings()
    targets = {arch.target for arch in archs}
    if asked and asked.is_emulated and not archs:
        targets = {asked.emulate}
    findings = [checks.python(), checks.jax(bool(archs)), set_to, checks.library()]
    findings += [*checks.kernels(targets), *checks.caches(), *checks.times(archs), *on_gpus]
    yield from findings
    if archs and all(finding.state != "problem" for finding in findings):
        for finding in gpus.trials():
            findings.append(finding)
            yield finding
    yield verdict(archs, asked, findings)


def verdict(archs: list[Arch], asked: Config | None, findings: list[Finding]) -> Finding:
    """What computes a product on the first GPU that has kernels, or without one; `asked`: by the settings."""
    if asked is None:
        return Finding("runs", "problem", "nothing, until this is mended: settings")
    if not archs and not asked.is_emulated:
        needed = dict.fromkeys(x.what for x in findings if x.what in ("library", "kernels") and x.state != "ok")
        rest = f"once this is mended: {', '.join(needed)}" if needed else "for any"
        return Finding("runs", "warning", f"XLA's own dot, for want of a GPU; `explain` and `emulate` work {rest}")
    if wrong := list(dict.fromkeys(finding.what for finding in findings if finding.state == "problem")):
        return Finding("runs", "problem", f"XLA's own dot, or nothing, until this is mended: {', '.join(wrong)}")
    planned = by_name(asked.planned_device) if asked.planned_device else archs[0]
    if not archs:
        return Finding("runs", "ok", f"our kernels for {asked.emulate} in the emulator, planned as {planned.name}")
    if archs[0].target not in planned.targets:
        text = f"kernels for {planned.target}, which this GPU cannot run: it requires {archs[0].target}"
        return Finding("runs", "problem", text, f"unset {variable('device')} and {variable('emulate')}")
    return Finding("runs", "ok", f"our kernels for {archs[0].target}, planned as {planned.name}")

"""`make demo`: what it sets up on which machine, and the example that it runs."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from pages import ROOT

PLUGIN = "build cuda > {venv}/cuda.stamp.txt && {venv}/bin/python -m pip install"


def planned(path: Path, *given: str, **environment: str) -> str:
    """What `make demo` would run in a checkout whose .venv is `path`."""
    command = ["make", "-n", "demo", f"VENV={path}", *given]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, env=own | environment, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_a_gpu_gets_the_plugin_for_cuda(tmp_path: Path) -> None:
    smi, plugin = tmp_path / "nvidia-smi", PLUGIN.format(venv=tmp_path / "venv")
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    smi.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    commands = planned(tmp_path / "venv", PATH=path)
    assert commands.index(plugin) < commands.index("examples/quickstart.py")
    assert plugin not in planned(tmp_path / "venv", "GPU=", PATH=path)


def test_the_example_says_what_multiplied(quiet: None, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/quickstart.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "512x768x1024 on cpu, by XLA" in said
    assert "a CTA of a pair loads half the bytes of B" in said

"""The native library under sanitizers, with a driver that fails, and for a hundred thousand lives: `make test-hard`."""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import subprocess

import pytest

from tests.hard import seeds

ROOT = pathlib.Path(__file__).parents[2]
COMPILER = shutil.which("c++")
SANITIZERS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
RUNS = [  # a sanitizer, what `driver.cc` is to do
    *(("address", f"random {seed} 200000 1") for seed in range(4)),
    ("address", "random 4 100000 4"),
    ("address", "failures"),
    ("address", "timing 2 1000"),
    ("thread", "random 5 100000 4"),
    ("thread", "failures"),
    ("thread", "timing 3 1000"),
    ("plain", "lives 100000"),
]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def run(command: list[str | os.PathLike[str]], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ | environment)


@functools.cache
def build(sanitizer: str, directory: pathlib.Path) -> str | None:
    """Compiles the driver, and the stand-in for CUDA's, into `directory`; or says why this machine cannot."""
    directory.mkdir()
    flags = ["-std=c++17", "-O1", "-g", *SANITIZERS[sanitizer]]
    empty = directory / "empty.cc"
    empty.write_text("int main() { return 0; }")
    probe = run([COMPILER, *flags, "-o", directory / "empty", empty])
    if probe.returncode:
        return f"needs the {sanitizer} sanitizer of {COMPILER}: {probe.stderr.strip().splitlines()[-1]}"
    if run([directory / "empty"]).returncode:
        return f"the {sanitizer} sanitizer does not run on this kernel"
    fake = ROOT / "tests" / "cpu" / "fake_cuda" / "fake_cuda.cc"
    # The handlers' own files only bind XLA's stages to what the C ABI calls.
    sources = [path for path in (ROOT / "ffi").glob("*.cc") if not path.name.endswith("handler.cc")]
    driver = [ROOT / "tests" / "hard" / "driver.cc", *sources, "-ldl"]
    for arguments in (
        ["-shared", "-fPIC", "-o", directory / "libcuda.so.1", fake],
        ["-pthread", f"-I{ROOT / 'ffi'}", '-DJAX_BWGEMM_VERSION="hard"', "-o", directory / "driver", *driver],
    ):
        made = run([COMPILER, *flags, *arguments])
        assert made.returncode == 0, made.stderr
    return None


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("builds")


# A process of the tests compiles what it needs, once.
@pytest.mark.parametrize(
    ("sanitizer", "what"), [pytest.param(*run, marks=pytest.mark.xdist_group(run[0])) for run in RUNS]
)
def test_the_library(builds: pathlib.Path, sanitizer: str, what: str, tmp_path: pathlib.Path) -> None:
    if reason := build(sanitizer, builds / sanitizer):
        pytest.skip(reason)
    command = [builds / sanitizer / "driver", seeds.write(tmp_path), *what.split()]
    done = run(command, JAX_BWGEMM_LIBCUDA=str(builds / sanitizer / "libcuda.so.1"))
    print(done.stdout)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-8000:]

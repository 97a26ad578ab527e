"""The wheels, where they are used: an environment of jax and numpy alone, which nobody can write to, without a home.

`make wheel` runs this; it installs from a package index.
"""

from __future__ import annotations

import ctypes
import email
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile

import pytest

from jax_bwgemm._version import __version__
from jax_bwgemm.kernels.aot.catalog import catalogue, repacks

if "JAX_BWGEMM_WHEELS" not in os.environ:
    pytest.skip("`make wheel` makes the wheels", allow_module_level=True)

ROOT = pathlib.Path(__file__).parents[2]
WHEELS = ROOT / os.environ["JAX_BWGEMM_WHEELS"]
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
MOST_BYTES = 10_000_000
GLIBC = (2, 28)
TARGETS = ("sm_90a", "sm_100f", "sm_100a")
OLDEST = re.search(r'"jax>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())[1]
PYTHON_NEWEST = os.environ.get("JAX_BWGEMM_PYTHON_NEWEST", sys.executable)
ENVIRONMENTS = {"oldest": (sys.executable, f"=={OLDEST}"), "newest": (PYTHON_NEWEST, "")}
PRODUCT = """
import jax_bwgemm, numpy as np, ml_dtypes, sys
rng = np.random.default_rng(0)
a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((200, 136), (136, 104)))
want = a.astype(float) @ b.astype(float)
for target in ("sm_90a", "sm_100f"):
    got = np.asarray(jax_bwgemm.matmul(a, b, emulate=target, on_fallback="error")).astype(float)
    assert np.linalg.norm(got - want) < 2**-8 * np.linalg.norm(want), target
print(jax_bwgemm.__file__)
"""
_DROP, _WRITES_ANYTHING = 24, 1  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE


def wheel(machine: str) -> pathlib.Path:
    return WHEELS / f"jax_bwgemm-{__version__}-py3-none-manylinux_2_28_{machine}.whl"


def test_these_are_made():
    names = {wheel(machine).name for machine in MACHINES} | {f"jax_bwgemm-{__version__}.tar.gz"}
    assert {path.name for path in WHEELS.iterdir()} == names
    assert max(path.stat().st_size for path in WHEELS.iterdir()) <= MOST_BYTES


@pytest.mark.parametrize("machine", MACHINES)
def test_contents(machine):
    with zipfile.ZipFile(wheel(machine)) as archive:
        names = set(archive.namelist())
        own = {name.removeprefix("jax_bwgemm/") for name in names if ".dist-info/" not in name}
        about = email.message_from_bytes(archive.read(f"jax_bwgemm-{__version__}.dist-info/METADATA"))
        manifests = [json.loads(archive.read(f"jax_bwgemm/_artifacts/{target}.json")) for target in TARGETS]
    packs = {f"_artifacts/{t}.{x}" for t in TARGETS for x in ("json", "cubin.json", "cubin.xz", "ptx.json", "ptx.xz")}
    assert {name for name in own if name.startswith("_")} == packs | {
        "__init__.py", "__main__.py", "_files.py", "_processes.py", "_version.py", "_lib/libjax_bwgemm_ffi.so"
    }  # fmt: skip
    listed = subprocess.run(["git", "ls-files", "jax_bwgemm"], cwd=ROOT, capture_output=True, text=True).stdout
    sources = {name for name in listed.split() if not name.startswith("jax_bwgemm/bench/results/")}
    assert len(sources) < len(listed.split())  # what was measured is left out, for it is large
    assert {f"jax_bwgemm/{name}" for name in own - packs} - {"jax_bwgemm/_lib/libjax_bwgemm_ffi.so"} == sources
    assert "py.typed" in own and any(name.endswith("licenses/LICENSE") for name in names)
    kernels = {kernel["name"] for fields in manifests for kernel in (*fields["variants"], *fields["repacks"])}
    assert kernels == {kernel.name for kernel in (*catalogue(TARGETS), *repacks(TARGETS))}
    needs = [need for need in about.get_all("Requires-Dist") if "extra ==" not in need]
    assert sorted(needs) == [f"jax>={OLDEST}", "numpy"]  # beside any jax[cuda..], of which none comes with us


@pytest.mark.parametrize("machine", MACHINES)
def test_the_library_needs_an_old_glibc_and_nothing_else(machine, tmp_path):
    elffile = pytest.importorskip("elftools.elf.elffile")
    with zipfile.ZipFile(wheel(machine)) as archive:
        path = archive.extract("jax_bwgemm/_lib/libjax_bwgemm_ffi.so", tmp_path)
    with open(path, "rb") as file:
        elf = elffile.ELFFile(file)
        assert elf["e_machine"] == MACHINES[machine]
        needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        assert {name.partition(".")[0] for name in needed} <= {"libc", "libdl", "libpthread", "ld-linux-x86-64"}
        versions = [aux.name for _, auxes in elf.get_section_by_name(".gnu.version_r").iter_versions() for aux in auxes]
        assert {tuple(map(int, re.fullmatch(r"GLIBC_([\d.]+)", v)[1].split("."))) <= GLIBC for v in versions} == {True}
        symbols = elf.get_section_by_name(".dynsym").iter_symbols()
        assert all(symbol.name.startswith("jbw_") for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF")


def test_the_sources():
    with tarfile.open(WHEELS / f"jax_bwgemm-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert {name for name in names if name != "PKG-INFO"} == set(tracked)


class Bare:
    """An environment that nobody can write to, and what runs in it without a home."""

    def __init__(self, directory: pathlib.Path, python: str, jax: str) -> None:
        self.directory, self.tmp = directory, directory / "tmp"
        subprocess.run([python, "-m", "venv", directory / "venv"], check=True)
        self.python = directory / "venv" / "bin" / "python"
        (self.site,) = (directory / "venv" / "lib").glob("python*/site-packages")
        self.tmp.mkdir()
        start = time.monotonic()
        self._pip("install", wheel(os.uname().machine), f"jax{jax}", f"jaxlib{jax}")
        self.run("-c", PRODUCT)
        self.seconds = time.monotonic() - start
        self._pip("install", "--target", directory / "pytest", "pytest")
        for path in (self.site, *self.site.rglob("*")):
            path.chmod(path.stat().st_mode & ~0o222)
        self.files = self.listed()

    def _pip(self, *arguments: object) -> None:
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([self.python, "-m", "pip", *map(str, (*arguments, *quiet))], check=True)

    def run(self, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "TMPDIR": str(self.tmp), "XDG_CACHE_HOME": "/dev/null", **variables}
        command = [str(x) for x in (self.python, "-B", *arguments)]
        return subprocess.run(
            command, cwd=self.directory, env=environment, capture_output=True, text=True, preexec_fn=_write_nothing
        )

    def listed(self) -> list[str]:
        return sorted(str(path) for path in self.site.rglob("*"))


def _write_nothing() -> None:
    """Where root runs the tests, modes bind what it starts, too."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(_DROP, _WRITES_ANYTHING, 0, 0, 0)


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def bare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    if os.uname().machine not in MACHINES:
        pytest.skip(f"no wheel for {os.uname().machine}")
    return Bare(tmp_path_factory.mktemp(request.param), *ENVIRONMENTS[request.param])


def test_it_is_bare(bare: Bare):
    listed = bare.run("-m", "pip", "list", "--format=json").stdout
    names = {row["name"].lower().replace("-", "_") for row in json.loads(listed)}
    assert names <= {"jax_bwgemm", "jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "scipy", "pip", "setuptools"}
    done = bare.run("-c", "import jax_bwgemm; open(jax_bwgemm.__path__[0] + '/new', 'w')")
    assert "PermissionError" in done.stderr


def test_every_target_multiplies_in_the_emulator(bare: Bare, capsys: pytest.CaptureFixture[str]):
    done = bare.run("-c", PRODUCT)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(str(bare.site))
    assert list(bare.tmp.iterdir()) == []  # what was unpacked ended with its process
    with capsys.disabled():
        print(f" [{bare.site.parent.name}: {bare.seconds:.1f} s from `pip install` to checked products] ", end="")


def test_doctor_finds_no_problem(bare: Bare):
    done = bare.run("-m", "jax_bwgemm", "doctor")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert re.search(r"\b[1-9]\d{3} kernels for sm_90a", done.stdout) and "problem" not in done.stdout


def test_the_tiny_tests(bare: Bare):
    for name in ("conftest.py", "completeness.py", "shares.py", "cases.py", "test_tiny.py"):
        (bare.directory / "tests").mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / name, bare.directory / "tests" / name)
    arguments = ("-m", "pytest", "-q", "-c", os.devnull, "--rootdir", bare.directory, "-p", "no:cacheprovider", "tests")
    done = bare.run(*arguments, PYTHONPATH=f"{bare.directory / 'pytest'}:{bare.directory}")
    assert done.returncode == 0 and re.search(r"[4-9] passed", done.stdout), done.stdout + done.stderr
    assert bare.listed() == bare.files

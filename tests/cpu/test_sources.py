"""What rebuilds a kernel: its code, at any depth, and no prose; neither the other family's nor that of the repacks."""

from __future__ import annotations

import pathlib

import pytest

from jax_bwgemm.kernels import sources
from jax_bwgemm.repack import Repack
from jax_bwgemm.tile import Tile
from jax_bwgemm.variant import Variant

KINDS = ("hopper", "blackwell", "repack")
PACKAGE = {
    "kernels/worker": "from jax_bwgemm.artifacts import find\nfrom jax_bwgemm.kernels import sass\n"
    "def build():\n    from jax_bwgemm.kernels.compile import run\n    from jax_bwgemm.kernels.repack import flip\n",
    "kernels/compile": "import jax_bwgemm.kernels.sm90\nfrom jax_bwgemm.kernels import sm100\n"
    "from jax_bwgemm.tile import X\n",
    "kernels/sm90": '"""A timetable."""\n\nfrom jax_bwgemm.kernels.gemm import Gemm\n'
    "from jax_bwgemm.kernels.sm90_store import f\n",
    "kernels/sm90_store": 'def f(x):\n    """Doubles."""\n    return 2 * x  # twice\n',
    "kernels/sm100": "from jax_bwgemm.kernels.gemm import Gemm\nfrom jax_bwgemm.legality import why_not\n",
    "kernels/gemm": "import cutlass\n\n\nclass Gemm:\n    x = 1\n",
    "kernels/repack": "from jax_bwgemm.repack import Y\n",
    "kernels/sass": "Z = 1\n",
    "kernels/catalog": "LIST = 1\n",
    "artifacts": "FORMAT = 1\n",
    "legality": "RULE = 1\n",
    "tile": "X = 1\n",
    "repack": "Y = 1\n",
}


@pytest.fixture
def package(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "kernels").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def changed(package: pathlib.Path, module: str, old: str, new: str) -> list[str]:
    """The kinds of kernels that an edit rebuilds."""
    path = package / f"{module}.py"
    before = {kind: sources.modules(kind, package) for kind in KINDS}
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return [kind for kind in KINDS if sources.modules(kind, package) != before[kind]]


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("kernels/sm90", "A timetable.", "Another timetable, of two lines.\n"),
        ("kernels/sm90_store", "Doubles.", "x + x."),
        ("kernels/sm90_store", '    """Doubles."""\n', ""),
        ("kernels/sm90_store", "# twice", "# two times"),
        ("kernels/gemm", "class Gemm:\n", 'class Gemm:\n    """One variant."""\n\n'),
        ("kernels/sm90_store", "2 * x", "(2 *\n            x)"),
    ],
)
def test_prose_and_layout_rebuild_nothing(package: pathlib.Path, module: str, old: str, new: str) -> None:
    assert changed(package, module, old, new) == []


@pytest.mark.parametrize(
    ("module", "old", "new", "kinds"),
    [
        ("kernels/sm90", "import Gemm", "import Gemm as G", ["hopper"]),
        ("kernels/sm90_store", "2 * x", "3 * x", ["hopper"]),
        ("kernels/sm100", "import Gemm", "import Gemm as G", ["blackwell"]),
        ("kernels/gemm", "x = 1", "x = 2", ["hopper", "blackwell"]),
        ("tile", "1", "2", ["hopper", "blackwell"]),
        ("kernels/repack", "import Y", "import Y as y", ["repack"]),
        ("repack", "1", "2", ["repack"]),
        ("kernels/sass", "1", "2", list(KINDS)),
        ("kernels/worker", "def build", "def compile", list(KINDS)),
        ("kernels/catalog", "1", "2", []),
        ("artifacts", "1", "2", []),
        ("legality", "1", "2", []),
    ],
)
def test_code_rebuilds_what_is_made_from_it(
    package: pathlib.Path, module: str, old: str, new: str, kinds: list[str]
) -> None:
    assert changed(package, module, old, new) == kinds


def test_the_packages_own_sources() -> None:
    hopper, blackwell, repack = (set(sources.modules(kind)) for kind in KINDS)
    assert {"kernels.sm90", "kernels.gemm", "kernels.compile", "tile", "variant", "recipe"} <= hopper
    assert {"kernels.sm100", "kernels.gemm", "kernels.compile", "tile", "variant", "recipe"} <= blackwell
    assert not any("sm100" in name for name in hopper) and not any("sm90" in name for name in blackwell)
    assert {"kernels.repack", "repack"} <= repack and not {"kernels.gemm", "kernels.sm90", "kernels.sm100"} & repack
    assert not {"legality", "artifacts", "kernels.catalog", "kernels.build"} & (hopper | blackwell | repack)


def test_a_digest_follows_kind_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    of = {target: Variant(target, *["bfloat16"] * 3, "k", "n", Tile(128, 128)) for target in ("sm_90a", "sm_100a")}
    kernels = (of["sm_90a"], of["sm_100a"], Repack("sm_90a", "pad", 2))
    digests = set()
    for version in ("1.2.3", "1.2.4"):
        monkeypatch.setattr(sources, "dsl_version", lambda version=version: version)
        digests |= {sources.source_sha256(kernel) for kernel in kernels}
        assert sources.source_sha256(Repack("sm_100a", "transpose", 1)) == sources.source_sha256(kernels[2])
    assert len(digests) == 6

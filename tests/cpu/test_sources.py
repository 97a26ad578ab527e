"""What rebuilds a kernel: its code, at any depth, and no prose; neither the other family's nor that of the repacks."""

from __future__ import annotations

import pathlib

import pytest

from jax_bwgemm.facts.repack import Repack
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels.aot import sources

KINDS = ("hopper", "blackwell", "repack")
PACKAGE = {
    "kernels/aot/worker": "from jax_bwgemm.runtime.artifacts import find\n"
    "from jax_bwgemm.kernels.aot import sass\n"
    "def build():\n    from jax_bwgemm.kernels.aot.compile import run\n"
    "    from jax_bwgemm.kernels.repack import flip\n",
    "kernels/aot/compile": "import jax_bwgemm.kernels.sm90\nfrom jax_bwgemm.kernels import sm100\n"
    "from jax_bwgemm.facts.tile import X\n",
    "kernels/sm90": '"""A timetable."""\n\nfrom jax_bwgemm.kernels.gemm import Gemm\n'
    "from jax_bwgemm.kernels.sm90_store import f\n",
    "kernels/sm90_store": 'def f(x):\n    """Doubles."""\n    return 2 * x  # twice\n',
    "kernels/sm100": "from jax_bwgemm.kernels.gemm import Gemm\nfrom jax_bwgemm.facts.legality import why_not\n",
    "kernels/gemm": "import cutlass\n\n\nclass Gemm:\n    x = 1\n",
    "kernels/repack": "from jax_bwgemm.facts.repack import Y\n",
    "kernels/aot/sass": "Z = 1\n",
    "kernels/aot/catalog": "LIST = 1\n",
    "runtime/artifacts": "FORMAT = 1\n",
    "facts/legality": "RULE = 1\n",
    "facts/tile": "X = 1\n",
    "facts/repack": "Y = 1\n",
}


@pytest.fixture
def package(tmp_path: pathlib.Path) -> pathlib.Path:
    for floor in ("kernels/aot", "facts", "runtime"):
        (tmp_path / floor).mkdir(parents=True)
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
        ("facts/tile", "1", "2", ["hopper", "blackwell"]),
        ("kernels/repack", "import Y", "import Y as y", ["repack"]),
        ("facts/repack", "1", "2", ["repack"]),
        ("kernels/aot/sass", "1", "2", list(KINDS)),
        ("kernels/aot/worker", "def build", "def compile", list(KINDS)),
        ("kernels/aot/catalog", "1", "2", []),
        ("runtime/artifacts", "1", "2", []),
        ("facts/legality", "1", "2", []),
    ],
)
def test_code_rebuilds_what_is_made_from_it(
    package: pathlib.Path, module: str, old: str, new: str, kinds: list[str]
) -> None:
    assert changed(package, module, old, new) == kinds


def test_the_packages_own_sources() -> None:
    hopper, blackwell, repack = (set(sources.modules(kind)) for kind in KINDS)
    assert {
        "kernels.sm90",
        "kernels.gemm",
        "kernels.aot.compile",
        "facts.tile",
        "facts.variant",
        "facts.recipe",
    } <= hopper
    assert {
        "kernels.sm100",
        "kernels.gemm",
        "kernels.aot.compile",
        "facts.tile",
        "facts.variant",
        "facts.recipe",
    } <= blackwell
    assert not any("sm100" in name for name in hopper) and not any("sm90" in name for name in blackwell)
    assert {"kernels.repack", "facts.repack"} <= repack and not {
        "kernels.gemm",
        "kernels.sm90",
        "kernels.sm100",
    } & repack
    assert not {"facts.legality", "runtime.artifacts", "kernels.aot.catalog", "kernels.aot.make"} & (
        hopper | blackwell | repack
    )


def test_a_digest_follows_kind_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    of = {target: Variant(target, *["bfloat16"] * 3, "k", "n", Tile(128, 128)) for target in ("sm_90a", "sm_100f")}
    kernels = (of["sm_90a"], of["sm_100f"], Repack("sm_90a", "pad", 2))
    digests = set()
    for version in ("1.2.3", "1.2.4"):
        monkeypatch.setattr(sources, "dsl_version", lambda version=version: version)
        digests |= {sources.source_sha256(kernel) for kernel in kernels}
        assert sources.source_sha256(Repack("sm_100f", "transpose", 1)) == sources.source_sha256(kernels[2])
    assert len(digests) == 6

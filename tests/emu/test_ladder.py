"""The ladder: every rung in the emulator, its masks against published values, its page against its commands."""

from __future__ import annotations

import dataclasses
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="the rungs are compiled by CuTeDSL")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "ladder"))

import _cli  # noqa: E402
import _common  # noqa: E402
import _sharing  # noqa: E402
import pictures  # noqa: E402
import table  # noqa: E402

from jax_bwgemm.emulator import Counters, Fault, Schedule  # noqa: E402

PAGE = (ROOT / "docs" / "two_cta.md").read_text()
# (m, n, k): whole cluster tiles, and sizes with an edge in each dimension; the last row of CTAs has nothing to do.
SMALL = ((256, 512, 128), (264, 520, 200))
SHAPES = dict.fromkeys(table.RUNGS, SMALL) | dict.fromkeys(
    ("two_cta_multicast", "one_cta_multicast"), ((512, 1024, 64), (328, 776, 200))
)
RUNS = [(name, shape) for name in table.RUNGS for shape in SHAPES[name]]
SCHEDULES = [("normal", Schedule.standard(1)[1]), ("integers", Schedule.standard(2)[4])]


@pytest.mark.parametrize(("kind", "schedule"), SCHEDULES, ids=lambda x: getattr(x, "name", x))
@pytest.mark.parametrize(("name", "shape"), RUNS, ids=lambda x: x if isinstance(x, str) else "x".join(map(str, x)))
def test_rung(name: str, shape: tuple[int, int, int], kind: str, schedule: Schedule) -> None:
    a, b = _common.operands(kind, shape, seed=schedule.seed)
    rung = _common.rung_of(name)
    c, counters = _common.emulate(rung, a, b, schedule)
    error = _common.relative_error(c, a, b)
    assert error <= (0.0 if kind == "integers" else _common.BOUND)
    found, steps, pair = _cli.counts(rung, shape, counters), -(-shape[2] // 64), rung.tile.cta_group
    assert found["bytes of A"] * rung.tile.cluster_n == steps * 128 * 128
    assert found["bytes of B"] * rung.tile.cluster_m == steps * 256 * 128
    tiles_m, tiles_n = rung.cta_tiles(*shape[:2])
    assert found["MMA instructions"] * pair == tiles_m * tiles_n * steps * 4


# Cluster (4, 4): masks of A, B and the commit, and arrivals, from public tutorials (CTA 11: derived by hand).
PUBLISHED = {
    ("two_cta_multicast", 0): (0x1111, 0x0005, 0x333F, 5),
    ("one_cta_multicast", 0): (0x1111, 0x000F, 0x111F, 7),
    ("one_cta_multicast", 11): (0x8888, 0x0F00, 0x8F88, 7),
    ("two_cta_multicast", 11): (0x8888, 0x0A00, 0xCFCC, 5),
    ("two_cta", 0): (0x1, 0x1, 0x3, 1),
    ("one_cta", 0): (0x1, 0x1, 0x1, 1),
}


@pytest.mark.parametrize(("name", "rank"), PUBLISHED)
def test_masks(name: str, rank: int) -> None:
    assert dataclasses.astuple(_sharing.computed(_common.rung_of(name).tile, rank)) == PUBLISHED[name, rank]


@pytest.mark.parametrize("name", ["two_cta_multicast", "one_cta_multicast"])
def test_running_kernel_shows_the_masks(name: str) -> None:
    assert dataclasses.astuple(_sharing.seen(_common.rung_of(name))) == PUBLISHED[name, 0]


@pytest.mark.parametrize("name", ["two_cta_multicast", "one_cta_multicast"])
def test_print_shows_the_masks(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first CTA and of CTA 11, computed and seen; the odd CTA of a pair has no commits to be seen."""
    monkeypatch.setattr(_cli, "_checked", lambda rung, shape: Counters())
    monkeypatch.setattr(_cli, "_show_counts", lambda shape, found: None)
    monkeypatch.setattr(sys, "argv", [name, "--emulate"])
    _cli.main(_common.rung_of(name))
    printed = capsys.readouterr().out
    for rank in (0, 11):
        text = str(_sharing.Sharing(*PUBLISHED[name, rank]))
        assert f"CTA {rank} shares: {text}" in printed
        is_seen = rank == 0 or name == "one_cta_multicast"
        assert (f"CTA {rank} as the running kernel shows it: {text}" in printed) == is_seen


def page_table() -> str:
    return PAGE.partition("<!-- table.py -->\n")[2].partition("\n<!-- /table.py -->")[0]


def test_page_has_the_table() -> None:
    assert page_table() == table.table(), "paste the output of `python examples/ladder/table.py` into docs/two_cta.md"


def test_what_the_page_says_of_the_table() -> None:
    cells = {row[0].strip(" `"): row[3:] for row in (line.split("|")[1:-1] for line in page_table().splitlines()[2:])}
    numbers = {name: [int(cell.replace(",", "")) for cell in row] for name, row in cells.items()}
    (one_a, one_b, one_all, one_mmas, _), (a, b, both, mmas, waits) = numbers["one_cta"], numbers["two_cta"]
    assert (a, 2 * b, 3 * both, 2 * mmas) == (one_a, one_b, 2 * one_all, one_mmas)
    shared, alone = numbers["two_cta_multicast"], numbers["one_cta_multicast"]
    assert (4 * shared[0], 2 * shared[1]) == (a, b) and (4 * alone[0], 4 * alone[1]) == (one_a, one_b)
    assert numbers["tma_store"][:4] == numbers["persistent"][:4] == [a, b, both, mmas]
    assert numbers["persistent"][4] < waits


@pytest.mark.parametrize("name", ["tiles", "masks"])
def test_page_has_the_pictures_of_the_code(name: str, tmp_path: Path) -> None:
    getattr(pictures, name)(tmp_path / "new.svg")
    assert (tmp_path / "new.svg").read_text() == (pictures.IMAGES / f"{name}.svg").read_text()


@pytest.mark.parametrize("name", pictures.TIMELINES)
def test_timeline_is_a_picture(name: str, tmp_path: Path) -> None:
    pictures.timeline(_common.rung_of(name), tmp_path / "new.svg")
    titles = {title.text for title in ElementTree.parse(tmp_path / "new.svg").iter("{http://www.w3.org/2000/svg}title")}
    assert titles >= {"run", "load a", "load b", "mma", "commit"}
    assert ("store c" in titles) == (name == "persistent")


def test_page_names_only_files_that_exist() -> None:
    for path in re.findall(r"\((images/\w+\.svg)\)", PAGE):
        assert (ROOT / "docs" / path).exists()
    for path in re.findall(r"examples/ladder/\w+\.py|jax_bwgemm/\w+/\w+\.py", PAGE):
        assert (ROOT / path).exists()
    assert set(re.findall(r"^\| `(\w+)` \| (?:`|\|)", PAGE, re.MULTILINE)) == set(table.RUNGS)


def test_layouts_are_the_published_ones() -> None:
    """(CTA, (row, column)) -> row + rows * column; the stride of one CTA means nothing."""
    pair = pictures.tv_layouts(_common.rung_of("two_cta").tile)
    assert pair["A"][:2] == pair["B"][:2] == ([2, 128, 16], [128, 1, 256])
    assert pair["C"][:2] == ([2, 128, 256], [128, 1, 256])
    one = pictures.tv_layouts(_common.rung_of("one_cta").tile)
    assert (one["A"][0], one["A"][1][1:]) == ([1, 128, 16], [1, 128])


@pytest.mark.parametrize(
    "missing", ["fence.proxy.async.shared::cta;", "bar.sync \t0;", "cp.async.bulk.wait_group.read \t0;"]
)
def test_emulator_refuses_a_store_without_its_guards(missing: str) -> None:
    """Between the threads' writes and TMA's read, and before the shared memory goes: as the page has it."""
    kernel = _common.compile_rung(_common.rung_of("tma_store"))
    assert missing in kernel.ptx
    broken = dataclasses.replace(kernel, ptx=kernel.ptx.replace(missing, ""))
    with pytest.raises(Fault):
        _common.emulate(_common.rung_of("tma_store"), *_common.operands("integers", SMALL[0]), kernel=broken)

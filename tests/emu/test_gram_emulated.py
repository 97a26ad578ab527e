"""Symmetric products: kernels that compute half of the tiles and store most of them twice, on both families, and
mutants of how the second store follows the first."""

from __future__ import annotations

import functools
import re
import zlib

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault, Schedule, parse
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts.shipped import BLACKWELL_SYMMETRIC, HOPPER_SYMMETRIC
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.emu import shipped
from tests.emu.edits import At, Edit, change, drop, mutated, number
from tests.emu.matmul import Facts
from tests.emu.sites import FENCE, STORE, WAIT_GROUP
from tests.emu.symmetric import check_symmetric, inputs, run_symmetric
from tests.fuzz import in_turn

pytestmark = pytest.mark.long

TILES = [("sm_90a", tile) for tile in HOPPER_SYMMETRIC] + [("sm_100f", tile) for tile in BLACKWELL_SYMMETRIC]
SHIPPED = [v for target in ("sm_90a", "sm_100f") for v in shipped.variants(target) if v.tile.symmetric]
OTHERS = [
    ("sm_90a", Tile(128, 128, cluster_m=2, cluster_n=2, symmetric=True)),
    ("sm_90a", Tile(64, 64, symmetric=True)),
    ("sm_100f", Tile(256, 128, cta_group=2, cluster_m=2, cluster_n=2, symmetric=True)),
    ("sm_100f", Tile(256, 256, cta_group=2, cluster_m=2, cluster_n=2, num_accs=2, symmetric=True)),
    ("sm_100f", Tile(128, 64, cta_group=2, cluster_m=2, cluster_n=2, symmetric=True)),
    ("sm_100f", Tile(64, 64, symmetric=True)),
]  # that are legal, too


def plain(target: str, tile: Tile, majors: str = "kk", out: str = "bfloat16") -> Variant:
    return Variant(target, "bfloat16", "bfloat16", out, *majors, tile)


@functools.cache
def compiled(variant: Variant) -> tuple[Module, Facts]:
    pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")
    from tests.emu import check_variant

    return check_variant.compiled(variant)


def built(variant: Variant) -> tuple[Module, Facts]:
    if reason := shipped.why_missing(variant):
        pytest.skip(reason)
    return shipped.module(variant.name), shipped.facts(variant)


@pytest.mark.parametrize("variant", SHIPPED, ids=lambda variant: variant.name)
def test_shipped(variant: Variant) -> None:
    """Rests along m and k, two matrices; Hopper's, which run on hardware too, under one of the five schedules. Every
    other run has more clusters than tiles, whose last ones have nothing to do."""
    seed = zlib.crc32(variant.name.encode()) % 1000 + 1
    sizes = variant.tile.span[0] + 24, variant.tile.k_tile + 8, 2
    for i, schedule in in_turn(Schedule.standard(seed), seed, shipped.num_schedules(variant)):
        raster = {"raster_group": 1 + i % 3, "raster_order": i % 2}
        raster |= {"stream": (4, 2)} if variant.tile.stream_k else {}
        check_symmetric(
            variant, *built(variant), sizes, seed, schedule=schedule, max_clusters=(2, None)[i % 2], **raster
        )


@pytest.mark.parametrize(("target", "tile"), [*TILES, *OTHERS], ids=str)
def test_edges(target: str, tile: Tile) -> None:
    """Less than a tile, one row less and one more than tiles have in 16 bytes, several groups; k of a few elements, of
    one stage, of more than there are."""
    variant, span = plain(target, tile), tile.span[0]
    sizes = [(8, 8, 1), (span - 8, tile.k_tile, 1), (span, 72, 2), (span + 8, 7 * tile.k_tile, 1), (2 * span + 8, 8, 1)]
    for i, own in enumerate(sizes):
        clusters = 1 + i % 3
        check_symmetric(variant, *compiled(variant), own, i, schedule=Schedule.standard(i)[i], max_clusters=clusters)


@pytest.mark.parametrize("tile", [tile for tile in HOPPER_SYMMETRIC if tile.stream_k], ids=str)
def test_streams(tile: Tile) -> None:
    """Tiles that clusters share are symmetric, too: both sides of one are added in the same parts."""
    variant = plain("sm_90a", tile)
    for i, schedule in enumerate(Schedule.standard(3)):
        sizes = tile.span[0] * 2 + 8, 72 + 64 * i, 1
        check_symmetric(variant, *compiled(variant), sizes, i, schedule=schedule, max_clusters=4, stream=(3 + i % 3, 4))


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("majors", ["kk", "mn"])
@pytest.mark.parametrize(("target", "tile"), [TILES[0], TILES[-2]], ids=str)
def test_large_tiles(target: str, tile: Tile, majors: str, out: str) -> None:
    variant = plain(target, tile, majors, out)
    for _, schedule in in_turn(Schedule.standard(7), len(majors + out), 2):
        check_symmetric(variant, *compiled(variant), (520, 136, 1), 7, schedule=schedule, max_clusters=2)


@pytest.mark.parametrize(("target", "tile", "mmas"), [("sm_90a", HOPPER_SYMMETRIC[0], 4), ("sm_100f", TILES[-2][1], 1)])
def test_half_of_the_tiles_are_multiplied(target: str, tile: Tile, mmas: int) -> None:
    """By hand: 1000 rows are 4 tiles of 256, 10 of whose 16 pairs are on or under the diagonal; k of 128 takes 8 steps
    of 16. In each of these a pair has one MMA for a cluster tile, and two CTAs of Hopper's have two slabs of 64 rows
    each."""
    variant = plain(target, tile)
    counters = check_symmetric(variant, *compiled(variant), (1000, 128, 1))
    assert counters.mmas == 10 * 8 * mmas


def images_commit_alone(lines: list[str]) -> list[str]:
    """A box without an image commits nothing: the label behind an image's store moves to below the commit."""
    lines = list(lines)
    for i in range(len(lines) - 2):
        if re.search(STORE, lines[i]) and lines[i + 1].endswith(":") and "commit_group" in lines[i + 2]:
            lines[i + 1], lines[i + 2] = lines[i + 2], lines[i + 1]
    return lines


PINGPONG, SOLO = plain("sm_90a", Tile(128, 128, pingpong=True, symmetric=True)), plain("sm_100f", TILES[-1][1])
DEFERRED = plain("sm_90a", HOPPER_SYMMETRIC[0])
WAITS = At(WAIT_GROUP + r".*[1-9];")
WRONG = "wrong-result"
# Of the second store of a box, and what must catch each, "" for an equivalent one; a kernel's last store is one.
CAUGHT: dict[str, tuple[tuple[Variant, ...], Edit, str]] = {
    "no buffer is waited for": ((PINGPONG, SOLO, DEFERRED), drop(WAITS), "overwrite-in-flight"),
    "one store too many stays in flight": (
        (PINGPONG, SOLO, DEFERRED),
        number(WAITS, lambda n: n + 1),
        "overwrite-in-flight",
    ),
    "a box without an image commits nothing": (
        (PINGPONG, SOLO, DEFERRED),
        images_commit_alone,
        "overwrite-in-flight",
    ),
    "an image is not fenced": ((PINGPONG, SOLO), drop(At(FENCE, before=STORE, last=True)), "missing-proxy-fence"),
    "an image leaves before all warps have written it": (
        (PINGPONG, SOLO),
        drop(At(r"bar\.sync", before=STORE, last=True)),
        "race overwrite-in-flight",
    ),
    "coordinates are the other way round": (
        (PINGPONG, SOLO, DEFERRED),
        change(At(STORE), r"\{(%r\d+), (%r\d+), (%r\d+)\}", r"{\2, \1, \3}"),
        WRONG,
    ),
    "an image is not transposed": ((PINGPONG, DEFERRED), change(At(r"stmatrix.*trans"), r"\.trans", ""), WRONG),
    # It has the bits that are there: those of both sides of a tile on the diagonal are the same.
    "an image of a tile on the diagonal is stored, too": (
        (PINGPONG, SOLO),
        drop(At(r"@%p\d+ bra", before=STORE, last=True)),
        "",
    ),
}


@functools.cache
def ptx(variant: Variant) -> tuple[str, Facts]:
    return shipped.ptx(variant.name), shipped.facts(variant)


@pytest.mark.parametrize(
    ("variant", "name"),
    [pytest.param(variant, name, id=f"{variant.tile}-{name}") for name, row in CAUGHT.items() for variant in row[0]],
)
def test_caught(variant: Variant, name: str) -> None:
    if reason := shipped.why_missing(variant):
        pytest.skip(reason)
    text, facts = ptx(variant)
    _, edit, rules = CAUGHT[name]
    a, _ = inputs(variant, 2 * variant.tile.span[0] + 8, 200, 1, 1)
    right, _ = run_symmetric(variant, parse(text), facts, a)
    for schedule in (Schedule(), Schedule.standard(1)[4], Schedule.standard(0)[3]):
        rule = ""
        try:
            out, _ = run_symmetric(variant, parse(mutated(text, edit)), facts, a, schedule=schedule, max_clusters=1)
            rule = "" if np.array_equal(out.view("u2"), right.view("u2")) else WRONG
        except Fault as fault:
            rule = fault.rule
        assert rule in (rules.split() or [""]), (schedule.name, rule)

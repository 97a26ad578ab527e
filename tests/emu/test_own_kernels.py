"""Our kernels, compiled here and executed: every shipped tile, every schedule, even and odd shapes."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault, Schedule, parse
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts.shipped import SHIPPED_TILES
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import Case, check_case, fused
from tests.emu.matmul import Facts, case_of, facts_of, run_matmul
from tests.fuzz import in_turn

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from jax_bwgemm.kernels.aot.compile import compile_variant  # noqa: E402 - needs cutlass
from tests.emu.check_variant import compiled, run_case  # noqa: E402 - needs cutlass

TARGETS = {"sm_90a": "hopper", "sm_100f": "blackwell"}
TILES = [
    (target, tile)
    for target, family in TARGETS.items()
    for tile in SHIPPED_TILES[family]
    if not (tile.promoted or tile.gated or tile.symmetric)
]  # promoted sums are float8's: test_hopper, test_catalogue; gated and symmetric: test_expressions, test_gram_emulated
MULTICAST = [
    ("sm_100f", Tile(256, 256, cta_group=2, cluster_m=4, cluster_n=4)),
    ("sm_100f", Tile(128, 64, cluster_m=4, cluster_n=4)),
    ("sm_100f", Tile(256, 64, cta_group=2, cluster_m=4, cluster_n=2)),
    ("sm_100f", Tile(64, 32, cluster_m=2, cluster_n=2)),
    ("sm_90a", Tile(128, 256, cluster_m=4)),
    ("sm_90a", Tile(128, 256, cluster_m=2, cluster_n=2)),
    ("sm_90a", Tile(128, 128, cluster_m=2, cluster_n=2)),
]
SPLITS = [Tile(64, 32, cluster_k=8), Tile(256, 64, cta_group=2, cluster_m=2, cluster_k=2)]
LEGAL_N = [
    *(Tile(64, n) for n in (16, 48, 80, 240)),
    *(Tile(128, n) for n in (16, 48, 112, 208)),
    *(Tile(128, n, cta_group=2, cluster_m=2) for n in (32, 96, 256)),
    *(Tile(256, n, cta_group=2, cluster_m=2) for n in (32, 96, 224)),
    Tile(128, 96, num_accs=2),
    Tile(256, 64, cta_group=2, cluster_m=2, num_accs=2),
]
PAIR = Tile(256, 256, cta_group=2, cluster_m=2)
FORMS = [("kn", "bfloat16", "identity"), ("mk", "float32", "identity"), ("kk", "bfloat16", "scale_bias_relu")]


@functools.cache
def kernel(
    target: str, tile: Tile, majors: str = "kn", out: str = "bfloat16", epilogue: str = "identity"
) -> tuple[Variant, Module, Facts]:
    variant = Variant(target, "bfloat16", "bfloat16", out, majors[0], majors[1], tile, fused(epilogue))
    return variant, *compiled(variant)


@pytest.mark.parametrize(("target", "tile"), TILES, ids=lambda value: str(value))
def test_shipped_tiles(target: str, tile: Tile) -> None:
    """One cluster walks all tiles of a problem that fits none of them, under one of the five schedules in turn."""
    variant, module, facts = kernel(target, tile)
    for _, schedule in in_turn(Schedule.standard(seed=1), TILES.index((target, tile)), 1):
        run_case(module, facts, case_of(variant, 264, 400, 200), schedule)


@pytest.mark.parametrize(("target", "tile"), MULTICAST, ids=str)
def test_multicast_clusters(target: str, tile: Tile) -> None:
    """Two clusters, tiles that are no multiple of either."""
    variant, module, facts = kernel(target, tile)
    m, n = tile.cluster_m * tile.cta_m, tile.cluster_n * tile.mma_n
    for seed in range(2):
        run_case(module, facts, case_of(variant, m - 8, n + 8, 136), Schedule.standard(seed)[4], 2, seed)


@pytest.mark.parametrize(("target", "tile"), MULTICAST[-3:], ids=str)
def test_fewer_tiles_than_a_cluster(target: str, tile: Tile) -> None:
    """One CTA's part of a tile, and one and a part along either side; the others of the cluster load and store what is
    not there."""
    variant, module, facts = kernel(target, tile)
    for seed, (m, n) in enumerate(((8, 8), (tile.cta_m + 8, 8), (8, tile.mma_n + 8))):
        run_case(module, facts, case_of(variant, m, n, 72), Schedule.standard(seed)[seed], None, seed)


@pytest.mark.parametrize("tile", LEGAL_N, ids=str)
def test_legal_widths(tile: Tile) -> None:
    """An n-major B with swizzle spans of 32, 64 and 128 bytes; store boxes of 32 and 64."""
    variant, module, facts = kernel("sm_100f", tile)
    case = case_of(variant, tile.cluster_m * tile.cta_m + 8, tile.mma_n + 8, 136)
    run_case(module, facts, case, Schedule.standard(3)[4])


@pytest.mark.parametrize("k", [1, 8, 64, 136, 520])
@pytest.mark.parametrize(
    "tile", [Tile(64, 32, cluster_k=8), Tile(256, 64, cta_group=2, cluster_m=2, cluster_k=2)], ids=str
)
def test_split_k_of_every_depth(tile: Tile, k: int) -> None:
    """Fewer k tiles than CTAs, as many, and more; several tiles a cluster; the same bits under every schedule."""
    variant, module, facts = kernel("sm_100f", tile, "kk", "float32")
    case = case_of(variant, tile.cluster_m * tile.cta_m + 1, tile.mma_n + 4, k)
    a, b, _ = case.inputs(k)
    results = [run_matmul(module, facts, a, b, max_clusters=1, schedule=s)[0] for s in Schedule.standard(k)]
    check_case(results[0], case.reference(a, b, None), case)
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(("majors", "out", "epilogue"), FORMS)
@pytest.mark.parametrize(("target", "tile"), [TILES[0], ("sm_100f", PAIR)], ids=lambda value: str(value))
def test_majors_outputs_and_epilogues(target: str, tile: Tile, majors: str, out: str, epilogue: str) -> None:
    variant, module, facts = kernel(target, tile, majors, out, epilogue)
    for seed in range(3):
        case = case_of(variant, 136, 520, 72 + 64 * seed, 2 - seed % 2, 1 + seed % 2)
        run_case(module, facts, case, Schedule.standard(seed)[4], 2, seed)


def test_even_shape_counts() -> None:
    """512x512x256 in 256x256 tiles of a pair: 4 tiles of 16 MMAs; each CTA loads its A and half of B."""
    variant, module, facts = kernel("sm_100f", PAIR)
    counters = run_case(module, facts, case_of(variant, 512, 512, 256), Schedule(), None)
    assert counters.mmas == 4 * 4 * 4
    per_cta = 128 * 256 * 2
    assert set(counters.tma_load_bytes.values()) == {per_cta}
    assert len(counters.tma_load_bytes) == 2 * 8


def doctored(target: str, tile: Tile, pattern: str, new: str) -> Fault:
    """What the emulator says of a kernel whose text was changed wherever the pattern matches."""
    text, facts = source(Variant(target, "bfloat16", "bfloat16", "bfloat16", "k", "n", tile))
    changed, count = re.subn(pattern, new, text)
    assert count, f"{pattern} is not in the kernel"
    module = parse(changed)
    case = Case(264, 520, 456)
    with pytest.raises(Fault) as error:
        run_case(module, facts, case, Schedule())
    return error.value


@functools.cache
def source(variant: Variant) -> tuple[str, Facts]:
    with tempfile.TemporaryDirectory() as dump:
        found = compile_variant(variant, Path(dump))
    return found.ptx, facts_of(variant, found)


DOCTORED = [
    (r"fence\.proxy\.async\S*;", "", "missing-proxy-fence"),
    (r"cp\.async\.bulk\.wait_group\.read\s+\d+;", "", "overwrite-in-flight"),
    (r"cp\.async\.bulk\.commit_group;", "", "overwrite-in-flight"),
    (r"fence\.mbarrier_init\S*;", "", "unpublished-init"),
    (r"tcgen05\.wait::ld\S*;", "", "missing-tmem-wait register-in-flight"),
    (r"tcgen05\.dealloc[^;]*;", "", "tmem-leak"),
    (r"bar\.sync\s+2, 160;", "", "deadlock uninitialised-read"),
    (r"tcgen05\.commit[^;]*;", "", "deadlock"),
    (r"mbarrier\.arrive\.expect_tx[^;]*;", "", "deadlock"),
    (r"(mov\.b32\s+%r\d+, )65536;", r"\g<1>49152;", "read-before-completion"),
    (
        r"mbarrier\.try_wait\.parity\.shared\.b64 P1, [^;]*;",
        "mov.pred P1, -1;",
        "race read-before-completion overwrite-in-flight",
    ),
]


@pytest.mark.parametrize(("pattern", "new", "rules"), DOCTORED)
def test_doctored_pair_kernel(pattern: str, new: str, rules: str) -> None:
    fault = doctored("sm_100f", PAIR, pattern, new)
    assert fault.rule in rules.split(), fault
    assert fault.rule in ("deadlock", "exit-in-flight") or fault.where is not None

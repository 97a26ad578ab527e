"""Direct tiles of Hopper: any row pitch without padding, and what each hand-over between threads and MMAs is for."""

from __future__ import annotations

import functools
import re

import pytest

from jax_bwgemm.emulator import Fault, Schedule, parse
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import fused
from tests.emu.matmul import Facts, facts_of
from tests.fuzz import in_turn

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from jax_bwgemm.kernels.aot.cubin import read_cubin  # noqa: E402 - needs cutlass
from jax_bwgemm.kernels.direct_load import lines_of  # noqa: E402 - needs cutlass
from tests.emu.check_variant import case_of, compiled, run_case  # noqa: E402 - needs cutlass
from tests.emu.test_hopper import kernel as compiled_kernel  # noqa: E402 - needs cutlass

BF16, F16, F32 = ("bfloat16",) * 3, ("float16",) * 3, ("bfloat16", "bfloat16", "float32")


def variant(
    m: int, n: int, majors: str = "knn", dtypes: tuple[str, str, str] = BF16, epilogue: str = "", cluster_k: int = 1
) -> Variant:
    node = fused(epilogue or "identity", majors[2])
    tile = Tile(m, n, cluster_k=cluster_k, direct=True)
    return Variant("sm_90a", *dtypes, *majors[:2], tile, node, majors[2], "threads")


VARIANTS = [
    variant(64, 16),
    variant(64, 16, "mkn", F16),
    variant(64, 32, "kkn", epilogue="scale_bias_relu"),
    variant(64, 32, "mnm", F32),
    variant(64, 48, "kkm", epilogue="bias_gelu"),
    variant(64, 64, "mnn", F32),
    variant(128, 64, "knn", ("bfloat16", "bfloat16", "float16"), "bias"),
    variant(128, 64, "mkm"),
    variant(64, 80, "mnn"),
    variant(192, 32, "kkn"),
    variant(256, 16, "mkn"),
    variant(64, 128, "kkn"),
    variant(64, 256, "mkn"),
    variant(128, 64, "knn", F32),  # rows that take more than a stage
    variant(64, 16, "kkn", cluster_k=8),
    variant(64, 32, "mnm", cluster_k=4),
    variant(64, 64, "mkn", F32, "scale_bias_relu", cluster_k=2),
    variant(64, 16, "knn", F16, cluster_k=2),
]
SHAPES = [
    (9, 7, 5),  # less than a chunk
    (66, 22, 150),  # all rows begin on 4 bytes
    (64, 16, 8),  # whole lines, a part of a k tile
    (67, 41, 131),  # rows of a, of b and of the result that no 16 bytes divide
    (72, 40, 67),  # an aligned m and n: only a k-major operand is raw
    (69, 35, 640),  # an aligned k: only an operand whose m or n is contiguous is raw; more k tiles than stages
    (130, 70, 1030),  # longer than all stages, of both
]


@functools.cache
def kernel(of: Variant) -> tuple[Module, Facts]:
    return compiled(of)


@pytest.mark.parametrize("of", VARIANTS, ids=lambda of: of.name)
def test_products(of: Variant) -> None:
    """Five shapes of seven, other ones for the next kernel, each under another schedule."""
    for seed, shape in in_turn(SHAPES, VARIANTS.index(of), 5):
        for _, schedule in in_turn(Schedule.standard(seed), seed, 1):
            run_case(*kernel(of), case_of(of, *shape), schedule, None, seed)


@pytest.mark.parametrize("of", VARIANTS[:4], ids=lambda of: of.name)
@pytest.mark.parametrize("batches", [(1, 3), (3, 1), (3, 3)])
def test_batches(of: Variant, batches: tuple[int, int]) -> None:
    """A matrix that all share, and matrices of which only the first begins on 16 bytes."""
    for seed, (m, n, k) in enumerate([(65, 17, 33), (72, 24, 64)]):
        case = case_of(of, m, n, k, *batches)
        run_case(*kernel(of), case, Schedule.standard(seed)[4 - seed], None, seed)


@pytest.mark.parametrize("of", VARIANTS, ids=lambda of: of.name)
def test_registers(of: Variant) -> None:
    """No local memory, and as many threads as multiply."""
    found = compiled_kernel(of)
    assert read_cubin(found.cubin).stack_bytes == 0
    assert found.num_threads == 128 * of.tile.num_consumer_warpgroups
    assert found.smem_bytes % 1024 == 0


def test_lines() -> None:
    """Of a k-major operand a line is a row's part of a k tile: 64 elements in 8 chunks or 32 words, so that 128 threads
    have 16 lines or 4 at a time. Of 16 columns that are contiguous a line has 2 chunks, and there are as many lines as
    k."""
    a, b = lines_of(Tile(64, 16), "a", "k", "bfloat16", 128), lines_of(Tile(64, 16), "b", "n", "bfloat16", 128)
    assert (a.boxes, a.rows, a.bytes, a.beside_bytes, a.stage_bytes) == (1, 64, 8192, 64 * 16, 12288)
    assert [(a.units(size), a.step(size), a.turns(size)) for size in (16, 4)] == [(8, 16, 4), (32, 4, 16)]
    assert (b.boxes, b.rows, b.bytes, b.beside_bytes, b.stage_bytes) == (1, 64, 2048, 64 * 16, 12288)
    assert [(b.units(size), b.step(size), b.turns(size)) for size in (16, 4)] == [(2, 64, 1), (8, 16, 4)]
    wide = lines_of(Tile(64, 80), "b", "n", "bfloat16", 128)
    assert (wide.units(16), wide.boxes, wide.rows, wide.total) == (2, 5, 64, 320)


WAIT, COMMIT = r"cp\.async\.wait_group[^;]*;", r"cp\.async\.commit_group\s*;"
FENCE, BARRIER = r"fence\.proxy\.async[^;]*;", r"(bar|barrier\.cta)\.sync\s+0[^;]*;"
MMA_WAIT = r"wgmma\.wait_group\.sync\.aligned\s+{};"
ONE_MORE = "one more MMA group is left"
DOCTORED = {
    "copies are not waited for": (WAIT, "", "read-before-completion uninitialised-read"),
    "one group too few is waited for": (r"(cp\.async\.wait_group\s+)5;", r"\g<1>6;", "read-before-completion"),
    "copies are in no group": (COMMIT, "", "read-before-completion uninitialised-read"),
    "no fence.proxy.async": (FENCE, "", "missing-proxy-fence"),
    "no barrier": (BARRIER, "", "race uninitialised-read read-before-completion overwrite-in-flight"),
    "stages are filled while MMAs read them": (MMA_WAIT.format(1), "", "overwrite-in-flight"),
    ONE_MORE: (MMA_WAIT.format(1), "wgmma.wait_group.sync.aligned 2;", "overwrite-in-flight"),  # not by raw lines
    "sums are stored without a wait": (MMA_WAIT.format(0), "", "register-in-flight"),
    "operands are read before the kernel before has ended": (r"griddepcontrol\.wait;", "", "before-grid-wait"),
}


ALIGNED, PAIRED, RAW = (72, 24, 1160), (66, 22, 1162), (67, 21, 1163)
BROKEN = [(what, shape) for what in DOCTORED for shape in (ALIGNED, RAW) if (what, shape) != (ONE_MORE, RAW)]
BROKEN += [(what, PAIRED) for what in list(DOCTORED)[:3]]  # of which nothing else differs


@pytest.mark.parametrize(("what", "shape"), BROKEN)
def test_doctored(what: str, shape: tuple[int, int, int]) -> None:
    """What the emulator says of a kernel that hands over too early, under every schedule."""
    pattern, instead, rules = DOCTORED[what]
    of = VARIANTS[0]
    found = compiled_kernel(of)
    changed, count = re.subn(pattern, instead, found.ptx)
    assert count, f"{pattern} is not in the kernel"
    for schedule in Schedule.standard(seed=2):
        with pytest.raises(Fault) as fault:
            run_case(parse(changed), facts_of(of, found), case_of(of, *shape), schedule)
        assert fault.value.rule in rules.split(), fault.value


SPLIT = next(of for of in VARIANTS if of.tile.cluster_k == 8)
WIDE_ROWS = next(of for of in VARIANTS if (of.tile.mma_m, of.out_dtype) == (128, "float32"))


@pytest.mark.parametrize(("of", "shape"), [
    (WIDE_ROWS, (72, 40, 24)), (WIDE_ROWS, (72, 37, 23)), (SPLIT, (40, 40, 1160)), (SPLIT, (40, 33, 1163))
])  # fmt: skip
def test_what_goes_through_the_stages_waits_for_them(of: Variant, shape: tuple[int, int, int]) -> None:
    """A kernel of either alignment has two barriers: in its loop, and behind it, where others may still multiply. The
    wide rows lie in a stage of a and in one of b."""
    found = compiled_kernel(of)
    barriers = list(re.finditer(BARRIER, found.ptx))
    assert len(barriers) == 4
    behind = barriers[1 if shape[2] % 8 == 0 else 3]
    changed = parse(found.ptx[: behind.start()] + found.ptx[behind.end() :])
    rules = []
    for schedule in Schedule.standard(seed=1):
        try:
            run_case(changed, facts_of(of, found), case_of(of, *shape), schedule)
        except Fault as fault:
            rules.append(fault.rule)
    assert rules and set(rules) <= {"race", "overwrite-in-flight"}


def test_nobody_arrives_at_barriers_that_are_not_there_yet() -> None:
    found = compiled_kernel(SPLIT)
    changed, count = re.subn(r"barrier\.cluster\.wait[^;]*;", "", found.ptx)
    assert count == 2  # a kernel of either alignment
    for schedule in Schedule.standard(seed=1):
        with pytest.raises(Fault) as fault:
            run_case(parse(changed), facts_of(SPLIT, found), case_of(SPLIT, *ALIGNED), schedule)
        assert fault.value.rule == "unpublished-init"


@pytest.mark.parametrize("which", [0, 1, 2], ids=["has come", "has been read", "and the lines after"])
def test_lines_are_realigned_in_place_by_lanes_that_wait_for_each_other(which: int) -> None:
    """Of a, until what the warp loaded has come, and until all of two lines has been read, twice; then of b."""
    found = compiled_kernel(VARIANTS[0])
    loop = [m.end() for m in re.finditer(WAIT, found.ptx)][-1]
    until = found.ptx.index("wgmma.fence", loop)
    syncs = [m for m in re.finditer(r"bar\.warp\.sync[^;]*;", found.ptx) if loop < m.start() < until]
    assert len(syncs) == 5
    changed = parse(found.ptx[: syncs[which].start()] + found.ptx[syncs[which].end() :])
    for schedule in Schedule.standard(seed=2):
        with pytest.raises(Fault) as fault:
            run_case(changed, facts_of(VARIANTS[0], found), case_of(VARIANTS[0], *RAW), schedule)
        assert fault.value.rule == "race"

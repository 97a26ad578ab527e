"""TMA: swizzles, boxes, out-of-bounds elements and multicast against formulas written out here; the 128 bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_bwgemm.emulator import (
    Counters,
    Fault,
    Launch,
    LaunchError,
    Memory,
    Schedule,
    TensorMap,
    UnsupportedInstruction,
    parse,
    run,
)
from jax_bwgemm.emulator.reductions import reduction
from jax_bwgemm.emulator.tensormap import swizzled
from tests.emu.snippet import module_text, run_snippet

START = """
mov.u32 %r1, %tid.x; mov.b32 %r10, smem; ld.param.b64 %d1, [p0]; mov.b32 %r11, 1;
elect.sync %r12|%p1, -1; @%p1 mbarrier.init.shared.b64 [%r10], %r11; fence.mbarrier_init.release.cluster;
mov.b32 %r13, {bytes}; mov.b64 %d2, p2; cvta.param.u64 %d3, %d2; mov.b64 %d4, 0;
"""
LOAD = """
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], %r13;
@%p1 cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
 [%r10+{at}], [%d3, {{{coords}}}], [%r10];
"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0; @%p3 bra OK; bra WAIT; OK:\n"


def copy_out(at: int, size: int) -> str:
    """Lane t copies every 32nd 16-byte piece from shared memory to p0."""
    lines = ["shl.b32 %r20, %r1, 4; add.s32 %r21, %r10, %r20; cvt.u64.u32 %d20, %r20; add.s64 %d21, %d1, %d20;"]
    for offset in range(0, size, 512):
        lines.append(
            f"ld.shared.v2.b64 {{%d22, %d23}}, [%r21+{at + offset}]; st.global.v2.b64 [%d21+{offset}], {{%d22, %d23}};"
        )
    return "\n".join(lines)


def expected_box(source: np.ndarray, coords: tuple[int, ...], box: tuple[int, ...]) -> np.ndarray:
    """Element by element; outside is zero. Coordinates and box innermost first."""
    out = np.zeros(box[::-1], source.dtype)
    for index in np.ndindex(*box[::-1]):
        place = tuple(i + c for i, c in zip(index, coords[::-1], strict=True))
        if all(0 <= p < s for p, s in zip(place, source.shape, strict=True)):
            out[index] = source[place]
    return out


def flip(offset: int, span: int) -> int:
    """The swizzle in words of the CUDA guide: the 16-byte chunk number within a span is xor-ed with the number of the
    128-byte line, modulo what the span holds."""
    line, chunk = offset // 128, offset // 16 % 8
    kept = span // 16
    return offset - chunk * 16 + (chunk ^ (line % kept)) * 16 if span else offset


@given(st.integers(0, 1 << 17), st.sampled_from([0, 32, 64, 128]))
def test_swizzle_is_an_involution_within_a_line(address: int, span: int) -> None:
    once = swizzled(address, span)
    assert swizzled(once, span) == address and once // 128 == address // 128
    assert once == flip(address, span)


@settings(max_examples=20, deadline=None)
@given(
    span=st.sampled_from([32, 64, 128]),
    coords=st.tuples(st.integers(-10, 10).map(lambda c: 8 * c), st.integers(-20, 20), st.integers(-1, 2)),
    rows=st.sampled_from([8, 16, 24]),
    at=st.sampled_from([0, 128, 256, 1024 + 384]),
    seed=st.integers(0, 3),
)
def test_load(span: int, coords: tuple[int, int, int], rows: int, at: int, seed: int) -> None:
    """A box at any place, also partly or wholly outside, at any 128-byte start, under every delay."""
    source = np.random.default_rng(seed).integers(1, 1 << 16, (2, 19, 72), dtype=np.uint16)
    box = (span // 2, rows, 1)
    size, at = span * rows, 1024 + at
    padded = -(-size // 512) * 512
    out = np.zeros(padded, np.uint8)
    body = START.format(bytes=size) + LOAD.format(rank=3, at=at, coords=", ".join(map(str, coords))) + WAIT
    body += copy_out(at, size - size % 512)

    def maps(addresses: tuple[int, ...]) -> list[TensorMap]:
        return [TensorMap(addresses[1], (72, 19, 2), (144, 144 * 19), box, "f16", span, "s")]

    run_snippet(body, (out, source), maps, schedule=Schedule.standard(seed)[4])
    flat = expected_box(source, coords, box).reshape(-1).view(np.uint8)
    for chunk in range((size - size % 512) // 16):
        place = flip(0x400 + at + 16 * chunk, span) - 0x400 - at
        if 0 <= place < size - size % 512:
            assert (out[place : place + 16] == flat[16 * chunk : 16 * chunk + 16]).all()


@pytest.mark.parametrize("at", [1024, 1024 + 128, 1024 + 384])
def test_swizzle_of_32_byte_atoms(at: int) -> None:
    """CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B: of 128-byte line l, the 32 bytes c go to place c ^ (l mod 4). TF32 words are
    rounded to nearest even."""
    source = np.random.default_rng(at).standard_normal((16, 32)).astype(np.float32)
    out = np.zeros(2048, np.uint8)
    body = START.format(bytes=2048) + LOAD.format(rank=2, at=at, coords="0, 0") + WAIT + copy_out(at, 2048)

    def maps(addresses: tuple[int, ...]) -> list[TensorMap]:
        return [TensorMap(addresses[1], (32, 16), (128,), (32, 16), "tf32", 128, "s", 32)]

    run_snippet(body, (out, source), maps)
    units = source.astype(np.float64) / 2.0 ** (np.floor(np.log2(np.abs(source.astype(np.float64)))) - 10)
    rounded = np.round(units) * (source / units)  # np.round: ties to even
    for row, piece in np.ndindex(16, 4):
        line = (0x400 + at) // 128 + row
        place = 128 * row + 32 * (piece ^ line % 4)
        assert (out[place : place + 32].view(np.float32) == rounded[row, 8 * piece : 8 * piece + 8]).all()
    with pytest.raises(LaunchError, match="a swizzle atom of 16, or of 32 with a swizzle of 128, got 32"):
        TensorMap(0, (32, 16), (128,), (16, 16), "tf32", 64, "s", 32)


@pytest.mark.parametrize("element", ["u8", "s8", "e4m3", "e5m2"])
def test_boxes_of_bytes(element: str) -> None:
    """Columns of a result that is contiguous in m: a box of 32 rows by 16 columns of bytes goes in and out."""
    source = np.random.default_rng(1).integers(0, 256, (40, 48), dtype=np.uint8)
    target = np.full((40, 48), 77, np.uint8)
    body = START.format(bytes=512) + LOAD.format(rank=2, at=1024, coords="16, 8") + WAIT
    body += "mov.b64 %d5, p3; cvta.param.u64 %d6, %d5;"
    body += "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d6, {32, 32}], [%r10+1024];"
    body += COMMIT + DRAIN

    def maps(addresses: tuple[int, ...]) -> list[TensorMap]:
        return [TensorMap(a, (48, 40), (48,), (32, 16), element, 32, "s") for a in addresses]

    run_snippet(body, (target, source), lambda a: maps(a)[::-1])
    want = np.full((40, 48), 77, np.uint8)
    want[32:40, 32:48] = source[8:16, 16:32]
    assert (target == want).all()


@pytest.mark.parametrize("rank", [1, 2, 4, 5])
def test_ranks(rank: int) -> None:
    shape = (3, 2, 5, 4, 64)[5 - rank :]
    source = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    box = (64, 4, 1, 1, 1)[:rank]
    coords = (0, 1, 2, 1, 2)[:rank]
    size = 2 * int(np.prod(box))
    out = np.zeros(512, np.uint8)
    body = START.format(bytes=size) + LOAD.format(rank=rank, at=1024, coords=", ".join(map(str, coords))) + WAIT
    body += (
        copy_out(1024, 512) if size >= 512 else "setp.lt.u32 %p5, %r1, 8; @!%p5 bra END;" + copy_out(1024, 512) + "END:"
    )

    def maps(addresses: tuple[int, ...]) -> list[TensorMap]:
        strides = np.cumprod((2, *shape[::-1]))[1:rank]
        return [TensorMap(addresses[1], shape[::-1], tuple(int(s) for s in strides), box, "u16", 0, "s")]

    run_snippet(body, (out, source), maps)
    assert out[:size].view(np.uint16).tolist() == expected_box(source, coords, box).reshape(-1).tolist()


STORE = """
shl.b32 %r20, %r1, 4; add.s32 %r21, %r10, %r20; st.shared.v4.b32 [%r21+1024], {%r1, %r1, %r1, %r1};
st.shared.v4.b32 [%r21+1536], {%r1, %r1, %r1, %r1}; FENCE
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d3, {48, 2}], [%r10+1024];
COMMIT DRAIN
"""


def run_store(fence: str, commit: str, drain: str, coords: str = "{48, 2}") -> np.ndarray:
    target = np.full((6, 56), 7, np.uint16)
    store = STORE.replace("{48, 2}", coords).replace("FENCE", fence)
    body = START.format(bytes=0) + store.replace("COMMIT", commit).replace("DRAIN", drain)

    def maps(addresses: tuple[int, ...]) -> list[TensorMap]:
        return [TensorMap(addresses[1], (56, 6), (112,), (16, 8), "u16", 0, "t")]

    run_snippet(body.replace("32; mbarrier", "32; mbarrier"), (np.zeros(1, np.uint32), target), maps)
    return target


FENCE, COMMIT, DRAIN = (
    "fence.proxy.async.shared::cta;",
    "cp.async.bulk.commit_group;",
    "cp.async.bulk.wait_group.read 0;",
)


def test_store_clips() -> None:
    """Only rows 2..5 and columns 48..55 are inside; 8 elements a lane of 4 words."""
    target = run_store(FENCE, COMMIT, DRAIN)
    assert (target[:, :48] == 7).all() and (target[:2] == 7).all()
    lanes = np.arange(4)[:, None] * 2 + np.zeros(8, int)
    assert (target[2:, 48:] == np.where(np.arange(8) % 2 == 0, lanes, 0)).all()


def test_store_at_negative_coordinates() -> None:
    with pytest.raises(Fault, match="coordinates of 0 and up"):
        run_store(FENCE, COMMIT, DRAIN, "{48, -2}")


@pytest.mark.parametrize(
    ("fence", "commit", "drain", "rule"),
    [("", COMMIT, DRAIN, "missing-proxy-fence"), (FENCE, COMMIT, "", "exit-in-flight"),
     (FENCE, "", DRAIN, "exit-in-flight")],
)  # fmt: skip
def test_store_rules(fence: str, commit: str, drain: str, rule: str) -> None:
    with pytest.raises(Fault) as error:
        run_store(fence, commit, drain)
    assert error.value.rule == rule


REDUCE = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.bulk_group [%d3, {{{coords}}}], [%r10+1024];"


def run_reduce(
    element: str, instructions: str, count: int = 1, tail: str = COMMIT + DRAIN, elected: bool = True
) -> tuple[np.ndarray, Counters]:
    """Each of `count` clusters has 32 words, lane t has t in its own, and reduces them into 64 words of 100."""
    target = np.full((2, 32), 100, np.uint32)
    body = START.format(bytes=0) + "shl.b32 %r20, %r1, 2; add.s32 %r21, %r10, %r20; st.shared.b32 [%r21+1024], %r1;"
    body += FENCE + "bar.warp.sync -1; mov.u32 %r40, %ctaid.x; setp.eq.b32 %p6, %r40, 0; setp.ne.b32 %p7, %r40, 0;"
    body += ("@!%p1 bra END;" if elected else "") + instructions + tail + "END:"
    memory = Memory()
    addresses = [memory.register(a, f"p{i}") for i, a in enumerate((np.zeros(1, np.uint32), target))]
    tensor_map = TensorMap(addresses[1], (32, 2), (128,), (32, 1), element, 0, "t")
    params = (*addresses, tensor_map)
    counters = run(parse(module_text(body, params)), Launch((count, 1, 1), (32, 1, 1), params, (1, 1, 1), 4096), memory)
    return target, counters


def test_reduce_counts_as_a_store() -> None:
    """Three clusters add to one box: no race, and nothing is lost."""
    target, counters = run_reduce("u32", REDUCE.format(op="add", coords="0, 1"), 3)
    assert target.tolist() == [[100] * 32, [100 + 3 * t for t in range(32)]]
    assert counters.tma_store_bytes == {("t", cta): 128 for cta in range(3)}


STORE_ROW = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d3, {0, 0}], [%r10+1024];"
ADD_ROW, MAX_ROW = (REDUCE.format(op=op, coords="0, 0") for op in ("add", "max"))


@pytest.mark.parametrize(
    ("element", "instructions", "rule"),
    [
        ("f32", ADD_ROW, None),
        ("f32", MAX_ROW, "tensor-map"),
        ("s32", ADD_ROW.replace(".add", ".inc"), "tensor-map"),
        ("f32", ADD_ROW.replace(".add", ".xor"), "tensor-map"),
        ("u32", ADD_ROW.replace("0, 0", "0, -1"), "out-of-bounds"),
        ("u32", ADD_ROW.replace("0, 0", "2, 0"), "misaligned"),
        ("u32", f"@%p6 {ADD_ROW} @%p7 {MAX_ROW}", "race"),
        ("u32", f"@%p6 {STORE_ROW} @%p7 {ADD_ROW}", "race"),
        ("u32", f"@%p6 {ADD_ROW} @%p6 {STORE_ROW} @%p7 {ADD_ROW}", "race"),
        ("u32", f"{ADD_ROW} @%p7 {STORE_ROW}", "race"),
    ],
)
def test_reduce_rules(element: str, instructions: str, rule: str | None) -> None:
    """The words of lanes 1..31 are subnormal as float32: that sum is refused when it happens."""
    with pytest.raises(Fault) as error:
        run_reduce(element, instructions, 2)
    assert error.value.rule == (rule or "tensor-map") and (rule or "subnormal" in error.value.message)


@pytest.mark.parametrize("operation", ["and", "or", "xor"])
def test_bitwise_reductions_of_signed_64_bit_maps_do_not_exist(operation: str) -> None:
    """The only pair that hardware refuses among integers: min and max of s64 are fine, and so are the bits of u64."""
    assert reduction(operation, "s64") is None
    assert reduction(operation, "u64") is not None
    assert reduction("min", "s64") is not None


def test_reduce_is_issued_once_and_waited_for() -> None:
    for tail, elected, rule in ((COMMIT + DRAIN, False, "multiple-issue"), (COMMIT, True, "exit-in-flight")):
        with pytest.raises(Fault) as error:
            run_reduce("u32", ADD_ROW, tail=tail, elected=elected)
        assert error.value.rule == rule


@pytest.mark.parametrize("form", [".add.min.bulk_group", ".bulk_group", ".add", ".mul.bulk_group"])
def test_unknown_reductions(form: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_reduce("u32", ADD_ROW.replace(".add.bulk_group", form))


def load_rule(body: str, **options: int) -> str:
    source = np.zeros((64, 64), np.uint16)

    def maps(addresses: tuple[int, ...]) -> list[TensorMap]:
        return [TensorMap(addresses[1], (64, 64), (128,), (64, 8), "u16", 128, "s")]

    with pytest.raises(Fault) as error:
        run_snippet(START.format(bytes=1024) + body, (np.zeros(512, np.uint8), source), maps, **options)
    return error.value.rule


def test_load_rules() -> None:
    load = LOAD.format(rank=2, at=1024, coords="0, 0")
    assert load_rule(load + copy_out(1024, 512)) == "read-before-completion"
    assert load_rule(load) == "exit-in-flight"
    assert load_rule(load.replace("1024", "1040")) == "misaligned"
    assert load_rule(load.replace("{0, 0}", "{4, 0}")) == "misaligned"
    assert load_rule(load.replace("1024", "65536")) == "out-of-bounds"
    assert load_rule(load.replace("+1024", "")) == "barrier-misuse"
    assert load_rule(load.replace("@%p1 cp", "cp")) == "multiple-issue"
    assert load_rule(load.replace(".2d", ".3d").replace("0, 0", "0, 0, 0")) == "tensor-map"
    again = "@%p1 cp" + load.partition("@%p1 cp")[2]
    assert load_rule(load + again) == "overwrite-in-flight"
    assert load_rule(load.replace("%r13;\n", "%r11;\n") + WAIT) == "deadlock"


def test_multicast_reaches_every_cta_of_the_mask() -> None:
    """CTA 1 of 4 loads into CTAs 1 and 3; each waits on its own barrier and copies its own bytes out."""
    source = np.arange(8 * 64, dtype=np.uint16).reshape(8, 64)
    out = np.zeros(4 * 1024, np.uint8)
    body = (
        START.format(bytes=1024)
        + """
    barrier.cluster.arrive.relaxed; barrier.cluster.wait; mov.u32 %r30, %cluster_ctarank; and.b32 %r31, %r30, 1;
    setp.eq.b32 %p4, %r31, 0; @%p4 bra END; mul.wide.u32 %d10, %r30, 1024; add.s64 %d1, %d1, %d10;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], %r13; setp.ne.b32 %p5, %r30, 1; @%p5 bra PASS; mov.b16 %h1, 10;
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
    [%r10+1024], [%d3, {0, 0}], [%r10], %h1;
    PASS: """
        + WAIT
        + copy_out(1024, 1024)
        + "END: barrier.cluster.arrive; barrier.cluster.wait;"
    )

    def maps(addresses: tuple[int, ...]) -> list[TensorMap]:
        return [TensorMap(addresses[1], (64, 8), (128,), (64, 8), "u16", 0, "s")]

    counters = run_snippet(body, (out, source), maps, cluster=4)
    parts = out.reshape(4, 1024).view(np.uint16)
    assert (parts[1] == source.reshape(-1)).all() and (parts[3] == parts[1]).all()
    assert not parts[0].any() and not parts[2].any()
    assert counters.tma_load_bytes == {("s", 1): 1024}
    assert counters.tma_delivered_bytes == {("s", 1): 1024, ("s", 3): 1024}


def test_decoding_the_128_bytes() -> None:
    """bf16, rank 3, 128-byte swizzle, laid out by hand."""
    flags = 2 << 4 | 10 << 7 | 3 << 13
    words = struct.pack("<QI4I4x5I3x5B", 1 << 20, flags, 144 // 16, 2736 // 16, 0, 0, 71, 18, 1, 0, 0, 63, 7, 0, 0, 0)
    assert TensorMap.decode(words + bytes(128 - len(words))) == TensorMap(
        1 << 20, (72, 19, 2), (144, 2736), (64, 8, 1), "bf16", 128
    )


def test_decoding_tf32_in_atoms_of_32_bytes() -> None:
    flags = 1 << 4 | 7 << 7 | 3 << 13 | 1 << 16 | 1 << 19
    words = struct.pack("<QI4I4x5I3x5B", 1 << 20, flags, 160 // 16, 0, 0, 0, 39, 7, 0, 0, 0, 31, 7, 0, 0, 0)
    wanted = TensorMap(1 << 20, (40, 8), (160,), (32, 8), "tf32", 128, swizzle_atom_bytes=32)
    assert TensorMap.decode(words + bytes(128 - len(words))) == wanted

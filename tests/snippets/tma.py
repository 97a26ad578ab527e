"""Tensor copies: ranks, element types, swizzles, boxes partly or wholly outside, multicast, stores that are clipped,
reductions.

Expected images are written out element by element here.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from tests.snippets.kit import BEGIN, FLOATS, MapOf, Result, Snippet, copy_in, copy_out, wait
from tests.snippets.rounding import BF16, F16, F32, Format

BOX_AT = 1024  # from the start of dynamic shared memory, which lies at 0x400
START = (
    BEGIN
    + """
elect.sync %r12|%p1, -1; mov.b32 %r11, 1; @%p1 mbarrier.init.shared.b64 [%r10], %r11;
fence.mbarrier_init.release.cluster; barrier.cluster.arrive; barrier.cluster.wait;
"""
)
LOAD = "cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
WORDS = np.array(
    [[0x3F801000, 0x3F803000, 0xBF801000, 0xBF803000, 0x3F800FFF, 0x3F801001, 0x7F7FFFFF, 0xFF7FF000, 0x7F800000,
      0xFF800000, 0x7F800001, 0x7FC00000, 0xFFC12345, 0x7FFFFFFF, 1, 0x1000, 0x3000, 0x1001, 0xFFF, 0x80001000,
      0x007FFFFF, 0x00800FFF, 0x807FF000, 0x7F7FEFFF, 0x7F7FF000, 0x12345678, 0x9ABCDEF0, 0x3F802000, 0, 0x80000000,
      0x80000001, 0x00001FFF]], np.uint32,
)  # fmt: skip
TF32 = Format(11, -126, 127, 19, 0x3FFFF)
SIZES = {"u8": 1, "u16": 2, "f16": 2, "bf16": 2, "u32": 4, "f32": 4, "tf32": 4, "u64": 8}


def boxed(tensor: np.ndarray, coords: tuple[int, ...], box: tuple[int, ...]) -> np.ndarray:
    """Zeros where the box leaves the tensor. Coordinates and box innermost first, the tensor outermost first."""
    places = [np.arange(c, c + b) for c, b in zip(coords[::-1], box[::-1], strict=True)]
    inside = [(p >= 0) & (p < s) for p, s in zip(places, tensor.shape, strict=True)]
    clamped = [np.clip(p, 0, s - 1) for p, s in zip(places, tensor.shape, strict=True)]
    mask = np.ones(box[::-1], bool)
    for axis, ok in enumerate(inside):
        mask &= ok.reshape([-1 if i == axis else 1 for i in range(len(inside))])
    return np.where(mask, tensor[np.ix_(*clamped)], tensor.dtype.type(0))


def scrambled(flat: np.ndarray, span: int, at: int = BOX_AT) -> np.ndarray:
    """Bytes of a box as they lie from `at` on: within its span, chunk c of line l is chunk c ^ (l mod span/16)."""
    out = flat.copy()
    for i in range(0, len(flat), 16) if span else ():
        line, chunk = divmod((at + i) // 16, 8)
        j = (line * 8 + (chunk ^ line % (span // 16))) * 16 - at
        out[j : j + 16] = flat[i : i + 16]
    return out


def tensor_of(shape: tuple[int, ...], element: str, seed: int = 0) -> np.ndarray:
    """Random bits, floats without NaN."""
    size = SIZES[element]
    bits = np.random.default_rng(seed).integers(1, 1 << 8 * size, shape, np.uint64, endpoint=False)
    bits &= np.uint64(
        {"f16": 0xBFFF, "bf16": 0xBFFF, "f32": 0xBFFFFFFF, "tf32": 0xBFFFFFFF}.get(element, (1 << 64) - 1)
    )
    return bits.astype(f"u{size}")


def as_loaded(words: np.ndarray, element: str) -> np.ndarray:
    """tf32 is rounded on the way: 11 digits, to nearest even, one NaN. All other types keep their bits."""
    if element != "tf32":
        return words
    values = words.view(np.float32).reshape(-1)
    rounded = [
        TF32.nan if v != v else TF32.infinity(v < 0) if np.isinf(v) else TF32.encode(Fraction(float(v)), np.signbit(v))
        for v in values
    ]
    return (np.array(rounded, np.uint32) << 13).reshape(words.shape)


def map_of(array: int, tensor: np.ndarray, box: tuple[int, ...], element: str, span: int) -> MapOf:
    return MapOf(array, tensor.shape[::-1], tensor.strides[-2::-1], box, element, span)


def load(
    name: str, shape: tuple[int, ...], box: tuple[int, ...], coords: tuple[int, ...], element: str = "u16",
    span: int = 0, at: int = BOX_AT, hint: bool = False, tensor: np.ndarray | None = None,
) -> Snippet:  # fmt: skip
    """`shape` outermost first, box and coordinates innermost first."""
    tensor = tensor_of(shape, element) if tensor is None else tensor
    size = int(np.prod(box)) * tensor.itemsize
    expected = scrambled(
        np.ascontiguousarray(boxed(as_loaded(tensor, element), coords, box)).reshape(-1).view(np.uint8), span, at
    )
    where = ", ".join(map(str, coords))
    opcode = LOAD.format(rank=len(shape)) + (".L2::cache_hint" if hint else "")
    body = START + f"""
    mov.b32 %r13, {size}; mov.b64 %d2, p2; cvta.param.u64 %d3, %d2; mov.b64 %d4, 0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], %r13;
    @%p1 {opcode} [%r10+{at}], [%d3, {{{where}}}], [%r10]{', %d4' if hint else ''};
    """ + wait("%r10", 0, "FULL") + copy_out(0, at, size, 32)  # fmt: skip
    start = np.full(size, 0xEE, np.uint8)
    return Snippet(name, body, (Result("box", start, expected),), (tensor,), (map_of(1, tensor, box, element, span),))


def store(name: str, shape: tuple[int, ...], box: tuple[int, ...], coords: tuple[int, ...], element: str = "u16",
          span: int = 0, at: int = BOX_AT) -> Snippet:  # fmt: skip
    """The box starts with consecutive numbers in shared memory; outside elements must not be written."""
    size = SIZES[element]
    target = np.full(shape, 0xEE, f"u{size}")
    values = (np.arange(np.prod(box)) * 37 + 1).astype(f"u{size}").reshape(box[::-1])
    expected = target.copy()
    for index in np.ndindex(*box[::-1]):
        place = tuple(i + c for i, c in zip(index, coords[::-1], strict=True))
        if all(0 <= p < s for p, s in zip(place, shape, strict=True)):
            expected[place] = values[index]
    image = scrambled(values.reshape(-1).view(np.uint8), span, at)
    where = ", ".join(map(str, coords))
    body = BEGIN + copy_in(1, at, len(image), 32) + f"""
    mov.b64 %d2, p2; cvta.param.u64 %d3, %d2; fence.proxy.async.shared::cta; bar.warp.sync -1; elect.sync %r12|%p1, -1;
    @%p1 cp.async.bulk.tensor.{len(shape)}d.global.shared::cta.tile.bulk_group [%d3, {{{where}}}], [%r10+{at}];
    @%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;
    """  # fmt: skip
    return Snippet(
        name, body, (Result("tensor", target, expected),), (image,), (map_of(0, target, box, element, span),)
    )


SHAPES = ((9, 72), (5, 9, 72), (3, 5, 9, 72), (2, 3, 5, 9, 72))
PLACES = {
    "inside": (0, 1, 1, 0, 0),
    "negative": (-16, -3, -1, -1, -1),
    "past-the-end": (40, 5, 3, 1, 0),
    "outside": (72, 0, 0, 0, 0),
    "far": (-2147483648, 2147483647, 0, 0, 0),
    "last-piece": (-56, -7, 0, 0, 0),
}


def ranks() -> list[Snippet]:
    """Ranks 1..5, each inside, on both borders and outside."""
    out = []
    for place, coords in PLACES.items():
        out.append(
            load(f"tma-load-1d-{place}", (200,), (64,), (coords[0] * 2 if place == "past-the-end" else coords[0],))
        )
        for shape in SHAPES:
            box = (64, 8, 3, 2, 2)[: len(shape)]
            out.append(load(f"tma-load-{len(shape)}d-{place}", shape, box, coords[: len(shape)]))
    return out


def swizzles() -> list[Snippet]:
    """Each span, at every start that a box may have within a swizzle atom, with whole and partial boxes."""
    out = []
    for span in (32, 64, 128):
        for at in (1024, 1024 + 128, 1024 + 256, 1024 + 640, 2048 + 896):
            box = (span // 2, 24, 1)
            out.append(
                load(
                    f"tma-load-swizzle-{span}-{at}", (2, 40, 72), box, (-8 if at % 256 else 24, 20, 1), "bf16", span, at
                )
            )
        out.append(load(f"tma-load-swizzle-{span}-few-rows", (2, 40, 72), (span // 2, 4, 1), (8, 2, 0), "f16", span))
    return out


def elements() -> list[Snippet]:
    """Every element type; ties, edges and NaN of f32, which keeps its bits, and of tf32, which does not."""
    out = []
    for element, size in SIZES.items():
        box = (128 // size, 16)
        out.append(load(f"tma-load-{element}", (12, 384 // size), box, (-48 // size, 4), element, 128))
    for element in ("f32", "tf32"):
        out.append(load(f"tma-load-words-{element}", (1, 32), (32, 1), (0, 0), element, tensor=WORDS))
    return [*out, load("tma-load-hint", (9, 72), (64, 8), (0, 1), hint=True)]


def stores() -> list[Snippet]:
    """Their coordinates must not be negative."""
    out = []
    for place in ("inside", "past-the-end", "outside"):
        coords = PLACES[place]
        for shape in SHAPES:
            box = (64, 8, 3, 2, 2)[: len(shape)]
            out.append(store(f"tma-store-{len(shape)}d-{place}", shape, box, coords[: len(shape)]))
    out.append(store("tma-store-1d", (200,), (64,), (152,)))
    for span in (32, 64, 128):
        for at in (1024, 1024 + 384):
            out.append(
                store(f"tma-store-swizzle-{span}-{at}", (2, 40, 72), (span // 2, 24, 1), (48, 30, 1), "bf16", span, at)
            )
    for span in (32, 64, 128):  # bytes, of rows or of columns: TMA cannot tell
        out.append(store(f"tma-store-u8-{span}", (2, 40, 176), (span, 24, 1), (160, 30, 1), "u8", span))
    return [*out, store("tma-store-f32", (9, 40), (32, 8), (16, 4), "f32", 128)]


FORMATS = {"f32": F32, "f16": F16, "bf16": BF16}
ON_NUMBERS: dict[str, Callable[[int, int], int]] = {
    "add": lambda x, y: x + y,
    "min": min,
    "max": max,
    "inc": lambda x, y: 0 if x >= y else x + 1,
    "dec": lambda x, y: y if x == 0 or x > y else x - 1,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
}
REDUCTIONS = {
    "u32": tuple(ON_NUMBERS),
    "s32": ("add", "min", "max", "and", "or", "xor"),
    "u64": ("add", "min", "max", "and", "or", "xor"),
    "s64": ("min", "max"),
    "f32": ("add",),
    "f16": ("add", "min", "max"),
    "bf16": ("add", "min", "max"),
}  # PTX ISA, cp.reduce.async.bulk.tensor; an H200 refuses and, or, xor on an s64 map


def reduced(operation: str, element: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Element by element, in Python's integers and fractions."""
    if element in FORMATS:
        numbers = [[Fraction(float(x)) for x in a.reshape(-1).view(FLOATS[element])] for a in (old, new)]
        values = [FORMATS[element].encode(ON_NUMBERS[operation](x, y)) for x, y in zip(*numbers, strict=True)]
        return np.array(values, old.dtype).reshape(old.shape)
    bits = 8 * old.itemsize
    typed = [a.reshape(-1).view(f"{'i' if element[0] == 's' else 'u'}{old.itemsize}").tolist() for a in (old, new)]
    values = [ON_NUMBERS[operation](x, y) & ((1 << bits) - 1) for x, y in zip(*typed, strict=True)]
    return np.array(values, old.dtype).reshape(old.shape)


def operands(element: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random bits; floats of either sign around 1, far from subnormals, infinities and NaN."""
    rng = np.random.default_rng(seed)
    if element not in FORMATS:
        size = int(element[1:]) // 8
        few = rng.integers(0, 8, shape, np.uint64)  # inc and dec meet their borders
        return np.where(rng.random(shape) < 0.5, few, rng.integers(0, 1 << 8 * size, shape, np.uint64)).astype(
            f"u{size}"
        )
    values = rng.uniform(1, 8, shape) * rng.choice([-1, 1], shape) * 2.0 ** rng.integers(-3, 4, shape)
    return values.astype(FLOATS[element]).view(f"u{np.dtype(FLOATS[element]).itemsize}")


def reduce(operation: str, element: str, coords: tuple[int, int], span: int = 0, ctas: int = 1) -> Snippet:
    """Boxes of 128 bytes a row, tensors of 160; `ctas` clusters add the same box, one after the other in any order."""
    old = operands(element, (12, 1280 // int(element[-2:])), 1)
    box = (128 // old.itemsize, 8)
    new = operands(element, box[::-1], 2)
    expected = old.copy()
    (x, y), (rows, columns) = coords, old.shape
    inside = new[: rows - y, : columns - x]
    for _ in range(ctas):
        part = expected[y : y + 8, x : x + box[0]]
        part[:] = reduced(operation, element, np.ascontiguousarray(part), np.ascontiguousarray(inside))
    image = scrambled(new.reshape(-1).view(np.uint8), span, BOX_AT)
    body = BEGIN + copy_in(1, BOX_AT, len(image), 32) + f"""
    mov.b64 %d2, p2; cvta.param.u64 %d3, %d2; fence.proxy.async.shared::cta; bar.warp.sync -1; elect.sync %r12|%p1, -1;
    @%p1 cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group [%d3, {{{x}, {y}}}],
     [%r10+{BOX_AT}];
    @%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;
    """  # fmt: skip
    name = f"tma-reduce-{operation}-{element}-{x}-{y}-{span}-{ctas}"
    return Snippet(
        name, body, (Result("tensor", old, expected),), (image,), (map_of(0, old, box, element, span),),
        grid=(ctas, 1, 1),
    )  # fmt: skip


def reductions() -> list[Snippet]:
    """Every operation on every type that it has, at the border; swizzled and inside; several CTAs at once."""
    out = [reduce(op, kind, (16, 6), 128) for kind, ops in REDUCTIONS.items() for op in ops]
    out += [reduce("add", "f32", (4, 2), span) for span in (0, 128)]
    return [*out, reduce("add", "u32", (4, 2), 128, 5), reduce("max", "s32", (4, 2), 128, 3)]


def multicast(mask: int, cluster: tuple[int, int, int]) -> Snippet:
    """The first CTA of the mask loads; every CTA of it waits on its own barrier; all copy their shared memory out."""
    tensor = tensor_of((8, 64), "u16")
    count = int(np.prod(cluster))
    issuer = (mask & -mask).bit_length() - 1
    body = BEGIN + """
    elect.sync %r12|%p1, -1; mov.b32 %r11, 1; @%p1 mbarrier.init.shared.b64 [%r10], %r11;
    shl.b32 %r14, %r1, 4; add.s32 %r15, %r10, %r14; mov.b64 %d6, -1;
    st.shared.v2.b64 [%r15+1024], {%d6, %d6}; st.shared.v2.b64 [%r15+1536], {%d6, %d6};
    fence.proxy.async.shared::cta; fence.mbarrier_init.release.cluster; barrier.cluster.arrive; barrier.cluster.wait;
    """ + f"""
    mov.b32 %r13, 1024; mov.b64 %d2, p2; cvta.param.u64 %d3, %d2; mov.b16 %h1, {mask}; mov.b32 %r16, {mask};
    shr.u32 %r17, %r16, %r30; and.b32 %r17, %r17, 1; setp.eq.b32 %p2, %r17, 0; @%p2 bra REST;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], %r13;
    setp.ne.b32 %p3, %r30, {issuer}; @%p3 bra RECEIVE;
    @%p1 {LOAD.format(rank=2)}.multicast::cluster [%r10+1024], [%d3, {{0, 0}}], [%r10], %h1;
    RECEIVE: {wait('%r10', 0, 'FULL')}
    REST: bar.warp.sync -1;
    {copy_out(0, 1024, 1024, 32)}
    barrier.cluster.arrive; barrier.cluster.wait;
    """  # fmt: skip
    expected = np.full((count, 1024), 0xFF, np.uint8)
    for rank in range(count):
        if mask >> rank & 1:
            expected[rank] = scrambled(tensor.reshape(-1).view(np.uint8), 128, 1024)
    name = f"tma-multicast-{mask:04b}-{cluster[0]}x{cluster[1]}x{cluster[2]}"
    start = np.zeros((count, 1024), np.uint8)
    return Snippet(
        name, body, (Result("shared", start, expected),), (tensor,), (map_of(1, tensor, (64, 8), "u16", 128),),
        grid=cluster, cluster=cluster,
    )  # fmt: skip


def snippets() -> list[Snippet]:
    flat = ((1, 1), (3, 2), (2, 2), (0b1010, 4))
    cubes = ((0b1111, (2, 2, 1)), (0b0110, (1, 2, 2)), (0b10000001, (2, 2, 2)))
    casts = [multicast(mask, (n, 1, 1)) for mask, n in flat] + [multicast(mask, shape) for mask, shape in cubes]
    return [*ranks(), *swizzles(), *elements(), *stores(), *reductions(), *casts]

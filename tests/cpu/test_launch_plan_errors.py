"""What the launch plan refuses, and what it says."""

import struct
from collections.abc import Callable
from typing import Any

import ffi_cases
import pytest
from ffi_cases import CLUSTER_BYTES, FLAG_BYTES

from jax_bwgemm.runtime import ffi

pytestmark = pytest.mark.skipif(ffi.status() is not None, reason=str(ffi.status()))
Change = Callable[[ffi_cases.Call], object]


def _set(**attributes: int | str) -> Change:
    return lambda request: request.attributes.update(attributes)


def _drop(role: str) -> Change:
    return lambda request: request.buffers.pop(role)


def _leaf(at: int, source: str | None = None, offset: int | None = None, size: int | None = None) -> Change:
    def change(request: ffi_cases.Call) -> None:
        given = zip(request.leaves[at], (source, offset, size), strict=True)
        request.leaves[at] = [old if new is None else new for old, new in given]

    return change


def _rule(role: str, old: str, new: str) -> Change:
    return lambda request: request.rules.__setitem__(role, request.rules[role].replace(old, new))


def _dtypes(a: int, b: int, out: int) -> Change:
    """Codes of XLA_FFI_DataType."""
    return lambda request: [
        setattr(x, "dtype", c) for x, c in zip((request.a, request.b, request.out), (a, b, out), strict=True)
    ]


def _dims(name: str, *dims: int) -> Change:
    return lambda request: request.buffers[name].dims.__setitem__(slice(0, len(dims)), dims)


def _map(role: str, **fields: Any) -> Change:
    return lambda request: [setattr(request.maps[role], name, value) for name, value in fields.items()]


ERRORS: list[tuple[Change, str]] = [
    (_set(cta_m=0), "`cta_m` requires 1..512, got 0"),
    (_set(mma_n=-64), "`mma_n` requires 1..512, got -64"),
    (_set(cluster_m=17), "`cluster_m` requires 1..16, got 17"),
    (_set(cluster_n=0), "`cluster_n` requires 1..16, got 0"),
    (_set(cluster_k=0), "`cluster_k` requires 1..16, got 0"),
    (_set(cluster_k=2**31 - 1), "`cluster_k` requires 1..16, got 2147483647"),
    (_set(cluster_m=4, cluster_n=2, cluster_k=4), "`cluster_m * cluster_n * cluster_k` requires 1..16, got 32"),
    (_set(a_l2="first"), "`a_l2` requires normal, evict_first or evict_last, got 'first'"),
    (_set(b_l2=""), "`b_l2` requires normal, evict_first or evict_last, got ''"),
    (_set(b_l2=0), "attribute `b_l2` requires a string, got another type"),
    (_set(alpha=1), "attribute `alpha` requires a float32, got another type"),
    (_set(cta_m="128"), "attribute `cta_m` requires an int32, got another type"),
    (_set(rounds=0), "`rounds` requires 1..64, got 0"),
    (_set(rounds="2"), "attribute `rounds` requires an int32, got another type"),
    (_set(pdl=2), "`pdl` requires 0..1, got 2"),
    (_set(stream_tiles=-1), "`stream_tiles` requires 0..2147483647, got -1"),
    (_set(stream_clusters=0), "`stream_clusters` requires 1..65535, got 0"),
    (_set(tile_grid=3), "`tile_grid` requires 0..2, got 3"),
    (_set(tile_grid=1), "`cluster_m * cluster_n` requires 1..1, got 2"),
    (_set(num_threads=2048), "`num_threads` requires 1..1024, got 2048"),
    (_set(smem_bytes=-1), "`smem_bytes` requires 0..1048576, got -1"),
    (_set(raster_group=0), "`raster_group` requires 1..2147483647, got 0"),
    (_set(raster_along_n=2), "`raster_along_n` requires 0..1, got 2"),
    (_set(raster_order=2), "`raster_order` requires 0..1, got 2"),
    (_set(raster_order=-1), "`raster_order` requires 0..1, got -1"),
    (lambda r: r.attributes.pop("raster_order"), "attribute `raster_order` requires an int32, got none"),
    (lambda r: r.attributes.pop("alpha"), "attribute `alpha` requires a float32, got none"),
    (lambda r: setattr(r, "max_active_clusters", 0), "`max_active_clusters` requires 1..2147483647, got 0"),
    (_map("a", box=[64, 512, 1]), "the TMA box of `a` requires sizes of 1..256, got (64, 512, 1)"),
    (_map("b", box=[64, 0, 1]), "the TMA box of `b` requires sizes of 1..256, got (64, 0, 1)"),
    (
        _map("out", box=[32, 64, 1]),
        "the TMA box of `out` requires an innermost size of its swizzle span, 128 bytes, got 32 elem",
    ),
    (_map("b", swizzle_bytes=16), "the swizzle of `b` requires 32, 64 or 128 bytes, got 16"),
    (_map("a", swizzle_atom_bytes=8), "the swizzle atom of `a` requires 16 bytes, or 32 in a span of 128, got 8"),
    (
        _map("b", swizzle_bytes=64, swizzle_atom_bytes=32),
        "the swizzle atom of `b` requires 16 bytes, or 32 in a span of 128, got 32 in 64",
    ),
    (_map("a", element="bf32"), "`tensor_maps` requires texts such as 0:bf16[64,128,1]/128/16, got 0:bf32[64,128,1]"),
    (_map("a", element="f32", box=[32, 128, 1]), "requires three dimensions of 4-byte elements and an alignment of 16"),
    (lambda r: setattr(r.a, "rank", 2), "`a` requires rank 3, got rank 2 (2, 1000)"),
    (_drop("out"), "requires operands a, b and results out, as its `buffers` say, got 2 operands and 0 results"),
    (_drop("b"), "requires operands a, b and results out, as its `buffers` say, got 1 operands and 1 results"),
    (_dtypes(11, 16, 16), "`a` requires bfloat16, for which the kernel is compiled, got float32: cast it first"),
    (_dtypes(16, 10, 16), "`b` requires bfloat16, for which the kernel is compiled, got float16: cast it first"),
    (_dtypes(16, 16, 4), "`out` requires bfloat16, for which the kernel is compiled, got int32: cast it first"),
    (_dtypes(20, 2, 16), "`a` requires bfloat16, for which the kernel is compiled, got float8_e4m3fn"),
    (_dtypes(16, 19, 16), "`b` requires bfloat16, for which the kernel is compiled, got float8_e5m2"),
    (_dtypes(12, 12, 16), "`a` requires bfloat16, for which the kernel is compiled, got XLA FFI dtype 12"),
    (_dims("out", 2, 0), "`m` requires 1..2147483647, got 0"),
    (_dims("out", 2, 2**31), "`m` requires 1..2147483647, got 2147483648"),
    (_dims("a", 2, 992), "m of `a` and of the result requires 1000, got 992"),
    (_dims("b", 2, 4096, 512), "n of `b` and of the result requires 520, got 512"),
    (_dims("a", 2, 1008), "m of `a` and of the result requires 1000, got 1008"),
    (_dims("b", 2, 4096, 528), "n of `b` and of the result requires 520, got 528"),
    (_dims("b", 2, 64), "k of `a` and of `b` requires 64, got 4096"),
    (_dims("b", 2, 4097), "k of `b` and of `a` requires 4096, got 4097"),
    (_dims("b", 2, 4088), "k of `a` and of `b` requires 4088, got 4096"),
    (_dims("b", 2, 4031), "k of `a` and of `b` requires 4031, or with padding 4032..4032 in steps of 8, got 4096"),
    (_dims("a", 3), "the batch of `a` requires the result's 2 or 1 (shared), got 3"),
    (_dims("b", 3), "the batch of `b` requires the result's 2 or 1 (shared), got 3"),
    (
        lambda r: r.buffers.update(bias=ffi.Buffer.of("bfloat16", (520,))),
        "requires operands a, b and results out, as its `buffers` say, got 3 operands and 1 results",
    ),
    (_rule("a", "bfloat16", "float12"), "`buffers` requires texts such as a:bfloat16[l?,m,k+]%16, got a:float12[l?,m"),
    (_rule("a", "k+", "k+,k"), "`buffers` requires texts such as a:bfloat16[l?,m,k+]%16, got a:bfloat16[l?,m,k+,k]"),
    (_rule("a", "m", "q"), "`buffers` requires texts such as a:bfloat16[l?,m,k+]%16, got a:bfloat16[l?,q,k+]"),
    (_rule("a", "m", "m/0"), "`buffers` requires texts such as a:bfloat16[l?,m,k+]%16, got a:bfloat16[l?,m/0,k+]"),
    (_rule("a", "l?", "bytes"), "`buffers` requires texts such as a:bfloat16[l?,m,k+]%16, got a:bfloat16[bytes,m,k+]"),
    (_rule("a", "%16", "%24"), "the alignment of `a` requires a power of two up to 256, got 24: rebuild"),
    (_rule("a", "%16", "%8"), "the tensor map of `a` requires three dimensions of 2-byte elements and an alignment of"),
    (_rule("out", "l,", "k,"), "`buffers` requires a first result of l, m and n, got none with l"),
    (lambda r: setattr(r, "results", ()), "`buffers` requires a first result of l, m and n, got none with l"),
    (lambda r: [_rule(x, "k", "m")(r) for x in "ab"], "`buffers` requires an operand with k, got none"),
    (lambda r: r.rules.update({f"r{i}": "uint8[bytes]%1" for i in range(14)}), "requires at most 16 buffers, got 17"),
    (_leaf(0, source="tmb:0"), "`params` requires texts such as tma:0@0+128 or int:name[0..1]@404+4, got tmb:0@0+128"),
    (_leaf(3, source="size:q"), "`params` requires texts such as tma:0@0+128 or int:name[0..1]@404+4, got size:q@384"),
    (_leaf(3, source="int:raster_group[1.."), "requires texts such as tma:0@0+128 or int:name[0..1]@404+4, got int:ra"),
    (_leaf(3, source="token:1"), "`params` requires texts such as tma:0@0+128 or int:name[0..1]@404+4, got token:1"),
    (_leaf(3, source="int:colour"), "attribute `colour` requires an int32, got none"),
    (_leaf(1, source="tma:3"), "parameter `tma:3` requires a buffer of 0..2, got 3"),
    (_leaf(7, source="step:-1"), "parameter `step:-1` requires a buffer of 0..2, got -1"),
    (lambda r: r.maps.pop("b"), "parameter `tma:1` requires a text in `tensor_maps`, got none"),
    (_leaf(3, size=8), "parameter `size:m` requires 4 bytes, got 8"),
    (_leaf(1, offset=96), "parameter `tma:1` requires an offset that is a multiple of 64"),
    (_leaf(3, offset=-4), "parameter `size:m` requires an offset that is a multiple of 4"),
    (_leaf(3, offset=2**31 - 4), "ends within 4096 bytes, got 2147483644"),
    (_leaf(3, offset=380), "each source once and ascending offsets without overlap, got `size:m` at 380 after 384"),
    (_leaf(4, source="size:m"), "source once and ascending offsets without overlap, got `size:m` at 388 after 388"),
    (_leaf(4, offset=416), "ascending offsets without overlap, got `size:k` at 392 after 420"),
    (lambda r: r.leaves.__delitem__(slice(1, None)), "requires `tma:1` or `ptr:1`, which take `b`, got neither"),
    (lambda r: r.leaves.__delitem__(slice(2, None)), "requires `tma:2` or `ptr:2`, which take `out`, got neither"),
    (lambda r: r.leaves.clear(), "`params` requires `tma:0` or `ptr:0`, which take `a`, got neither"),
    (
        lambda r: (r.leaves.extend([f"int:i{i}", 456 + 4 * i, 4] for i in range(49)),
                   r.attributes.update({f"i{i}": i for i in range(49)})),
        "`params` requires at most 64 leaves, got 65",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), ERRORS, ids=[sentence[:40] for _, sentence in ERRORS])
def test_errors_say_what_is_required(change: Change, sentence: str) -> None:
    request = ffi_cases.request()
    change(request)
    with pytest.raises(ValueError) as error:
        request.plan()
    assert sentence in str(error.value)


OF_TILES = dict(tile_grid=1, cluster_m=1)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (dict(n=524), "multiple of 16 bytes, got 1048 bytes for `b`"),
        (dict(k=4100), "multiple of 16 bytes, got 8200 bytes for `a`"),
        (dict(m=1004, majors="mn"), "multiple of 16 bytes, got 2008 bytes for `a`"),
        (dict(m=2**30, k=2**20, batch=1), "less than 2^40 bytes, got 1073741824 rows of 2097152 bytes for `a`"),
        (dict(m=2**31 - 1, n=2**31 - 8, k=8, batch=1), "at most 2147418112 cluster tiles, got 8388608 x 8388608 x 1"),
        (dict(n=521), "multiple of 16 bytes, got 1042 bytes for `b`"),
        (dict(n=521, majors="kk"), "multiple of 16 bytes, got 1042 bytes for `out`"),
        (dict(n=521, majors="kk", store="threads", has_residual=True), "got 1042 bytes for `residual`"),
        (dict(n=521, majors="kk", has_residual=True), "multiple of 16 bytes, got 1042 bytes for `residual`"),
        (dict(n=2**24 + 8, k=8, batch=1, **OF_TILES), "`tiles along n` requires 1..65535, got 65537"),
        (
            dict(m=2**23 + 8, k=8, batch=1, **OF_TILES | dict(tile_grid=2)),
            "`tiles along m` requires 1..65535, got 65537",
        ),
        (dict(m=8, n=8, k=8, batch=65536, **OF_TILES), "`batch` requires 1..65535, got 65536"),
        (dict(m=8, n=8, k=8, batch=16384, cluster_k=4, **OF_TILES), "`batch` requires 1..16383, got 16384"),
        (dict(m=8, n=8, k=8, batch=2**31 - 1), "at most 2147418112 cluster tiles, got 1 x 1 x 2147483647"),
    ],
)
def test_errors_of_sizes(request_: dict, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        ffi_cases.request(**request_).plan()
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (dict(batch=3, a_batch=1, b_batch=1, parts=2), "`batch` requires 2..2, got 3"),
        (dict(batch=3, a_batch=1, parts=3), "`parts` requires one matrix of `b`, got 3"),
        (dict(batch=3, b_batch=1, parts=3), "`parts` requires one matrix of `a`, got 3"),
        (dict(parts=0), "`parts` requires 1..65535, got 0"),
    ],
)
def test_errors_of_parts(request_: dict, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        ffi_cases.request(**request_).plan()
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "change", "sentence"),
    [
        (dict(m=1001), _dims("a", 2, 1008), "m of `a` and of the result requires 1001, got 1008"),
        (
            dict(m=1001, majors="mn"),
            _dims("a", 2, 4096, 1032),
            "requires 1001, or with padding 1008..1024 in steps of 8",
        ),
        (dict(m=1001, majors="mn"), _dims("a", 2, 4096, 1000), "with padding 1008..1024 in steps of 8, got 1000"),
        (dict(n=519, majors="kk"), _dims("b", 2, 520), "n of `b` and of the result requires 519, got 520"),
        (
            dict(n=519),
            _dims("b", 2, 4096, 524),
            "n of `b` and of the result requires 519, or with padding 520..576 in steps of 8, got 524",
        ),
        (
            dict(k=4090),
            _dims("a", 2, 1000, 4094),
            "k of `a` and of `b` requires 4090, or with padding 4096..4096 in steps of 8, got 4094",
        ),
        (dict(k=4096), _dims("b", 2, 4090), None),
        (dict(k=4096), _dims("b", 2, 4088), "k of `a` and of `b` requires 4088, got 4096"),
        (
            dict(k=4090, majors="mk"),
            _dims("b", 2, 520, 4104),
            "k of `b` and of `a` requires 4090, or with padding 4096..4096 in steps of 8, got 4104",
        ),
        (dict(k=4090, majors="mn"), _dims("a", 2, 4096), "k of `a` and of `b` requires 4090, got 4096"),
        (dict(k=4090, majors="mn"), _dims("b", 2, 4096), "k of `b` and of `a` requires 4090, got 4096"),
        (dict(k=4090, majors="mk"), _dims("a", 2, 4096), "k of `a` and of `b` requires 4090, got 4096"),
        (dict(n=521, store="threads"), _dims("b", 2, 4096, 521), "multiple of 16 bytes, got 1042 bytes for `b`"),
    ],
)
def test_only_what_tma_cannot_step_over_is_padded(sizes: dict, change: Change, sentence: str | None) -> None:
    request = ffi_cases.request(**({"store": "threads"} | sizes))
    change(request)
    if sentence is None:
        assert struct.unpack_from("<3i", request.plan().param_block, 264) == (1000, 520, 4090)
        return
    with pytest.raises(ValueError) as error:
        request.plan()
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("bias", "sentence"),
    [
        (None, "requires operands a, b, bias and results out, as its `buffers` say, got 2 operands and 1 results"),
        (ffi.Buffer.of("bfloat16", (1, 520)), "`bias` requires rank 1, got rank 2 (1, 520)"),
        (ffi.Buffer.of("float32", (520,)), "`bias` requires bfloat16, for which the kernel is compiled, got float32"),
        (ffi.Buffer.of("bfloat16", (512,)), "n of `bias` and of the result requires 520, got 512"),
        (ffi.Buffer.of("bfloat16", (576,)), "n of `bias` and of the result requires 520, got 576"),
    ],
)
def test_errors_of_a_bias(bias: ffi.Buffer | None, sentence: str) -> None:
    _check(ffi_cases.request(has_bias=True), "bias", bias, sentence)


def test_a_bias_lies_along_the_contiguous_dimension() -> None:
    request = ffi_cases.request(has_bias=True, c_major="m")
    request.plan()
    _check(request, "bias", ffi.Buffer.of("bfloat16", (520,)), "m of `bias` and of the result requires 1000, got 520")


@pytest.mark.parametrize(
    ("residual", "sentence"),
    [
        (
            None,
            "requires operands a, b, bias, residual and results out, as its `buffers` say, got 3 operands and 1 res",
        ),
        (ffi.Buffer.of("bfloat16", (1000,)), "`residual` requires rank 3, got rank 1 (1000)"),
        (ffi.Buffer.of("bfloat16", (1000, 520)), "the batch of `residual` requires the result's 2, got 1"),
        (ffi.Buffer.of("float32", (2, 1000, 520)), "`residual` requires bfloat16, for which the kernel is compiled"),
        (ffi.Buffer.of("bfloat16", (1, 1000, 520)), "the batch of `residual` requires the result's 2, got 1"),
        (ffi.Buffer.of("bfloat16", (2, 520, 1000)), "m of `residual` and of the result requires 1000, got 520"),
        (ffi.Buffer.of("bfloat16", (2, 1000, 528)), "n of `residual` and of the result requires 520, got 528"),
    ],
)
def test_errors_of_a_residual(residual: ffi.Buffer | None, sentence: str) -> None:
    _check(ffi_cases.request(has_bias=True, has_residual=True), "residual", residual, sentence)


@pytest.mark.parametrize(
    ("workspace", "sentence"),
    [
        (None, "requires operands a, b and results out, workspace, as its `buffers` say, got 2 operands and 1 results"),
        (
            ffi.Buffer.of("uint8", (FLAG_BYTES + CLUSTER_BYTES - 1,)),
            "the workspace requires at least 266240 bytes, got 266239",
        ),
        (ffi.Buffer.of("uint8", (0,)), "the workspace requires at least 266240 bytes, got 0"),
        (ffi.Buffer.of("uint8", (-(2**63),)), "requires at least 266240 bytes, got -9223372036854775808"),
        (ffi.Buffer.of("uint8", (2**24, 1)), "`workspace` requires rank 1, got rank 2 (16777216, 1)"),
        (ffi.Buffer.of("int8", (2**24,)), "`workspace` requires uint8, for which the kernel is compiled, got int8"),
    ],
)
def test_errors_of_a_workspace(workspace: ffi.Buffer | None, sentence: str) -> None:
    _check(ffi_cases.request(workspace_bytes=2**24), "workspace", workspace, sentence)


def _check(request: ffi_cases.Call, role: str, buffer: ffi.Buffer | None, sentence: str) -> None:
    """Of the call with another buffer of this role, or none."""
    request.buffers.pop(role) if buffer is None else request.buffers.update({role: buffer})
    with pytest.raises(ValueError) as error:
        request.plan()
    assert sentence in str(error.value)

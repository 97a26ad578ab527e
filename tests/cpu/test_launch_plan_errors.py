"""What the launch plan refuses, and what it says."""

import struct
from collections.abc import Callable

import ffi_cases
import pytest
from ffi_cases import CLUSTER_BYTES, FLAG_BYTES

from jax_bwgemm import ffi

pytestmark = pytest.mark.skipif(ffi.status() is not None, reason=str(ffi.status()))
Change = Callable[[ffi.LaunchRequest], object]


def _set(**fields: int) -> Change:
    return lambda request: [setattr(request, name, value) for name, value in fields.items()]


def _dtypes(a: int, b: int, out: int) -> Change:
    """Codes of XLA_FFI_DataType."""
    return lambda request: [
        setattr(x, "dtype", c) for x, c in zip((request.a, request.b, request.out), (a, b, out), strict=True)
    ]


def _dims(name: str, *dims: int) -> Change:
    return lambda request: getattr(request, name).dims.__setitem__(slice(0, len(dims)), dims)


def _box(operand: int, *box: int) -> Change:
    return lambda request: request.box[operand].__setitem__(slice(0, 3), box)


def _param(at: int, **fields: int) -> Change:
    return lambda request: [setattr(request.params[at], name, value) for name, value in fields.items()]


def _narrow_atom(request: ffi.LaunchRequest) -> None:
    request.swizzle_bytes[1], request.swizzle_atom_bytes[1] = 64, 32


ERRORS: list[tuple[Change, str]] = [
    (_set(a_major=ord("n")), "`a_major` requires 'k' or 'm', got 'n'"),
    (_set(b_major=0), "`b_major` requires 'n' or 'k', got code 0"),
    (_set(c_major=ord("k")), "`c_major` requires 'n' or 'm', got 'k'"),
    (_set(cta_m=0), "`cta_m` requires 1..512, got 0"),
    (_set(mma_n=-64), "`mma_n` requires 1..512, got -64"),
    (_set(cluster_m=17), "`cluster_m` requires 1..16, got 17"),
    (_set(cluster_n=0), "`cluster_n` requires 1..16, got 0"),
    (_set(cluster_k=0), "`cluster_k` requires 1..16, got 0"),
    (_set(cluster_k=2**31 - 1), "`cluster_k` requires 1..16, got 2147483647"),
    (_set(cluster_m=4, cluster_n=2, cluster_k=4), "`cluster_m * cluster_n * cluster_k` requires 1..16, got 32"),
    (_set(a_l2=3), "`a_l2` requires 0..2, got 3"),
    (_set(b_l2=-1), "`b_l2` requires 0..2, got -1"),
    (_set(pdl=2), "`pdl` requires 0..1, got 2"),
    (_set(stream_tiles=-1), "`stream_tiles` requires 0..2147483647, got -1"),
    (_set(stream_clusters=0), "`stream_clusters` requires 1..65535, got 0"),
    (_set(num_threads=2048), "`num_threads` requires 1..1024, got 2048"),
    (_set(raster_group=0), "`raster_group` requires 1..2147483647, got 0"),
    (_set(raster_along_n=2), "`raster_along_n` requires 0..1, got 2"),
    (_set(raster_order=2), "`raster_order` requires 0..1, got 2"),
    (_set(raster_order=-1), "`raster_order` requires 0..1, got -1"),
    (_set(max_active_clusters=0), "`max_active_clusters` requires 1..2147483647, got 0"),
    (_box(0, 64, 512, 1), "the TMA box of `a` requires sizes of 1..256, got (64, 512, 1)"),
    (_box(2, 32, 64, 1), "the TMA box of `out` requires an innermost size of its swizzle span, 128 bytes, got 32 elem"),
    (lambda r: r.swizzle_bytes.__setitem__(1, 16), "`swizzle_bytes` of `b` requires 32, 64 or 128, got 16"),
    (
        lambda r: r.swizzle_atom_bytes.__setitem__(0, 8),
        "`swizzle_atom_bytes` of `a` requires 16, or 32 in a span of 128",
    ),
    (_narrow_atom, "`swizzle_atom_bytes` of `b` requires 16, or 32 in a span of 128, got 32 in 64"),
    (lambda r: setattr(r.a, "rank", 2), "`a` requires rank 3, got rank 2 (2, 1000)"),
    (lambda r: setattr(r.out, "rank", -1), "`out` requires a buffer of rank 3, got none"),
    (
        _dtypes(11, 16, 16),
        "operands require two of float8_e4m3fn and float8_e5m2, two of int8 and uint8, or bfloat16, ",
    ),
    (_dtypes(11, 16, 16), "float16 or float32, both the same, got float32 and bfloat16: cast them first"),
    (_dtypes(16, 10, 16), "both the same, got bfloat16 and float16"),
    (_dtypes(20, 2, 16), "both the same, got float8_e4m3fn and int8"),
    (_dtypes(4, 4, 4), "both the same, got int32 and int32"),
    (_dtypes(16, 19, 16), "both the same, got bfloat16 and float8_e5m2"),
    (_dtypes(12, 12, 16), "both the same, got XLA FFI dtype 12 and XLA FFI dtype 12"),
    (
        _dtypes(16, 16, 12),
        "the result of bfloat16 and bfloat16 requires bfloat16, float16, float32, float8_e4m3fn or fl",
    ),
    (_dtypes(16, 16, 12), "or float8_e5m2, got XLA FFI dtype 12"),
    (_dtypes(16, 16, 4), "or float8_e5m2, got int32"),
    (_dtypes(2, 6, 11), "the result of int8 and uint8 requires int32, got float32"),
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
        lambda r: setattr(r, "bias", ffi.Buffer.of("bfloat16", (520,))),
        "a kernel without a bias parameter requires no bias, got one of shape (520)",
    ),
    (
        lambda r: setattr(r, "residual", r.out),
        "a kernel without a residual parameter requires no residual, got one of shape (2, 1000, 520)",
    ),
    (_param(0, kind=22), "a parameter kind requires 0..21, got 22"),
    (_param(0, kind=-1), "a parameter kind requires 0..21, got -1"),
    (_param(3, size=8), "parameter `m` requires 4 bytes, got 8"),
    (_param(1, offset=96), "parameter `tma_b` requires an offset that is a multiple of 64"),
    (_param(3, offset=-4), "parameter `m` requires an offset that is a multiple of 4"),
    (_param(3, offset=2**31 - 4), "ends within 444 bytes, got 2147483644"),
    (_param(3, offset=380), "each kind once and ascending offsets without overlap, got `m` at 380 after 384"),
    (_param(4, kind=5), "each kind once and ascending offsets without overlap, got `m` at 388 after 388"),
    (_param(4, offset=416), "ascending offsets without overlap, got `k` at 392 after 420"),
    (_set(num_params=25), "`params` requires at most 24 leaves, got 25"),
    (_set(num_params=1), "`params` requires `tma_b`, got a list without it"),
    (_set(num_params=2), "`params` requires either `tma_c` or `c`, got neither"),
    (_set(param_bytes=0), "`param_bytes` requires 1..1024, got 0"),
    (_set(param_bytes=2000), "`param_bytes` requires 1..1024, got 2000"),
]


@pytest.mark.parametrize(("change", "sentence"), ERRORS, ids=[sentence[:40] for _, sentence in ERRORS])
def test_errors_say_what_is_required(change: Change, sentence: str) -> None:
    request = ffi_cases.request()
    change(request)
    with pytest.raises(ValueError) as error:
        ffi.launch_plan(request)
    assert sentence in str(error.value)


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
        (
            dict(kinds=tuple(x for x in ffi_cases.KINDS if x != "tma_r")),
            "`params` requires either `tma_c` or `c`, got both",
        ),
        (dict(store="threads", has_residual=True), "`tma_r` requires `tma_c`, whose box it has, got `c`"),
        (dict(n=521, majors="kk", has_residual=True), "multiple of 16 bytes, got 1042 bytes for `out`"),
        (dict(m=8, n=8, k=8, batch=2**31 - 1), "at most 2147418112 cluster tiles, got 1 x 1 x 2147483647"),
    ],
)
def test_errors_of_sizes(request_: dict, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        ffi.launch_plan(ffi_cases.request(**request_))
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
        assert struct.unpack_from("<3i", ffi.launch_plan(request).param_block, 264) == (1000, 520, 4090)
        return
    with pytest.raises(ValueError) as error:
        ffi.launch_plan(request)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("bias", "sentence"),
    [
        (ffi.Buffer.none(), "`bias` requires a buffer of rank 1, got none"),
        (ffi.Buffer.of("bfloat16", (1, 520)), "`bias` requires rank 1, got rank 2 (1, 520)"),
        (ffi.Buffer.of("float32", (520,)), "`bias` requires the result's dtype bfloat16, got float32"),
        (ffi.Buffer.of("bfloat16", (512,)), "the length of `bias` requires 520, got 512"),
    ],
)
def test_errors_of_a_bias(bias: ffi.Buffer, sentence: str) -> None:
    request = ffi_cases.request(has_bias=True)
    request.bias = bias
    with pytest.raises(ValueError) as error:
        ffi.launch_plan(request)
    assert sentence in str(error.value)


def test_a_bias_lies_along_the_contiguous_dimension() -> None:
    request = ffi_cases.request(has_bias=True, c_major="m")
    ffi.launch_plan(request)
    request.bias = ffi.Buffer.of("bfloat16", (520,))
    with pytest.raises(ValueError, match="the length of `bias` requires 1000, got 520"):
        ffi.launch_plan(request)


@pytest.mark.parametrize(
    ("residual", "sentence"),
    [
        (ffi.Buffer.none(), "`residual` requires a buffer of rank 3, got none"),
        (ffi.Buffer.of("bfloat16", (1000, 520)), "`residual` requires rank 3, got rank 2 (1000, 520)"),
        (ffi.Buffer.of("float32", (2, 1000, 520)), "`residual` requires the result's dtype bfloat16, got float32"),
        (
            ffi.Buffer.of("bfloat16", (1, 1000, 520)),
            "`residual` requires the result's shape (2, 1000, 520), got (1, 1000, 520)",
        ),
        (ffi.Buffer.of("bfloat16", (2, 520, 1000)), "the result's shape (2, 1000, 520), got (2, 520, 1000)"),
    ],
)
def test_errors_of_a_residual(residual: ffi.Buffer, sentence: str) -> None:
    request = ffi_cases.request(has_bias=True, has_residual=True)
    request.residual = residual
    with pytest.raises(ValueError) as error:
        ffi.launch_plan(request)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("workspace", "got"),
    [
        (ffi.Buffer.none(), "rank -1 and 0"),
        (ffi.Buffer.of("uint8", (FLAG_BYTES + CLUSTER_BYTES - 1,)), "rank 1 and 266239"),
        (ffi.Buffer.of("uint8", (0,)), "rank 1 and 0"),
        (ffi.Buffer.of("uint8", (2**24, 1)), "rank 2 and 16777216"),
    ],
)
def test_errors_of_a_workspace(workspace: ffi.Buffer, got: str) -> None:
    request = ffi_cases.request(workspace_bytes=2**24)
    request.workspace = workspace
    with pytest.raises(ValueError, match=f"the workspace requires rank 1 and at least 266240 bytes, got {got}$"):
        ffi.launch_plan(request)

"""The launch plan against values worked out by hand, against formulas of this file's own, and its errors."""

import struct
from collections.abc import Callable

import ffi_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_bwgemm import ffi

pytestmark = pytest.mark.skipif(ffi.status() is not None, reason=str(ffi.status()))
Change = Callable[[ffi.LaunchRequest], object]


def _leaf(plan: ffi.LaunchPlan, request: ffi.LaunchRequest, kind: str) -> bytes:
    code = ffi_cases.KINDS.index(kind)
    param = next(param for param in request.params[: request.num_params] if param.kind == code)
    return plan.param_block[param.offset : param.offset + param.size]


def test_grid_is_the_cluster_by_the_clusters_that_fit() -> None:
    # 1000 rows in cluster tiles of 2 * 128 make 4, 520 columns in tiles of 256 make 3; with a batch of 2, 24 tiles.
    plan = ffi.launch_plan(ffi_cases.request())
    assert plan.num_cluster_tiles == 24
    assert list(plan.grid) == [2, 1, 24]
    assert list(plan.cluster) == [2, 1, 1]
    assert list(plan.block) == [384, 1, 1]
    assert plan.smem_bytes == 232448
    request = ffi_cases.request()
    request.max_active_clusters = 10
    assert list(ffi.launch_plan(request).grid) == [2, 1, 10]


def test_persistent_grid_stays_below_the_limit_of_z() -> None:
    request = ffi_cases.request(m=2**24, n=2048, k=64, batch=1)  # 65536 x 8 tiles
    request.max_active_clusters = 10**6
    assert list(ffi.launch_plan(request).grid) == [2, 1, 65535]


def test_tensor_maps_name_the_contiguous_dimension_first() -> None:
    plan = ffi.launch_plan(ffi_cases.request(dtypes=("bfloat16", "bfloat16", "float32"), b_batch=1))
    a, b, out = plan.tensor_maps
    assert (list(a.dims), list(a.stride_bytes), list(a.box)) == ([4096, 1000, 2], [8192, 8192000], [64, 128, 1])
    assert (list(b.dims), list(b.stride_bytes), list(b.box)) == ([520, 4096, 1], [1040, 4259840], [64, 128, 1])
    assert (list(out.dims), list(out.stride_bytes), list(out.box)) == ([520, 1000, 2], [2080, 2080000], [32, 64, 1])
    assert [spec.swizzle_bytes for spec in plan.tensor_maps] == [128, 128, 128]
    assert [spec.dtype for spec in plan.tensor_maps] == [16, 16, 11]
    assert [spec.param_offset for spec in plan.tensor_maps] == [0, 128, 256]


def test_other_majors_are_the_same_bytes_under_other_names() -> None:
    a, b, _ = ffi.launch_plan(ffi_cases.request(majors="mk")).tensor_maps
    assert (list(a.dims), list(a.stride_bytes)) == ([1000, 4096, 2], [2000, 8192000])
    assert (list(b.dims), list(b.stride_bytes)) == ([4096, 520, 2], [8192, 4259840])


def test_parameter_block() -> None:
    # 3 descriptors; m n k batch, the steps (a has its own batch, b is shared), the raster, alpha; padding; the bias.
    plan = ffi.launch_plan(ffi_cases.request(b_batch=1, has_bias=True))
    assert plan.param_bytes == 432
    assert plan.bias_offset == 424
    want = bytes(384) + struct.pack("<8if", 1000, 520, 4096, 2, 1, 0, 8, 1, 0.5) + bytes(4) + bytes(8)
    assert plan.param_block == want
    assert ffi.launch_plan(ffi_cases.request()).bias_offset == -1


def test_sixty_four_bit_strides() -> None:
    a = ffi.launch_plan(ffi_cases.request(m=100_000, n=64, k=100_000, batch=3)).tensor_maps[0]
    assert list(a.stride_bytes) == [200_000, 20_000_000_000]


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 400)] * 3),
    batch=st.integers(1, 5),
    shared=st.tuples(st.booleans(), st.booleans()),
    majors=st.sampled_from(["kn", "kk", "mn", "mk"]),
    cluster=st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 2)]),
    tile=st.sampled_from([(64, 64), (128, 256), (128, 192)]),
    kinds=st.permutations(ffi_cases.KINDS),
    max_clusters=st.integers(1, 200),
)
def test_against_independent_formulas(
    sizes: tuple[int, int, int],
    batch: int,
    shared: tuple[bool, bool],
    majors: str,
    cluster: tuple[int, int],
    tile: tuple[int, int],
    kinds: list[str],
    max_clusters: int,
) -> None:
    m, n, k = (8 * size for size in sizes)
    batches = [1 if is_shared else batch for is_shared in shared]
    request = ffi_cases.request(
        m, n, k, batch, batches[0], batches[1], majors, has_bias=True, kinds=tuple(kinds),
        cta_m=tile[0], mma_n=tile[1], cluster_m=cluster[0], cluster_n=cluster[1],
    )  # fmt: skip
    request.max_active_clusters = max_clusters
    plan = ffi.launch_plan(request)

    tiles = len(range(0, m, cluster[0] * tile[0])) * len(range(0, n, cluster[1] * tile[1])) * batch
    assert list(plan.grid) == [*cluster, min(tiles, max_clusters)]
    shapes = [ffi_cases.a_shape(batches[0], m, k, majors[0]), ffi_cases.b_shape(batches[1], n, k, majors[1])]
    for spec, shape in zip(plan.tensor_maps, [*shapes, (batch, m, n)], strict=True):
        assert tuple(spec.dims) == shape[::-1]
        assert tuple(spec.stride_bytes) == (2 * shape[2], 2 * shape[1] * shape[2])
    values = {"m": m, "n": n, "k": k, "batch": batch, "raster_group": 8, "raster_along_n": 1}
    values |= {"a_batch_step": batches[0] != 1, "b_batch_step": batches[1] != 1}
    for kind, value in values.items():
        assert int.from_bytes(_leaf(plan, request, kind), "little", signed=True) == value
    assert struct.unpack("<f", _leaf(plan, request, "alpha")) == (0.5,)
    for kind in ("tma_a", "tma_b", "tma_c", "bias"):
        assert not any(_leaf(plan, request, kind))
    assert plan.param_offsets[: plan.num_params] == [at for _, at, _ in ffi_cases.lay_out(tuple(kinds))[0]]
    assert plan.bias_offset == dict((kind, at) for kind, at, _ in ffi_cases.lay_out(tuple(kinds))[0])["bias"]


def _set(**fields: int) -> Change:
    return lambda request: [setattr(request, name, value) for name, value in fields.items()]


def _dims(name: str, *dims: int) -> Change:
    return lambda request: getattr(request, name).dims.__setitem__(slice(0, len(dims)), dims)


def _box(operand: int, *box: int) -> Change:
    return lambda request: request.box[operand].__setitem__(slice(0, 3), box)


def _param(at: int, **fields: int) -> Change:
    return lambda request: [setattr(request.params[at], name, value) for name, value in fields.items()]


ERRORS: list[tuple[Change, str]] = [
    (_set(a_major=ord("n")), "`a_major` requires 'k' or 'm', got 'n'"),
    (_set(b_major=0), "`b_major` requires 'n' or 'k', got code 0"),
    (_set(cta_m=0), "`cta_m` requires 1..512, got 0"),
    (_set(mma_n=-64), "`mma_n` requires 1..512, got -64"),
    (_set(cluster_m=16), "`cluster_m` requires 1..8, got 16"),
    (_set(cluster_m=4, cluster_n=4), "`cluster_m * cluster_n` requires 1..8, got 16"),
    (_set(num_threads=2048), "`num_threads` requires 1..1024, got 2048"),
    (_set(raster_group=0), "`raster_group` requires 1..2147483647, got 0"),
    (_set(raster_along_n=2), "`raster_along_n` requires 0..1, got 2"),
    (_set(max_active_clusters=0), "`max_active_clusters` requires 1..2147483647, got 0"),
    (_box(0, 64, 512, 1), "the TMA box of `a` requires sizes of 1..256, got (64, 512, 1)"),
    (_box(2, 32, 64, 1), "the TMA box of `out` requires an innermost size of its swizzle span, 128 bytes, got 32 elem"),
    (lambda r: r.swizzle_bytes.__setitem__(1, 16), "`swizzle_bytes` of `b` requires 32, 64 or 128, got 16"),
    (lambda r: setattr(r.a, "rank", 2), "`a` requires rank 3, got rank 2 (2, 1000)"),
    (lambda r: setattr(r.out, "rank", -1), "`out` requires a buffer of rank 3, got none"),
    (lambda r: setattr(r.a, "dtype", 11), "require bfloat16 or float16, both the same, got float32 and bfloat16"),
    (lambda r: setattr(r.b, "dtype", 10), "both the same, got bfloat16 and float16"),
    (lambda r: setattr(r.out, "dtype", 12), "the result requires bfloat16, float16 or float32, got XLA FFI dtype 12"),
    (_dims("out", 2, 0), "`m` requires 1..2147483647, got 0"),
    (_dims("out", 2, 2**31), "`m` requires 1..2147483647, got 2147483648"),
    (_dims("a", 2, 992), "m of `a` and of the result requires 1000, got 992"),
    (_dims("b", 2, 4096, 512), "n of `b` and of the result requires 520, got 512"),
    (_dims("b", 2, 64), "k of `b` and of `a` requires 4096, got 64"),
    (_dims("a", 3), "the batch of `a` requires the result's 2 or 1 (shared), got 3"),
    (_dims("b", 3), "the batch of `b` requires the result's 2 or 1 (shared), got 3"),
    (lambda r: setattr(r, "bias", ffi.Buffer.of("bfloat16", (520,))), "requires operands a and b alone, got a bias"),
    (_param(0, kind=13), "a parameter kind requires 0..12, got 13"),
    (_param(0, kind=-1), "a parameter kind requires 0..12, got -1"),
    (_param(3, size=8), "parameter `m` requires 4 bytes, got 8"),
    (_param(1, offset=96), "parameter `tma_b` requires an offset that is a multiple of 64"),
    (_param(3, offset=-4), "parameter `m` requires an offset that is a multiple of 4"),
    (_param(3, offset=2**31 - 4), "ends within 420 bytes, got 2147483644"),
    (_param(3, offset=380), "each kind once and ascending offsets without overlap, got `m` at 380 after 384"),
    (_param(4, kind=3), "each kind once and ascending offsets without overlap, got `m` at 388 after 388"),
    (_param(4, offset=416), "ascending offsets without overlap, got `k` at 392 after 420"),
    (_set(num_params=17), "`params` requires at most 16 leaves, got 17"),
    (_set(num_params=2), "`params` requires `tma_c`, got a list without it"),
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
        (dict(m=8, n=8, k=8, batch=2**31 - 1), "at most 2147418112 cluster tiles, got 1 x 1 x 2147483647"),
    ],
)
def test_errors_of_sizes(request_: dict, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        ffi.launch_plan(ffi_cases.request(**request_))
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

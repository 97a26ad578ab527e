"""The launch plan against values worked out by hand, against formulas of this file's own, and its errors."""

import itertools
import struct
from collections.abc import Callable

import ffi_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_bwgemm import ffi
from jax_bwgemm.problem import DTYPE_BYTES

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


def test_a_cluster_that_divides_k_spans_z() -> None:
    # 24 cluster tiles as above, each by a cluster of 2x1x4 CTAs; the device holds 5 of them.
    plan = ffi.launch_plan(ffi_cases.request(cluster_k=4))
    assert (list(plan.grid), list(plan.cluster), plan.num_cluster_tiles) == ([2, 1, 96], [2, 1, 4], 24)
    request = ffi_cases.request(cluster_k=4)
    request.max_active_clusters = 5
    assert list(ffi.launch_plan(request).grid) == [2, 1, 20]


def test_persistent_grid_stays_below_the_limit_of_z() -> None:
    request = ffi_cases.request(m=2**24, n=2048, k=64, batch=1)  # 65536 x 8 tiles
    request.max_active_clusters = 10**6
    assert list(ffi.launch_plan(request).grid) == [2, 1, 65535]
    request.cluster_k = 4
    assert list(ffi.launch_plan(request).grid) == [2, 1, 65532]


def test_tensor_maps_name_the_contiguous_dimension_first() -> None:
    plan = ffi.launch_plan(ffi_cases.request(dtypes=("bfloat16", "bfloat16", "float32"), b_batch=1))
    a, b, out, residual = plan.tensor_maps
    assert residual.param_offset == -1
    assert (list(a.dims), list(a.stride_bytes), list(a.box)) == ([4096, 1000, 2], [8192, 8192000], [64, 128, 1])
    assert (list(b.dims), list(b.stride_bytes), list(b.box)) == ([520, 4096, 1], [1040, 4259840], [64, 128, 1])
    assert (list(out.dims), list(out.stride_bytes), list(out.box)) == ([520, 1000, 2], [2080, 2080000], [32, 64, 1])
    assert [spec.swizzle_bytes for spec in (a, b, out)] == [128, 128, 128]
    assert [spec.swizzle_atom_bytes for spec in (a, b, out)] == [16, 16, 16]
    assert [spec.data_type for spec in (a, b, out)] == [9, 9, 7]
    assert [spec.param_offset for spec in (a, b, out)] == [0, 128, 256]


@pytest.mark.parametrize("c_major", "nm")
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_a_residual_is_moved_as_the_result_is(c_major: str, out_dtype: str) -> None:
    dtypes = ("float32", "float32", out_dtype)
    request = ffi_cases.request(1008, 528, majors="kk", dtypes=dtypes, c_major=c_major, has_residual=True)
    request.swizzle_bytes[2], request.box[2][0] = 64, 64 // DTYPE_BYTES[out_dtype]
    plan = ffi.launch_plan(request)
    out, residual = plan.tensor_maps[2:]
    assert (out.param_offset, residual.param_offset, plan.param_offsets[4]) == (256, 384, 512)
    for field in ("data_type", "swizzle_bytes", "swizzle_atom_bytes"):
        assert getattr(out, field) == getattr(residual, field)
    for field in ("dims", "stride_bytes", "box"):
        assert list(getattr(out, field)) == list(getattr(residual, field))
    assert list(residual.dims) == ([528, 1008, 2] if c_major == "n" else [1008, 528, 2])
    assert (residual.data_type, residual.swizzle_bytes) == ({"bfloat16": 9, "float32": 7}.get(out_dtype, 0), 64)
    assert not any(plan.param_block[:512]) and struct.unpack_from("<3i", plan.param_block, 512) == (1008, 528, 4096)


def test_the_longest_list_of_parameters_fits() -> None:
    request = ffi_cases.request(has_bias=True, has_residual=True, workspace_bytes=2**24)
    plan = ffi.launch_plan(request)
    assert (plan.num_params, plan.param_bytes, plan.bias_offset) == (19, 600, 592)
    assert _leaf(plan, request, "alpha") == struct.pack("<f", 0.5)


@pytest.mark.parametrize(
    ("dtypes", "data_types"),
    [
        (("float16", "float16", "bfloat16"), [6, 6, 9]),
        (("float32", "float32", "float32"), [11, 11, 7]),  # TFLOAT32: TMA rounds what it loads, never what it stores
        (("float8_e4m3fn", "float8_e5m2", "float8_e5m2"), [0, 0, 0]),
        (("int8", "uint8", "int32"), [0, 0, 3]),
        (("uint8", "uint8", "int32"), [0, 0, 3]),
        (("float8_e5m2", "float8_e5m2", "float32"), [0, 0, 7]),
    ],
)
def test_tensor_map_types(dtypes: tuple[str, str, str], data_types: list[int]) -> None:
    maps = ffi.launch_plan(ffi_cases.request(n=528, dtypes=dtypes)).tensor_maps[:3]
    assert [spec.data_type for spec in maps] == data_types  # CUtensorMapDataType
    assert [spec.box[0] * DTYPE_BYTES[x] for spec, x in zip(maps, dtypes, strict=True)] == [128] * 3


def test_a_tf32_operand_whose_rows_are_contiguous_swizzles_32_bytes() -> None:
    request = ffi_cases.request(majors="mn", dtypes=("float32", "float32", "float32"))
    request.swizzle_atom_bytes[0] = request.swizzle_atom_bytes[1] = 32
    assert [spec.swizzle_atom_bytes for spec in ffi.launch_plan(request).tensor_maps[:3]] == [32, 32, 16]


def test_an_m_major_result_is_the_same_problem() -> None:
    request = ffi_cases.request(n=521, majors="kk", c_major="m")
    plan = ffi.launch_plan(request)
    out = plan.tensor_maps[2]
    assert (list(out.dims), list(out.stride_bytes)) == ([1000, 521, 2], [2000, 1042000])
    assert struct.unpack_from("<3i", plan.param_block, 384) == (1000, 521, 4096)
    assert list(plan.grid) == [2, 1, 24]


def test_threads_that_store_take_a_pointer() -> None:
    # m and n of 3 rows and columns, of which B's columns are padded to 8 elements of 2 bytes
    request = ffi_cases.request(m=3, n=3, store="threads")
    request.b.dims[2] = 8
    plan = ffi.launch_plan(request)
    assert [spec.param_offset for spec in plan.tensor_maps] == [0, 128, -1, -1]
    assert (plan.c_offset, plan.out_align_bytes, plan.param_block[256:264]) == (256, 2, bytes(8))
    assert struct.unpack_from("<2i", plan.param_block, 264) == (3, 3)
    assert list(plan.tensor_maps[1].dims) == [8, 4096, 2]
    plan = ffi.launch_plan(ffi_cases.request())
    assert (plan.c_offset, plan.out_align_bytes) == (-1, 16)


@pytest.mark.parametrize(
    ("sizes", "majors", "a_dims", "b_dims", "k"),
    [
        ((1000, 520, 4090), "kn", (2, 1000, 4096), (2, 4090, 520), 4090),  # a's k grows, b's rows say how far it counts
        ((1000, 520, 4090), "mk", (2, 4090, 1000), (2, 520, 4096), 4090),
        ((1000, 520, 4090), "kk", (2, 1000, 4096), (2, 520, 4096), 4096),  # zeros on both sides: counted
        ((1001, 520, 4090), "mk", (2, 4090, 1008), (2, 520, 4096), 4090),
        ((1000, 519, 4096), "kn", (2, 1000, 4096), (2, 4096, 520), 4096),
    ],
)
def test_padded_operands(
    sizes: tuple[int, int, int], majors: str, a_dims: tuple[int, ...], b_dims: tuple[int, ...], k: int
) -> None:
    request = ffi_cases.request(*sizes, majors=majors, store="threads")
    request.a.dims[:], request.b.dims[:] = a_dims, b_dims
    plan = ffi.launch_plan(request)
    assert [tuple(spec.dims)[::-1] for spec in plan.tensor_maps[:2]] == [a_dims, b_dims]
    assert struct.unpack_from("<3i", plan.param_block, plan.param_offsets[3]) == (*sizes[:2], k)


def test_l2_policies() -> None:
    # CUTLASS, TMA::CacheHintSm90: EVICT_NORMAL, EVICT_FIRST, EVICT_LAST
    values = (0x1000000000000000, 0x12F0000000000000, 0x14F0000000000000)
    for a_l2, b_l2 in itertools.product(range(3), repeat=2):
        request = ffi_cases.request(a_l2=a_l2, b_l2=b_l2)
        plan = ffi.launch_plan(request)
        leaves = [_leaf(plan, request, kind) for kind in ("a_policy", "b_policy")]
        assert leaves == [struct.pack("<Q", values[code]) for code in (a_l2, b_l2)]


def test_programmatic_dependent_launch_is_passed_on() -> None:
    assert [ffi.launch_plan(ffi_cases.request(pdl=pdl)).pdl for pdl in (0, 1)] == [0, 1]


def test_other_majors_are_the_same_bytes_under_other_names() -> None:
    a, b = ffi.launch_plan(ffi_cases.request(majors="mk")).tensor_maps[:2]
    assert (list(a.dims), list(a.stride_bytes)) == ([1000, 4096, 2], [2000, 8192000])
    assert (list(b.dims), list(b.stride_bytes)) == ([4096, 520, 2], [8192, 4259840])


def test_parameter_block() -> None:
    # 3 descriptors; m n k batch, the steps (a has its own batch, b is shared), the raster; the L2 policies; alpha;
    # padding; the bias.
    plan = ffi.launch_plan(ffi_cases.request(b_batch=1, has_bias=True, b_l2=1))
    assert plan.param_bytes == 448
    assert plan.bias_offset == 440
    numbers = (1000, 520, 4096, 2, 1, 0, 8, 1, 0x1000000000000000, 0x12F0000000000000, 0.5)
    want = bytes(384) + struct.pack("<8i2Qf", *numbers) + bytes(4) + bytes(8)
    assert plan.param_block == want
    assert ffi.launch_plan(ffi_cases.request()).bias_offset == -1


def test_sixty_four_bit_strides() -> None:
    a = ffi.launch_plan(ffi_cases.request(m=100_000, n=64, k=100_000, batch=3)).tensor_maps[0]
    assert list(a.stride_bytes) == [200_000, 20_000_000_000]


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 1500)] * 3),
    batch=st.integers(1, 5),
    shared=st.tuples(st.booleans(), st.booleans()),
    majors=st.sampled_from(["knn", "kkn", "mnn", "mkn", "knm", "kkm", "mnm", "mkm"]),
    dtypes=st.sampled_from(
        [
            ("bfloat16", "bfloat16", "bfloat16"),
            ("float16", "float16", "float8_e4m3fn"),
            ("float32", "float32", "float32"),
            ("float8_e4m3fn", "float8_e5m2", "float16"),
            ("int8", "uint8", "int32"),
        ]
    ),
    cluster=st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (4, 2, 1), (4, 4, 1), (1, 1, 16), (2, 1, 8)]),
    tile=st.sampled_from([(64, 64), (128, 256), (128, 192)]),
    kinds=st.permutations(ffi_cases.KINDS),
    by_threads=st.booleans(),
    has_residual=st.booleans(),
    max_clusters=st.integers(1, 200),
)
def test_against_independent_formulas(
    sizes: tuple[int, int, int],
    batch: int,
    shared: tuple[bool, bool],
    majors: str,
    dtypes: tuple[str, str, str],
    cluster: tuple[int, int, int],
    tile: tuple[int, int],
    kinds: list[str],
    by_threads: bool,
    has_residual: bool,
    max_clusters: int,
) -> None:
    (m, n, k), in_bytes, out_bytes = sizes, DTYPE_BYTES[dtypes[0]], DTYPE_BYTES[dtypes[2]]
    batches = [1 if is_shared else batch for is_shared in shared]
    out_shape = (batch, m, n) if majors[2] == "n" else (batch, n, m)
    by_threads = by_threads or bool(out_shape[2] * out_bytes % 16)
    has_residual = has_residual and not by_threads
    taken = set(ffi_cases.kinds_of(majors[2] == "n", "threads" if by_threads else "tma", has_residual))
    ordered = tuple(kind for kind in kinds if kind in taken)
    request = ffi_cases.request(
        m, n, k, batch, batches[0], batches[1], majors, dtypes, "bias" in taken, ordered, majors[2],
        "threads" if by_threads else "tma", has_residual, cta_m=tile[0], mma_n=tile[1], cluster_m=cluster[0],
        cluster_n=cluster[1], cluster_k=cluster[2],
    )  # fmt: skip
    request.max_active_clusters = max_clusters
    shapes = [ffi_cases.a_shape(batches[0], m, k, majors[0]), ffi_cases.b_shape(batches[1], n, k, majors[1])]
    while shapes[0][2] * in_bytes % 16:
        shapes[0] = (*shapes[0][:2], shapes[0][2] + 1)
    while shapes[1][2] * in_bytes % 16:
        shapes[1] = (*shapes[1][:2], shapes[1][2] + 1)
    request.a.dims[:], request.b.dims[:] = shapes
    plan = ffi.launch_plan(request)

    tiles = len(range(0, m, cluster[0] * tile[0])) * len(range(0, n, cluster[1] * tile[1])) * batch
    assert list(plan.cluster) == list(cluster)
    assert list(plan.grid) == [*cluster[:2], cluster[2] * min(tiles, max_clusters)]
    specs = plan.tensor_maps[: 2 if by_threads else 3 + has_residual]
    for spec, shape, dtype in zip(specs, [*shapes, out_shape, out_shape], [*dtypes, dtypes[2]], strict=False):
        assert tuple(spec.dims) == shape[::-1]
        assert tuple(spec.stride_bytes) == (DTYPE_BYTES[dtype] * shape[2], DTYPE_BYTES[dtype] * shape[1] * shape[2])
    values = {"m": m, "n": n, "k": shapes[0][2] if majors[:2] == "kk" else k, "batch": batch}
    values |= {"raster_group": 8, "raster_along_n": 1, "a_policy": 1 << 60, "b_policy": 1 << 60}
    values |= {"a_batch_step": batches[0] != 1, "b_batch_step": batches[1] != 1}
    for kind, value in values.items():
        assert int.from_bytes(_leaf(plan, request, kind), "little", signed=True) == value
    assert struct.unpack("<f", _leaf(plan, request, "alpha")) == (0.5,)
    for kind in taken & {"tma_a", "tma_b", "tma_c", "tma_r", "c", "bias"}:
        assert not any(_leaf(plan, request, kind))
    offsets = {kind: at for kind, at, _ in ffi_cases.lay_out(ordered)[0]}
    assert plan.param_offsets[: plan.num_params] == list(offsets.values())
    assert (plan.c_offset, plan.bias_offset) == (offsets.get("c", -1), offsets.get("bias", -1))


FLAG_BYTES, CLUSTER_BYTES = 4096, ffi_cases.CLUSTER_BYTES


@pytest.mark.parametrize(
    ("tail_parts", "max_clusters", "room", "clusters"),
    [
        (1, 66, 66, 24),  # 24 tiles fill a part of a wave
        (2, 66, 66, 48),  # as many clusters as there are parts of them,
        (3, 66, 66, 66),  # at most those that the device holds
        (3, 66, 30, 30),  # and the workspace has room for
        (3, 10, 66, 10),  # two waves and 4 tiles
        (9, 1000, 1000, 128),  # 4096 bytes hold the flags of 256 CTAs
        (65535, 66, 1, 1),
    ],
)
def test_grid_of_a_split_tail(tail_parts: int, max_clusters: int, room: int, clusters: int) -> None:
    for spare in (0, CLUSTER_BYTES - 1):
        size = FLAG_BYTES + room * CLUSTER_BYTES + spare
        request = ffi_cases.request(workspace_bytes=size, tail_parts=tail_parts)
        request.max_active_clusters = max_clusters
        plan = ffi.launch_plan(request)
        assert (list(plan.grid), plan.num_cluster_tiles) == ([2, 1, clusters], 24)


def test_a_split_tail_needs_its_parameters() -> None:
    # 3 descriptors, 8 sizes of 4 bytes, 2 policies; the parts, padding, the workspace's address, the token; alpha
    request = ffi_cases.request(workspace_bytes=2**24, tail_parts=7, token=0xFEDCBA9876543210)
    plan = ffi.launch_plan(request)
    assert (plan.workspace_offset, plan.param_bytes) == (440, 460)
    assert plan.param_block[432:456] == struct.pack("<i4xQQ", 7, 0, 0xFEDCBA9876543210)
    plain = ffi.launch_plan(ffi_cases.request(tail_parts=7))
    assert (plain.workspace_offset, plain.param_bytes, list(plain.grid)) == (-1, 436, [2, 1, 24])


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
    (_set(tail_parts=0), "`tail_parts` requires 1..65535, got 0"),
    (_set(num_threads=2048), "`num_threads` requires 1..1024, got 2048"),
    (_set(raster_group=0), "`raster_group` requires 1..2147483647, got 0"),
    (_set(raster_along_n=2), "`raster_along_n` requires 0..1, got 2"),
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
    (_dims("b", 2, 4087), "k of `a` and of `b` requires 4087, or 4088 with padding, got 4096"),
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
    (_param(0, kind=20), "a parameter kind requires 0..19, got 20"),
    (_param(0, kind=-1), "a parameter kind requires 0..19, got -1"),
    (_param(3, size=8), "parameter `m` requires 4 bytes, got 8"),
    (_param(1, offset=96), "parameter `tma_b` requires an offset that is a multiple of 64"),
    (_param(3, offset=-4), "parameter `m` requires an offset that is a multiple of 4"),
    (_param(3, offset=2**31 - 4), "ends within 436 bytes, got 2147483644"),
    (_param(3, offset=380), "each kind once and ascending offsets without overlap, got `m` at 380 after 384"),
    (_param(4, kind=5), "each kind once and ascending offsets without overlap, got `m` at 388 after 388"),
    (_param(4, offset=416), "ascending offsets without overlap, got `k` at 392 after 420"),
    (_set(num_params=21), "`params` requires at most 20 leaves, got 21"),
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
        (dict(has_bias=True, c_major="m"), "a bias requires an n-major result, got `c_major` 'm'"),
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
        (dict(m=1001, majors="mn"), _dims("a", 2, 4096, 1016), "requires 1001, or 1008 with padding, got 1016"),
        (dict(n=519, majors="kk"), _dims("b", 2, 520), "n of `b` and of the result requires 519, got 520"),
        (
            dict(n=519),
            _dims("b", 2, 4096, 524),
            "n of `b` and of the result requires 519, or 520 with padding, got 524",
        ),
        (dict(k=4090), _dims("a", 2, 1000, 4094), "k of `a` and of `b` requires 4090, or 4096 with padding, got 4094"),
        (dict(k=4096), _dims("b", 2, 4090), None),
        (dict(k=4096), _dims("b", 2, 4088), "k of `a` and of `b` requires 4088, got 4096"),
        (
            dict(k=4090, majors="mk"),
            _dims("b", 2, 520, 4104),
            "k of `b` and of `a` requires 4090, or 4096 with padding",
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

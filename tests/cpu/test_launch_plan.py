"""The launch plan against values worked out by hand, and against formulas of this file's own."""

import itertools
import struct

import ffi_cases
import pytest
from ffi_cases import CLUSTER_BYTES, FLAG_BYTES
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_bwgemm.facts.problem import DTYPE_BYTES
from jax_bwgemm.planner.order import L2_HINTS
from jax_bwgemm.runtime import ffi
from tests.fuzz import fuzz, rounds

pytestmark = pytest.mark.skipif(ffi.status() is not None, reason=str(ffi.status()))


def test_grid_is_the_cluster_by_the_clusters_that_fit() -> None:
    # 1000 rows in cluster tiles of 2 * 128 make 4, 520 columns in tiles of 256 make 3; with a batch of 2, 24 tiles.
    plan = ffi_cases.request().plan()
    assert plan.num_cluster_tiles == 24
    assert list(plan.grid) == [2, 1, 24]
    assert list(plan.cluster) == [2, 1, 1]
    assert list(plan.block) == [384, 1, 1]
    assert plan.smem_bytes == 232448
    request = ffi_cases.request()
    request.max_active_clusters = 10
    assert list(request.plan().grid) == [2, 1, 10]


def test_a_cluster_that_divides_k_spans_z() -> None:
    # 24 cluster tiles as above, each by a cluster of 2x1x4 CTAs; the device holds 5 of them.
    plan = ffi_cases.request(cluster_k=4).plan()
    assert (list(plan.grid), list(plan.cluster), plan.num_cluster_tiles) == ([2, 1, 96], [2, 1, 4], 24)
    request = ffi_cases.request(cluster_k=4)
    request.max_active_clusters = 5
    assert list(request.plan().grid) == [2, 1, 20]


def test_persistent_grid_stays_below_the_limit_of_z() -> None:
    request = ffi_cases.request(m=2**24, n=2048, k=64, batch=1)  # 65536 x 8 tiles
    request.max_active_clusters = 10**6
    assert list(request.plan().grid) == [2, 1, 65535]
    request.attributes["cluster_k"] = 4
    assert list(request.plan().grid) == [2, 1, 65532]


def test_tensor_maps_name_the_contiguous_dimension_first() -> None:
    uses = ffi_cases.request(dtypes=("bfloat16", "bfloat16", "float32"), b_batch=1).plan().buffers
    a, b, out = (use.map for use in uses)
    assert (list(a.dims), list(a.stride_bytes), list(a.box)) == ([4096, 1000, 2], [8192, 8192000], [64, 128, 1])
    assert (list(b.dims), list(b.stride_bytes), list(b.box)) == ([520, 4096, 1], [1040, 4259840], [64, 128, 1])
    assert (list(out.dims), list(out.stride_bytes), list(out.box)) == ([520, 1000, 2], [2080, 2080000], [32, 64, 1])
    assert [spec.swizzle_bytes for spec in (a, b, out)] == [128, 128, 128]
    assert [spec.swizzle_atom_bytes for spec in (a, b, out)] == [16, 16, 16]
    assert [spec.data_type for spec in (a, b, out)] == [9, 9, 7]
    assert [(use.map_offset, use.pointer_offset, use.align_bytes) for use in uses] == [
        (0, -1, 16),
        (128, -1, 16),
        (256, -1, 16),
    ]


@pytest.mark.parametrize("c_major", "nm")
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_a_residual_is_moved_as_the_result_is(c_major: str, out_dtype: str) -> None:
    dtypes = ("float32", "float32", out_dtype)
    request = ffi_cases.request(1008, 528, majors="kk", dtypes=dtypes, c_major=c_major, has_residual=True)
    for role in ("out", "residual"):
        request.maps[role].swizzle_bytes, request.maps[role].box[0] = 64, 64 // DTYPE_BYTES[out_dtype]
    plan = request.plan()
    uses = [request.use(plan, role) for role in ("out", "residual")]
    assert ([use.map_offset for use in uses], plan.param_offsets[4]) == ([256, 384], 512)
    out, residual = (use.map for use in uses)
    for field in ("data_type", "swizzle_bytes", "swizzle_atom_bytes"):
        assert getattr(out, field) == getattr(residual, field)
    for field in ("dims", "stride_bytes", "box"):
        assert list(getattr(out, field)) == list(getattr(residual, field))
    assert list(residual.dims) == ([528, 1008, 2] if c_major == "n" else [1008, 528, 2])
    assert (residual.data_type, residual.swizzle_bytes) == ({"bfloat16": 9, "float32": 7}.get(out_dtype, 0), 64)
    assert not any(plan.param_block[:512]) and struct.unpack_from("<3i", plan.param_block, 512) == (1008, 528, 4096)


@pytest.mark.parametrize("c_major", "nm")
def test_one_matrix_needs_no_batch(c_major: str) -> None:
    """The result, and what is shaped like it: XLA would copy what is reshaped before it is stored over."""
    request = ffi_cases.request(batch=1, c_major=c_major, has_residual=True)
    whole = request.plan()
    for role in ("out", "residual"):
        buffer = getattr(request, role)
        assert buffer.rank == 3 and buffer.dims[0] == 1
        buffer.rank, buffer.dims[0], buffer.dims[1] = 2, buffer.dims[1], buffer.dims[2]
    plan = request.plan()
    assert plan.param_block == whole.param_block
    for role in ("out", "residual"):
        own, wanted = (request.use(x, role).map for x in (plan, whole))
        assert [list(getattr(own, x)) for x in ("dims", "stride_bytes", "box")] == [
            list(getattr(wanted, x)) for x in ("dims", "stride_bytes", "box")
        ]


def test_the_longest_list_of_parameters_fits() -> None:
    request = ffi_cases.request(has_bias=True, has_residual=True, workspace_bytes=2**24)
    plan = request.plan()
    assert (plan.num_params, plan.param_bytes, request.use(plan, "bias").pointer_offset) == (22, 616, 608)
    assert request.leaf(plan, "alpha") == struct.pack("<f", 0.5)


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
    maps = [use.map for use in ffi_cases.request(n=528, dtypes=dtypes).plan().buffers]
    assert [spec.data_type for spec in maps] == data_types  # CUtensorMapDataType
    assert [spec.box[0] * DTYPE_BYTES[x] for spec, x in zip(maps, dtypes, strict=True)] == [128] * 3


def test_a_tf32_operand_whose_rows_are_contiguous_swizzles_32_bytes() -> None:
    request = ffi_cases.request(majors="mn", dtypes=("float32", "float32", "float32"))
    request.maps["a"].swizzle_atom_bytes = request.maps["b"].swizzle_atom_bytes = 32
    assert [use.map.swizzle_atom_bytes for use in request.plan().buffers] == [32, 32, 16]


def test_an_m_major_result_is_the_same_problem() -> None:
    request = ffi_cases.request(n=521, majors="kk", c_major="m")
    plan = request.plan()
    out = request.use(plan, "out").map
    assert (list(out.dims), list(out.stride_bytes)) == ([1000, 521, 2], [2000, 1042000])
    assert struct.unpack_from("<3i", plan.param_block, 384) == (1000, 521, 4096)
    assert list(plan.grid) == [2, 1, 24]


def test_threads_that_store_take_a_pointer() -> None:
    # m and n of 3 rows and columns, of which B's columns are padded to 8 elements of 2 bytes
    request = ffi_cases.request(m=3, n=3, store="threads")
    request.b.dims[2] = 8
    plan = request.plan()
    assert [use.map_offset for use in plan.buffers] == [0, 128, -1]
    assert [use.pointer_offset for use in plan.buffers] == [-1, -1, 256]
    assert (request.use(plan, "out").align_bytes, plan.param_block[256:264]) == (2, bytes(8))
    assert struct.unpack_from("<2i", plan.param_block, 264) == (3, 3)
    assert list(plan.buffers[1].map.dims) == [8, 4096, 2]
    use = ffi_cases.request().plan().buffers[2]
    assert (use.pointer_offset, use.align_bytes) == (-1, 16)


@pytest.mark.parametrize(
    ("sizes", "majors", "a_dims", "b_dims", "k"),
    [
        ((1000, 520, 4090), "kn", (2, 1000, 4096), (2, 4090, 520), 4090),  # a's k grows, b's rows say how far it counts
        ((1000, 520, 4090), "mk", (2, 4090, 1000), (2, 520, 4096), 4090),
        ((1000, 520, 4090), "kk", (2, 1000, 4096), (2, 520, 4096), 4096),  # zeros on both sides: counted
        ((1001, 520, 4090), "mk", (2, 4090, 1008), (2, 520, 4096), 4090),
        ((1001, 519, 4097), "mn", (2, 4097, 1024), (2, 4097, 576), 4097),  # to the end of a cache line
        ((1000, 520, 4097), "kk", (2, 1000, 4160), (2, 520, 4160), 4160),
        ((1000, 519, 4096), "kn", (2, 1000, 4096), (2, 4096, 520), 4096),
    ],
)
def test_padded_operands(
    sizes: tuple[int, int, int], majors: str, a_dims: tuple[int, ...], b_dims: tuple[int, ...], k: int
) -> None:
    request = ffi_cases.request(*sizes, majors=majors, store="threads")
    request.a.dims[:], request.b.dims[:] = a_dims, b_dims
    plan = request.plan()
    assert [tuple(use.map.dims)[::-1] for use in plan.buffers[:2]] == [a_dims, b_dims]
    assert struct.unpack_from("<3i", plan.param_block, plan.param_offsets[3]) == (*sizes[:2], k)


def test_l2_policies() -> None:
    # CUTLASS, TMA::CacheHintSm90: EVICT_NORMAL, EVICT_FIRST, EVICT_LAST
    values = dict(normal=0x1000000000000000, evict_first=0x12F0000000000000, evict_last=0x14F0000000000000)
    for hints in itertools.product(L2_HINTS, repeat=3):
        request = ffi_cases.request(**dict(zip(("a_l2", "b_l2", "c_l2"), hints, strict=True)))
        plan = request.plan()
        leaves = [request.leaf(plan, kind) for kind in ("a_policy", "b_policy", "c_policy")]
        assert leaves == [struct.pack("<Q", values[code]) for code in hints]


@pytest.mark.parametrize(("num", "active", "clusters"), [(1, 5, 5), (2, 5, 10), (4, 5, 20), (4, 7, 24), (64, 132, 24)])
def test_rounds_are_clusters_that_follow_each_other(num: int, active: int, clusters: int) -> None:
    """(2, 1000, 520) in tiles of 256 x 256: 24 of them, of two CTAs each."""
    request = ffi_cases.request(rounds=num)
    request.max_active_clusters = active
    plan = request.plan()
    assert (plan.num_cluster_tiles, list(plan.grid)) == (24, [2, 1, clusters])


def test_a_call_of_before_there_were_rounds_has_one() -> None:
    request = ffi_cases.request()
    request.max_active_clusters = 5
    del request.attributes["rounds"]
    assert list(request.plan().grid) == [2, 1, 5]


def test_clusters_that_share_tiles_are_all_there_at_once() -> None:
    """Whatever the rounds: a workspace has room for those that run at once."""
    for num in (1, 4):
        request = ffi_cases.request(rounds=num, workspace_bytes=4096 + 66 * 2 * 128 * 256 * 4)
        request.max_active_clusters = 5
        assert list(request.plan().grid) == [2, 1, 5]


def test_programmatic_dependent_launch_is_passed_on() -> None:
    assert [ffi_cases.request(pdl=pdl).plan().pdl for pdl in (0, 1)] == [0, 1]


def test_other_majors_are_the_same_bytes_under_other_names() -> None:
    a, b = (use.map for use in ffi_cases.request(majors="mk").plan().buffers[:2])
    assert (list(a.dims), list(a.stride_bytes)) == ([1000, 4096, 2], [2000, 8192000])
    assert (list(b.dims), list(b.stride_bytes)) == ([4096, 520, 2], [8192, 4259840])


def test_parameter_block() -> None:
    # 3 descriptors; m n k batch, the steps (a has its own batch, b is shared), the raster; padding; the L2 policies;
    # alpha; padding; the bias.
    request = ffi_cases.request(b_batch=1, has_bias=True, b_l2="evict_first")
    plan = request.plan()
    assert plan.param_bytes == 464
    assert request.use(plan, "bias").pointer_offset == 456
    policies = (0x1000000000000000, 0x12F0000000000000, 0x1000000000000000)
    numbers = (1000, 520, 4096, 2, 1, 0, 8, 1, 1, *policies, 0.5)
    want = bytes(384) + struct.pack("<9i4x3Qf", *numbers) + bytes(4) + bytes(8)
    assert plan.param_block == want


def test_sixty_four_bit_strides() -> None:
    a = ffi_cases.request(m=100_000, n=64, k=100_000, batch=3).plan().buffers[0].map
    assert list(a.stride_bytes) == [200_000, 20_000_000_000]


@fuzz
@settings(max_examples=rounds(300), deadline=None)
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
        "threads" if by_threads else "tma", has_residual, cta_m=tile[0], mma_n=tile[1], out_n=tile[1],
        cluster_m=cluster[0], cluster_n=cluster[1], cluster_k=cluster[2],
    )  # fmt: skip
    request.max_active_clusters = max_clusters
    shapes = [ffi_cases.a_shape(batches[0], m, k, majors[0]), ffi_cases.b_shape(batches[1], n, k, majors[1])]
    while shapes[0][2] * in_bytes % 16:
        shapes[0] = (*shapes[0][:2], shapes[0][2] + 1)
    while shapes[1][2] * in_bytes % 16:
        shapes[1] = (*shapes[1][:2], shapes[1][2] + 1)
    request.a.dims[:], request.b.dims[:] = shapes
    plan = request.plan()

    tiles = len(range(0, m, cluster[0] * tile[0])) * len(range(0, n, cluster[1] * tile[1])) * batch
    assert list(plan.cluster) == list(cluster)
    assert list(plan.grid) == [*cluster[:2], cluster[2] * min(tiles, max_clusters)]
    mapped = ["a", "b"] + ["residual"] * has_residual + ["out"] * (not by_threads)
    assert [role for role in request.rules if request.use(plan, role).map_offset >= 0] == mapped
    specs = [request.use(plan, role).map for role in mapped]
    for spec, shape, dtype in zip(specs, [*shapes, out_shape, out_shape], [*dtypes, dtypes[2]], strict=False):
        assert tuple(spec.dims) == shape[::-1]
        assert tuple(spec.stride_bytes) == (DTYPE_BYTES[dtype] * shape[2], DTYPE_BYTES[dtype] * shape[1] * shape[2])
    values = {"m": m, "n": n, "k": shapes[0][2] if majors[:2] == "kk" else k, "batch": batch}
    values |= {"raster_group": 8, "raster_along_n": 1, "raster_order": 1}
    values |= dict.fromkeys(("a_policy", "b_policy", "c_policy"), 1 << 60)
    values |= {"a_batch_step": batches[0] != 1, "b_batch_step": batches[1] != 1}
    for kind, value in values.items():
        assert int.from_bytes(request.leaf(plan, kind), "little", signed=True) == value
    assert struct.unpack("<f", request.leaf(plan, "alpha")) == (0.5,)
    for kind in taken & {"tma_a", "tma_b", "tma_c", "tma_r", "c", "bias"}:
        assert not any(request.leaf(plan, kind))
    offsets = {kind: at for kind, at, _ in ffi_cases.lay_out(ordered)[0]}
    assert plan.param_offsets == list(offsets.values())
    for role, kind in (("a", "tma_a"), ("b", "tma_b"), ("residual", "tma_r"), ("out", "tma_c")):
        assert role not in request.rules or request.use(plan, role).map_offset == offsets.get(kind, -1)
    for role, kind in (("out", "c"), ("bias", "bias")):
        assert role not in request.rules or request.use(plan, role).pointer_offset == offsets.get(kind, -1)


@pytest.mark.parametrize(
    ("stream", "max_clusters", "room", "clusters"),
    [
        ((0, 66), 66, 66, 24),  # 24 tiles fill a part of a wave
        ((24, 48), 66, 66, 48),  # as many clusters as share them,
        ((24, 72), 66, 66, 66),  # at most those that the device holds
        ((24, 72), 66, 30, 30),  # and the workspace has room for
        ((4, 10), 66, 66, 24),  # no fewer than there are tiles,
        ((4, 10), 10, 66, 10),  # or two waves and 4 tiles
        ((24, 1000), 1000, 1000, 128),  # 4096 bytes hold the flags of 256 CTAs
        ((2**31 - 1, 65535), 66, 1, 1),
    ],
)
def test_grid_of_a_stream_k(stream: tuple[int, int], max_clusters: int, room: int, clusters: int) -> None:
    for spare in (0, CLUSTER_BYTES - 1):
        size = FLAG_BYTES + room * CLUSTER_BYTES + spare
        request = ffi_cases.request(workspace_bytes=size, stream_tiles=stream[0], stream_clusters=stream[1])
        request.max_active_clusters = max_clusters
        plan = request.plan()
        assert (list(plan.grid), plan.num_cluster_tiles) == ([2, 1, clusters], 24)


def test_a_grid_of_tiles() -> None:
    """1000 rows are 8 tiles of 128, 520 columns 3 of 256: a CTA for each, of both matrices, whatever fits at a time."""
    request = ffi_cases.request(tile_grid=1, cluster_m=1)
    request.max_active_clusters = 1
    plan = request.plan()
    assert (list(plan.grid), list(plan.cluster), plan.num_cluster_tiles) == ([8, 3, 2], [1, 1, 1], 48)
    plan = ffi_cases.request(tile_grid=2, cluster_m=1).plan()
    assert (list(plan.grid), list(plan.cluster), plan.num_cluster_tiles) == ([3, 8, 2], [1, 1, 1], 48)


def test_a_grid_of_tiles_that_are_divided_along_k() -> None:
    """Clusters along z, each of a tile."""
    plan = ffi_cases.request(tile_grid=1, cluster_m=1, cluster_k=4).plan()
    assert (list(plan.grid), list(plan.cluster), plan.num_cluster_tiles) == ([8, 3, 8], [1, 1, 4], 48)


def test_a_stream_k_needs_its_parameters() -> None:
    # 3 descriptors, 9 sizes of 4 bytes, padding, 3 policies; tiles, clusters, the workspace's address, the token; alpha
    request = ffi_cases.request(workspace_bytes=2**24, stream_tiles=7, stream_clusters=9, token=0xFEDCBA9876543210)
    plan = request.plan()
    assert (request.use(plan, "workspace").pointer_offset, plan.param_bytes) == (456, 476)
    assert plan.param_block[448:472] == struct.pack("<iiQQ", 7, 9, 0, 0xFEDCBA9876543210)
    plain = ffi_cases.request(stream_tiles=7, stream_clusters=66).plan()
    assert (plain.num_buffers, plain.param_bytes, list(plain.grid)) == (3, 452, [2, 1, 24])

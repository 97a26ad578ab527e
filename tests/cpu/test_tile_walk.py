"""What the launcher works out for a kernel's walk (`ffi/tile_walk`), and the divisions by multipliers behind it."""

from __future__ import annotations

import ffi_cases
import pytest
from ffi_cases import CLUSTER_BYTES, FLAG_BYTES
from hypothesis import given
from hypothesis import strategies as st

from jax_bwgemm.facts.tile import INT32_MAX
from jax_bwgemm.kernels.scheduler import Divisor, divisor, tile_order, triangle
from tests.walks import order_leaves, share_leaves

sizes = st.integers(1, 40_000)


def walked(call: ffi_cases.Call, names: list[str]) -> dict[str, int]:
    """What the launcher packs for these, and for the step between parts of k, which is 0 unless there are any."""
    block = ffi_cases.walk(call, names).plan().param_block
    leaves = [(source.removeprefix("walk:"), at) for source, at, _ in call.leaves if source.startswith("walk:")]
    found = {name.removesuffix("/64"): int.from_bytes(block[at : at + 4], "little") for name, at in leaves}
    if call.attributes.get("parts", 1) == 1:
        assert found.pop("k_step") == 0
    return found


@given(
    m=sizes, n=sizes.map(lambda n: n * 8), k=sizes.map(lambda k: k * 8), batch=st.integers(1, 3),
    group=st.one_of(st.integers(1, 40), st.just(INT32_MAX)), along_n=st.integers(0, 1),
)  # fmt: skip
def test_an_order_is_the_schedulers_own(m: int, n: int, k: int, batch: int, group: int, along_n: int) -> None:
    tiles = -(-m // 256), -(-n // 256), batch  # cluster tiles of 256x256
    expected = order_leaves(tiles, -(-k // 64), group, along_n)
    call = ffi_cases.request(m=m, n=n, k=k, batch=batch, raster_group=group, raster_along_n=along_n)
    call.leaves = [leaf for leaf in call.leaves if "raster" not in leaf[0]]
    assert walked(call, list(expected)) == expected


@given(
    m=sizes, n=sizes.map(lambda n: n * 8), k=sizes.map(lambda k: k * 8), tiles=st.integers(0, 200),
    clusters=st.integers(1, 80), room=st.integers(1, 70),
)  # fmt: skip
def test_a_stream_is_the_schedulers_own(m: int, n: int, k: int, tiles: int, clusters: int, room: int) -> None:
    size = FLAG_BYTES + room * CLUSTER_BYTES
    call = ffi_cases.request(
        m=m, n=n, k=k, batch=1, workspace_bytes=size, stream_tiles=tiles, stream_clusters=clusters
    )  # fmt: skip
    plan = call.plan()
    k_tiles = -(-k // 64)
    expected = {"k_tiles": k_tiles} | share_leaves(plan.num_cluster_tiles, k_tiles, plan.grid[2], tiles, clusters)
    assert walked(call, list(expected)) == expected


@given(side=st.integers(1, 300), batch=st.integers(1, 3), tiles=st.integers(0, 50), clusters=st.integers(1, 80))
def test_a_stream_of_a_symmetric_product(side: int, batch: int, tiles: int, clusters: int) -> None:
    """Of its tiles, those on and under the diagonals."""
    size = FLAG_BYTES + 66 * CLUSTER_BYTES
    call = ffi_cases.request(
        m=side * 256, n=side * 256, k=4096, batch=batch, workspace_bytes=size, stream_tiles=tiles,
        stream_clusters=clusters,
    )  # fmt: skip
    count = batch * triangle(side)
    expected = {"triangle": count, "k_tiles": 64} | share_leaves(count, 64, call.plan().grid[2], tiles, clusters)
    assert walked(call, list(expected)) == expected


def test_an_order_by_hand() -> None:
    """1000 rows are 4 cluster tiles of 256, 520 columns 3: groups of 3 rows, so the second has the last one."""
    call = ffi_cases.request(batch=2, raster_group=3, raster_along_n=0)
    assert walked(call, ["tiles", "matrix", "group", "rows", "last_rows", "last_group", "across", "rows_shift"]) == {
        "tiles": 24, "matrix": 12, "group": 9, "rows": 3, "last_rows": 1, "last_group": 1, "across": 3,
        "rows_shift": 2,
    }  # fmt: skip
    assert tile_order(4, 3, 3, 0).rows == divisor(3) == Divisor(3, -(-(2**33) // 3), 2)


@pytest.mark.parametrize(("k", "parts", "k_tiles"), [(4096, 4, 16), (4104, 4, 17), (14312, 13, 18), (128, 2, 1)])
def test_parts_of_k_have_as_many_k_tiles_but_the_last(k: int, parts: int, k_tiles: int) -> None:
    """Each begins behind the one before; tiles are those of all parts."""
    call = ffi_cases.request(k=k, batch=parts, a_batch=1, b_batch=1, parts=parts)
    tiles = 4 * 3 * parts
    assert walked(call, ["k_tiles", "tiles"]) == {"k_tiles": k_tiles, "tiles": tiles, "k_step": k_tiles}
    assert (parts - 1) * k_tiles < -(-k // 64) <= parts * k_tiles
    plan = call.plan()
    assert plan.num_cluster_tiles == tiles and list(call.use(plan, "a").map.dims) == [k, 1000, 1]


@given(by=st.integers(1, INT32_MAX), x=st.integers(0, INT32_MAX), times=st.integers(0, INT32_MAX))
def test_a_divisor_divides(by: int, x: int, times: int) -> None:
    made = divisor(by)
    assert made.multiplier < 2**32 and made.shift < 32
    edge = times % (INT32_MAX // by + 1) * by  # where a quotient changes
    for value in {x, edge, max(edge - 1, 0), min(edge + by - 1, INT32_MAX), INT32_MAX}:
        assert made.of(value) == value // by


@pytest.mark.parametrize("by", [1, 2, 3, 7, 2**16 - 1, 2**16, 2**16 + 1, 2**30, 2**30 + 1, INT32_MAX])
def test_a_divisor_at_its_ends(by: int) -> None:
    for value in (0, by - 1, by, by + 1, INT32_MAX - 1, INT32_MAX):
        assert value > INT32_MAX or divisor(by).of(value) == value // by


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("walk:tiles", "`walk:tiles` requires a parameter such as walk:k_step/64, got none"),
        ("walk:columns", "`params` requires texts such as .*, got walk:columns"),
        ("walk:rows_divisor", "`params` requires texts such as .*, got walk:rows_divisor"),
        ("walk:_shift", "`params` requires texts such as .*, got walk:_shift"),
        ("walk:k_step", "`params` requires texts such as .*, got walk:k_step"),
        ("walk:k_step/0", "`params` requires texts such as .*, got walk:k_step/0"),
        ("walk:k_step/64/2", "`params` requires texts such as .*, got walk:k_step/64/2"),
    ],
)
def test_a_walk_that_cannot_be_read(source: str, sentence: str) -> None:
    call = ffi_cases.request()
    end = max(at + size for _, at, size in call.leaves)
    call.leaves.append([source, end, 4])
    with pytest.raises(ValueError, match=sentence):
        call.plan()


@pytest.mark.parametrize(("name", "value"), [("raster_group", 0), ("raster_along_n", 2)])
def test_a_raster_out_of_range(name: str, value: int) -> None:
    call = ffi_cases.request(**{name: value})
    call.leaves = [leaf for leaf in call.leaves if "raster" not in leaf[0]]
    with pytest.raises(ValueError, match=f"`{name}` requires"):
        walked(call, ["tiles"])

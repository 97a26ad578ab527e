"""One legal request, in the words of the launcher, and its variations: shared by the tests of the native library."""

from typing import Any

from jax_bwgemm import ffi
from jax_bwgemm.problem import DTYPE_BYTES

KINDS = ffi.param_kinds() if ffi.status() is None else ()
KIND_SIZES = dict.fromkeys(("tma_a", "tma_b", "tma_c", "tma_r"), 128)
KIND_SIZES |= dict.fromkeys(("c", "a_policy", "b_policy", "workspace", "token", "bias"), 8)  # others: 4
STREAM_K = ("stream_tiles", "stream_clusters", "workspace", "token")
FLAG_BYTES, CLUSTER_BYTES = 4096, 2 * 128 * 256 * 4  # of a workspace; the latter: two CTAs' float32


def lay_out(kinds: tuple[str, ...]) -> tuple[list[tuple[str, int, int]], int]:
    """(kind, offset, size) of the leaves in this order, each on its alignment, and the bytes of all."""
    leaves, end = [], 0
    for kind in kinds:
        size = KIND_SIZES.get(kind, 4)
        offset = -(-end // min(size, 64)) * min(size, 64)
        leaves.append((kind, offset, size))
        end = offset + size
    return leaves, end


def kinds_of(
    has_bias: bool = False, store: str = "tma", has_residual: bool = False, streams: bool = False
) -> tuple[str, ...]:
    """The leaves of a kernel in the library's order."""
    absent = {"c" if store == "tma" else "tma_c"} | (set() if has_bias else {"bias"})
    absent |= set() if has_residual else {"tma_r"}
    absent |= set() if streams else set(STREAM_K)
    return tuple(kind for kind in KINDS if kind not in absent)


def a_shape(batch: int, m: int, k: int, major: str) -> tuple[int, int, int]:
    return (batch, m, k) if major == "k" else (batch, k, m)


def b_shape(batch: int, n: int, k: int, major: str) -> tuple[int, int, int]:
    return (batch, k, n) if major == "n" else (batch, n, k)


def request(
    m: int = 1000,
    n: int = 520,
    k: int = 4096,
    batch: int = 2,
    a_batch: int | None = None,
    b_batch: int | None = None,
    majors: str = "kn",
    dtypes: tuple[str, str, str] = ("bfloat16", "bfloat16", "bfloat16"),
    has_bias: bool = False,
    kinds: tuple[str, ...] | None = None,
    c_major: str = "n",
    store: str = "tma",
    has_residual: bool = False,
    workspace_bytes: int = 0,
    **fields: Any,
) -> ffi.LaunchRequest:
    """A Hopper tile 128x256, clusters of 2x1 that share B: each CTA loads 128 rows of 128 bytes of it. With a workspace
    it is a stream-K."""
    leaves, param_bytes = lay_out(kinds or kinds_of(has_bias, store, has_residual, workspace_bytes > 0))
    out = ffi.Buffer.of(dtypes[2], (batch, m, n) if c_major == "n" else (batch, n, m))
    defaults = dict(cta_m=128, mma_n=256, cluster_m=2, cluster_n=1, cluster_k=1, num_threads=384, smem_bytes=232448)
    made = ffi.LaunchRequest(
        a=ffi.Buffer.of(dtypes[0], a_shape(a_batch or batch, m, k, majors[0])),
        b=ffi.Buffer.of(dtypes[1], b_shape(b_batch or batch, n, k, majors[1])),
        out=out,
        bias=ffi.Buffer.of(dtypes[2], (n if c_major == "n" else m,)) if has_bias else ffi.Buffer.none(),
        residual=out if has_residual else ffi.Buffer.none(),
        workspace=ffi.Buffer.of("uint8", (workspace_bytes,)) if workspace_bytes else ffi.Buffer.none(),
        a_major=ord(majors[0]),
        b_major=ord(majors[1]),
        c_major=ord(c_major),
        **(defaults | fields),
        raster_group=8,
        raster_along_n=1,
        raster_order=1,
        alpha=0.5,
        swizzle_bytes=(128, 128, 128 if store == "tma" else 0),
        swizzle_atom_bytes=(16, 16, 16 if store == "tma" else 0),
        param_bytes=param_bytes,
        num_params=len(leaves),
        max_active_clusters=66,
    )
    for box, dtype, rows in zip(made.box, dtypes, (128, 128, 64), strict=True):
        box[:] = (128 // DTYPE_BYTES[dtype], rows, 1)
    if store != "tma":
        made.box[2][:] = (0, 0, 0)
    for at, (kind, offset, size) in enumerate(leaves):
        made.params[at] = ffi.Param(KINDS.index(kind), offset, size)
    return made

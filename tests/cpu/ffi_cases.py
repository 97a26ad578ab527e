"""One legal request, in the words of the launcher, and its variations: shared by the tests of the native library."""

from typing import Any

from jax_bwgemm import ffi

KINDS = ffi.param_kinds() if ffi.status() is None else ()
KIND_SIZES = {"tma_a": 128, "tma_b": 128, "tma_c": 128, "bias": 8}  # the rest are 4 bytes
DESCRIPTOR_BYTES = 128
NO_BIAS_KINDS = KINDS[:-1]


def lay_out(kinds: tuple[str, ...]) -> tuple[list[tuple[str, int, int]], int]:
    """(kind, offset, size) of the leaves in this order, each on its alignment, and the bytes of all."""
    leaves, end = [], 0
    for kind in kinds:
        size = KIND_SIZES.get(kind, 4)
        offset = -(-end // min(size, 64)) * min(size, 64)
        leaves.append((kind, offset, size))
        end = offset + size
    return leaves, end


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
    **fields: Any,
) -> ffi.LaunchRequest:
    """A Hopper tile 128x256x64, clusters of 2x1 that share B: each CTA loads 64x128 of it."""
    kinds = kinds or (KINDS if has_bias else NO_BIAS_KINDS)
    leaves, param_bytes = lay_out(kinds)
    made = ffi.LaunchRequest(
        a=ffi.Buffer.of(dtypes[0], a_shape(a_batch or batch, m, k, majors[0])),
        b=ffi.Buffer.of(dtypes[1], b_shape(b_batch or batch, n, k, majors[1])),
        out=ffi.Buffer.of(dtypes[2], (batch, m, n)),
        bias=ffi.Buffer.of(dtypes[2], (n,)) if has_bias else ffi.Buffer.none(),
        a_major=ord(majors[0]),
        b_major=ord(majors[1]),
        **(dict(cta_m=128, mma_n=256, cluster_m=2, cluster_n=1, num_threads=384, smem_bytes=232448) | fields),
        raster_group=8,
        raster_along_n=1,
        alpha=0.5,
        swizzle_bytes=(128, 128, 128),
        param_bytes=param_bytes,
        num_params=len(leaves),
        max_active_clusters=66,
    )
    made.box[0][:] = (64, 128, 1)
    made.box[1][:] = (64, 128, 1)
    made.box[2][:] = (32 if dtypes[2] == "float32" else 64, 64, 1)
    for at, (kind, offset, size) in enumerate(leaves):
        made.params[at] = ffi.Param(KINDS.index(kind), offset, size)
    return made

"""A tile, the facts that follow from it, and THE legality rule `why_not`. States no preference: that is `plan`."""

from __future__ import annotations

import dataclasses
import re

from jax_bwgemm.arch import Arch, family
from jax_bwgemm.problem import A_MAJORS, B_MAJORS, DTYPE_BYTES, Problem

SWIZZLE_BYTES = 128  # one row of an operand box; TMA and the tensor cores agree on the 128-byte swizzle
STORE_SWIZZLE_BYTES = 64  # one row of a store box: narrow boxes, so that several stores are in flight in 32 KiB
TMA_ALIGN_BYTES = 16  # of addresses and row pitches, CUDA driver API, cuTensorMapEncodeTiled
BARRIER_BYTES = 1024  # mbarriers and the TMEM address, padded so that the first stage starts on a swizzle atom
EPILOGUE_STAGES = 4
ACC_STAGES = 2  # TMEM accumulators of a Blackwell CTA: the epilogue of one overlaps the main loop of the other
MAX_CLUSTER_CTAS = 8  # the portable cluster size, CUDA C++ programming guide, thread block clusters
INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Tile:
    """`mma_m` x `mma_n`: what one tcgen05.mma covers, or the wgmmas of all consumer warpgroups of a CTA.

    `cta_group` 2 spreads it over a CTA pair, each half holding `cta_m` rows of A and of the result and `load_n`
    columns of B. `k_tile` is in elements; the cluster in CTAs.
    """

    mma_m: int
    mma_n: int
    k_tile: int = 64
    cta_group: int = 1
    cluster_m: int = 1
    cluster_n: int = 1

    @property
    def cta_m(self) -> int:
        return self.mma_m // self.cta_group

    @property
    def load_n(self) -> int:
        return self.mma_n // self.cta_group

    @property
    def num_consumer_warpgroups(self) -> int:
        """Hopper only: each takes mma_m / this rows; one warpgroup's registers hold 64x256 or 128x128 of float32."""
        return min(2, self.mma_m // 64)

    def __str__(self) -> str:
        shape = f"{self.mma_m}x{self.mma_n}x{self.k_tile}"
        return f"{shape}_cta{self.cta_group}_cluster{self.cluster_m}x{self.cluster_n}"

    @classmethod
    def from_str(cls, text: str) -> Tile:
        """The inverse of `str`: `Tile.from_str("128x256x64_cta1_cluster2x1")`."""
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)_cta(\d+)_cluster(\d+)x(\d+)", text)
        if match is None:
            raise ValueError(f"`tile` requires the form '128x256x64_cta1_cluster2x1', got {text!r}")
        return cls(*map(int, match.groups()))


SHIPPED_TILES = {
    "hopper": (
        Tile(128, 256, cluster_m=2),
        Tile(128, 256),
        Tile(128, 192, cluster_m=2),
        Tile(256, 128, cluster_n=2),
        Tile(256, 128),
        Tile(128, 128, cluster_m=2),
        Tile(128, 128),
        Tile(64, 256),
        Tile(64, 128),
    ),
    "blackwell": (
        Tile(256, 256, cta_group=2, cluster_m=2),
        Tile(256, 128, cta_group=2, cluster_m=2),
        Tile(128, 256),
        Tile(128, 128),
    ),
}  # what the catalogue compiles and the planner chooses from, per `arch.family`


def num_threads(tile: Tile, target: str) -> int:
    """Hopper: a producer warpgroup and the consumers. Blackwell: 4 epilogue warps, 1 MMA warp, 1 load warp."""
    return 128 * (1 + tile.num_consumer_warpgroups) if family(target) == "hopper" else 192


def store_box(tile: Tile, out_dtype: str, target: str) -> tuple[int, int]:
    """(columns, rows) of one TMA store: a swizzle span wide; 64 rows a Hopper warpgroup, cta_m a Blackwell CTA."""
    rows = 64 if family(target) == "hopper" else tile.cta_m
    return STORE_SWIZZLE_BYTES // DTYPE_BYTES[out_dtype], rows


def load_box(tile: Tile, operand: str, major: str, in_bytes: int) -> tuple[int, int]:
    """(contiguous, other) elements of one TMA load of operand "a" or "b"; CTAs that share it each load a part.

    k-major: a swizzle span of k by the CTA's rows; else a span of rows (several boxes a stage) by the stage's k.
    """
    rows = tile.cta_m if operand == "a" else tile.load_n
    sharing = tile.cluster_n if operand == "a" else tile.cluster_m // tile.cta_group
    return SWIZZLE_BYTES // in_bytes, (rows if major == "k" else tile.k_tile) // sharing


def stage_bytes(tile: Tile, in_bytes: int) -> int:
    """Shared memory of one pipeline stage of one CTA: its part of A and of B."""
    return (tile.cta_m + tile.load_n) * tile.k_tile * in_bytes


def epilogue_bytes(tile: Tile) -> int:
    """Store buffers of a CTA: EPILOGUE_STAGES boxes for every group of warps that stores on its own."""
    return EPILOGUE_STAGES * min(tile.cta_m, 128) * STORE_SWIZZLE_BYTES


def num_stages(tile: Tile, in_bytes: int, smem_limit_bytes: int) -> int:
    """As many stages as shared memory allows beside the barriers and the store buffers."""
    return (smem_limit_bytes - BARRIER_BYTES - epilogue_bytes(tile)) // stage_bytes(tile, in_bytes)


def smem_bytes(tile: Tile, in_bytes: int, smem_limit_bytes: int) -> int:
    """Dynamic shared memory of a launch."""
    stages = num_stages(tile, in_bytes, smem_limit_bytes)
    return BARRIER_BYTES + stages * stage_bytes(tile, in_bytes) + epilogue_bytes(tile)


def tmem_cols(tile: Tile) -> int:
    """TMEM columns that a Blackwell CTA allocates: a power of two of at least 32 (PTX ISA, tcgen05.alloc)."""
    cols = ACC_STAGES * (tile.load_n if tile.mma_m == 128 and tile.cta_group == 2 else tile.mma_n)
    return max(32, 1 << (cols - 1).bit_length())


def why_not(tile: Tile, problem: Problem, arch: Arch) -> str | None:
    """None if `tile` can compute `problem` on `arch`, else one sentence that names the rule and the value."""
    return why_not_dtypes(problem) or why_not_tile(tile, problem.a_dtype, arch) or why_not_sizes(problem)


def why_not_tile(tile: Tile, in_dtype: str, arch: Arch) -> str | None:
    """The part of `why_not` that no problem size enters: what the build asks."""
    in_bytes = DTYPE_BYTES[in_dtype]
    ctas = tile.cluster_m * tile.cluster_n
    if tile.k_tile * in_bytes != SWIZZLE_BYTES:
        return f"`k_tile` requires {SWIZZLE_BYTES // in_bytes} elements ({SWIZZLE_BYTES} bytes), got {tile.k_tile}"
    if (
        not (1 <= ctas <= MAX_CLUSTER_CTAS)
        or tile.cluster_m & (tile.cluster_m - 1)
        or tile.cluster_n & (tile.cluster_n - 1)
    ):
        return (
            f"a cluster requires powers of two and at most {MAX_CLUSTER_CTAS} CTAs, "
            f"got {tile.cluster_m}x{tile.cluster_n}"
        )
    reason = _why_not_hopper(tile) if family(arch.target) == "hopper" else _why_not_blackwell(tile, arch)
    if reason:
        return reason
    stages = num_stages(tile, in_bytes, arch.smem_bytes)
    if stages < 3:
        return f"a pipeline requires 3 stages in {arch.smem_bytes} bytes of shared memory, got {max(stages, 0)}"
    return None


def _why_not_hopper(tile: Tile) -> str | None:
    if tile.cta_group != 1:
        return f"`cta_group` requires 1 on sm_90a (CTA pairs came with Blackwell), got {tile.cta_group}"
    if tile.mma_m not in (64, 128, 256):
        return f"`mma_m` requires 64, 128 or 256 on sm_90a, got {tile.mma_m}"
    if tile.mma_n % 64 or not 64 <= tile.mma_n <= 256:
        return f"`mma_n` requires a multiple of 64 in 64..256 on sm_90a, got {tile.mma_n}"
    regs = tile.mma_m * tile.mma_n // (128 * tile.num_consumer_warpgroups)
    if regs > 128:
        return f"an accumulator requires at most 128 registers a thread, got {regs} for {tile.mma_m}x{tile.mma_n}"
    return None


def _why_not_blackwell(tile: Tile, arch: Arch) -> str | None:
    if tile.cta_group not in (1, 2):
        return f"`cta_group` requires 1 or 2, got {tile.cta_group}"
    legal_m = (128,) if tile.cta_group == 1 else (256,)
    if tile.mma_m not in legal_m:
        return f"`mma_m` requires {legal_m[0]} for cta_group {tile.cta_group}, got {tile.mma_m}"
    step = 64 * tile.cta_group  # a CTA loads whole swizzle spans of an n-major B
    if tile.mma_n % step or not step <= tile.mma_n <= 256:
        return f"`mma_n` requires a multiple of {step} in {step}..256 for cta_group {tile.cta_group}, got {tile.mma_n}"
    if tile.cluster_m % tile.cta_group:
        return f"`cluster_m` requires a multiple of cta_group {tile.cta_group}, got {tile.cluster_m}"
    cols = tmem_cols(tile)
    if cols > arch.tmem_cols:
        return f"accumulators require at most {arch.tmem_cols} TMEM columns, got {cols}"
    return None


def why_not_dtypes(problem: Problem) -> str | None:
    """The part of `why_not` that neither sizes nor a tile enter: what is asked before a product is traced."""
    if problem.a_dtype != problem.b_dtype or problem.a_dtype not in ("bfloat16", "float16"):
        return f"operands require bfloat16 or float16, both the same, got {problem.a_dtype} and {problem.b_dtype}"
    if problem.out_dtype not in DTYPE_BYTES:
        return f"the result requires bfloat16, float16 or float32, got {problem.out_dtype}"
    if problem.a_major not in A_MAJORS or problem.b_major not in B_MAJORS:
        return f"majors require a in {A_MAJORS} and b in {B_MAJORS}, got {problem.a_major!r} and {problem.b_major!r}"
    return None


def why_not_sizes(problem: Problem) -> str | None:
    """The part of `why_not` that neither the tile nor the device enters: what TMA can address, given the majors."""
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k, "batch": problem.batch}
    for name, size in sizes.items():
        if not 1 <= size <= INT32_MAX:
            return f"`{name}` requires 1..{INT32_MAX}, got {size}"
    in_bytes = DTYPE_BYTES[problem.a_dtype]
    pitches = {
        "a": sizes[problem.a_major] * in_bytes,
        "b": sizes[problem.b_major] * in_bytes,
        "the result": problem.n * DTYPE_BYTES[problem.out_dtype],
    }
    for name, pitch in pitches.items():
        if pitch % TMA_ALIGN_BYTES:
            rule = f"a row pitch that is a multiple of {TMA_ALIGN_BYTES} bytes"
            return f"TMA requires {rule}, got {pitch} bytes for {name}"
    return None

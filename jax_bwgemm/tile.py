"""A tile, and the facts that follow from it. Judges none: what is legal is `legality`'s, what is best `plan`'s."""

from __future__ import annotations

import dataclasses
import re

from jax_bwgemm.arch import Arch, family
from jax_bwgemm.problem import DTYPE_BYTES, Problem

SWIZZLE_BYTES = 128  # the k extent of a stage; a k-major operand's rows are exactly one swizzle span
SEGMENT_BYTES = 512  # of a row that a warp of threads stores at once: 16 bytes a lane
STORE_SPAN_BYTES = 64  # one row of a store box: narrow boxes, so that several stores are in flight in 32 KiB
TMA_ALIGN_BYTES = 16  # of addresses and row pitches, CUDA driver API, cuTensorMapEncodeTiled
BARRIER_BYTES = 1024  # mbarriers and the TMEM address, padded so that the first stage starts on a swizzle atom
EPILOGUE_STAGES = 4
RESIDUAL_BUFFERS = 8  # of a Hopper warpgroup, at most: all boxes of a 64x256 or 128x128 tile of 2 bytes
FLAG_BYTES = 4096  # at the front of a workspace: 8 bytes for each CTA and store group
MAX_CLUSTER_CTAS = 16  # H100 and B200; above 8 the kernel must opt in, CUDA C++ programming guide, clusters
TMEM_LANES = 128
FEW = 64  # rows or columns: no MMA has fewer rows, so up to here they are padding, while columns come in steps of 16
HELD_REGISTERS = 192  # of a Hopper consumer's 240, for its sums and a rounded result: no variant spills
INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Tile:
    """`mma_m` x `mma_n`: what one tcgen05.mma covers, or the wgmmas that one CTA runs side by side.

    `cta_group` 2 spreads it over a CTA pair, each half holding half the rows of A and of the result and `load_n`
    columns of B. `num_accs` MMA tiles lie along m and share each stage of B. `k_tile` is in elements; the cluster in
    CTAs, of which `cluster_k` divide k among themselves and add their parts up. `pingpong` (Hopper): two warpgroups,
    each with a tile of its own, take turns at the tensor cores. `stream_k` (Hopper): the last tiles
    are divided along k between clusters, which meet in a workspace in global memory. `promoted` (Hopper, float8): the
    sums of each stage are added to others in float32 registers.
    """

    mma_m: int
    mma_n: int
    k_tile: int = 64
    cta_group: int = 1
    cluster_m: int = 1
    cluster_n: int = 1
    cluster_k: int = 1
    num_accs: int = 1
    pingpong: bool = False
    stream_k: bool = False
    promoted: bool = False

    @property
    def cta_m(self) -> int:
        """Rows of A and of the result that a CTA holds."""
        return self.num_accs * self.mma_m // self.cta_group

    @property
    def load_n(self) -> int:
        """Columns of B that a CTA holds."""
        return self.mma_n // self.cta_group

    @property
    def cluster_ctas(self) -> int:
        return self.cluster_m * self.cluster_n * self.cluster_k

    @property
    def num_consumer_warpgroups(self) -> int:
        """Hopper only: each takes mma_m / this rows, or in a ping-pong the whole tile; its registers hold 64x256 or
        128x128 of float32."""
        return 2 if self.pingpong else min(2, self.mma_m // 64)

    def __str__(self) -> str:
        accs = f"_acc{self.num_accs}" if self.num_accs > 1 else ""
        cluster = f"cluster{self.cluster_m}x{self.cluster_n}" + (f"x{self.cluster_k}" if self.cluster_k > 1 else "")
        ways = ("_pingpong" if self.pingpong else "") + ("_streamk" if self.stream_k else "")
        ways += "_promoted" if self.promoted else ""
        return f"{self.mma_m}x{self.mma_n}x{self.k_tile}{accs}_cta{self.cta_group}_{cluster}{ways}"

    @classmethod
    def from_str(cls, text: str) -> Tile:
        """The inverse of `str`: `Tile.from_str("128x256x64_cta1_cluster2x1")`."""
        pattern = (
            r"(\d+)x(\d+)x(\d+)(?:_acc(\d+))?_cta(\d+)_cluster(\d+)x(\d+)(?:x(\d+))?(_pingpong)?(_streamk)?(_promoted)?"
        )
        match = re.fullmatch(pattern, text)
        if match is None:
            raise ValueError(f"`tile` requires the form '128x256x64_cta1_cluster2x1', got {text!r}")
        mma_m, mma_n, k_tile, accs, cta_group, cluster_m, cluster_n, cluster_k = (
            int(x or 1) for x in match.groups()[:8]
        )
        return cls(
            mma_m, mma_n, k_tile, cta_group, cluster_m, cluster_n, cluster_k, accs, *map(bool, match.groups()[8:])
        )


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
        Tile(128, 256, cluster_m=4),
        Tile(128, 256, cluster_m=2, cluster_n=2),
        Tile(128, 128, cluster_m=2, pingpong=True),
        Tile(128, 256, cluster_k=2),
        Tile(128, 256, cluster_k=4),
        Tile(128, 128, cluster_k=2),
        Tile(128, 128, cluster_k=4),
        Tile(64, 128, cluster_k=2),
        Tile(128, 256, cluster_m=2, stream_k=True),
        Tile(128, 256, stream_k=True),
        Tile(128, 128, cluster_m=2, stream_k=True),
        Tile(128, 192, cluster_m=2, stream_k=True),
        Tile(128, 96, cluster_m=2),
        Tile(128, 96),
        Tile(128, 96, cluster_m=2, pingpong=True),
        Tile(128, 64),
        Tile(64, 64),
        Tile(64, 64, stream_k=True),
        Tile(128, 128, cluster_m=2, promoted=True),
        Tile(128, 128, promoted=True),
    ),
    "blackwell": (
        Tile(256, 256, cta_group=2, cluster_m=2),
        Tile(256, 256, cta_group=2, cluster_m=2, num_accs=2),
        Tile(256, 192, cta_group=2, cluster_m=2),
        Tile(256, 128, cta_group=2, cluster_m=2),
        Tile(128, 128, cta_group=2, cluster_m=2),
        Tile(128, 256),
        Tile(128, 128),
        Tile(128, 64),
        Tile(64, 128),
        Tile(256, 128, cta_group=2, cluster_m=2, cluster_k=4),
        Tile(128, 128, cluster_k=4),
        Tile(128, 64, cluster_k=8),
    ),
}  # what the planner chooses from and the catalogue compiles, per `arch.family`, for 2-byte operands
NARROW_TILES = {
    "hopper": (
        Tile(128, 16),
        Tile(128, 32),
        Tile(128, 64),
        Tile(64, 16),
        Tile(256, 16),
        Tile(256, 32),
        Tile(256, 64),
        Tile(64, 16, stream_k=True),
        Tile(64, 32, stream_k=True),
        Tile(64, 64, stream_k=True),
        Tile(128, 16, stream_k=True),
        Tile(128, 32, stream_k=True),
        Tile(128, 64, stream_k=True),
        Tile(64, 16, cluster_k=2),
        Tile(64, 16, cluster_k=4),
        Tile(64, 32, cluster_k=2),
        Tile(64, 32, cluster_k=4),
        Tile(64, 64, cluster_k=2),
    ),
    "blackwell": (
        Tile(128, 16),
        Tile(128, 32),
        Tile(128, 64),
        Tile(128, 16, cluster_k=4),
        Tile(128, 32, cluster_k=4),
        Tile(128, 64, cluster_k=4),
    ),
}  # the same where n is narrow: of few columns, or of the transposed product of few rows


def k_tile(in_dtype: str) -> int:
    """Elements of k in one stage: SWIZZLE_BYTES of them."""
    return SWIZZLE_BYTES // DTYPE_BYTES[in_dtype]


def num_threads(tile: Tile, target: str, has_residual: bool = False) -> int:
    """Hopper: a producer warpgroup and the consumers. Blackwell: 4 epilogue warps, 1 MMA warp, 1 load warp, and one
    that loads the residual."""
    if family(target) == "hopper":
        return 128 * (1 + tile.num_consumer_warpgroups)
    return 224 if has_residual else 192


def store_groups(tile: Tile, target: str) -> int:
    """Groups of warps that store on their own: Hopper's consumer warpgroups; a Blackwell CTA's four warps, but two and
    two where a pair of 64-row CTAs keeps the columns' halves in different TMEM lanes (PTX ISA, tcgen05 layout B)."""
    if family(target) == "hopper":
        return tile.num_consumer_warpgroups
    return 2 if tile.cta_group == 2 and tile.mma_m == 128 else 1


def store_rows(tile: Tile, target: str) -> int:
    """Rows of a store box: a warpgroup's wgmma, or a Blackwell CTA's part of one MMA tile."""
    return 64 if family(target) == "hopper" else tile.mma_m // tile.cta_group


def store_cols(tile: Tile, out_dtype: str, target: str) -> int:
    """Columns of a store box: STORE_SPAN_BYTES, or fewer where they do not divide the columns of a store group; 16 or
    32 bytes' in a split along k, whose CTAs share the boxes out among themselves."""
    halves = store_groups(tile, target) if family(target) == "blackwell" else 1
    out_bytes = DTYPE_BYTES[out_dtype]
    widest = STORE_SPAN_BYTES if tile.cluster_k == 1 else max(32, 16 * out_bytes)
    return _span_bytes(tile.mma_n // halves * out_bytes, widest) // out_bytes


def store_box(tile: Tile, out_dtype: str, c_major: str, target: str) -> tuple[int, int]:
    """(contiguous, other) elements of one TMA store: store_cols by store_rows, or a span of rows by store_cols."""
    rows, cols = store_rows(tile, target), store_cols(tile, out_dtype, target)
    if c_major == "n":
        return cols, rows
    return _span_bytes(rows * DTYPE_BYTES[out_dtype], SWIZZLE_BYTES) // DTYPE_BYTES[out_dtype], cols


def warpgroup_slabs(tile: Tile) -> int:
    """Hopper: slabs of 64 rows that a consumer warpgroup has of a tile; in a ping-pong all."""
    return tile.cta_m // (64 * (1 if tile.pingpong else tile.num_consumer_warpgroups))


def store_boxes(tile: Tile, out_dtype: str) -> int:
    """Hopper: boxes of a tile that a warpgroup stores by TMA."""
    return warpgroup_slabs(tile) * (tile.mma_n // store_cols(tile, out_dtype, "sm_90a"))


def store_buffers(tile: Tile, out_dtype: str, target: str, has_residual: bool = False) -> int:
    """Store buffers of each store group. Hopper's take a residual's boxes first, for a whole tile ahead or for as large
    a part of it as divides it."""
    if family(target) == "blackwell" or not has_residual:
        return EPILOGUE_STAGES
    boxes = store_boxes(tile, out_dtype)
    return max(count for count in range(1, RESIDUAL_BUFFERS + 1) if boxes % count == 0)


def defers_store(
    tile: Tile, out_dtype: str, store: str, target: str, a_in_registers: bool = False, has_residual: bool = False
) -> bool:
    """Hopper: whether a tile's rounded result stays in registers and leaves during the next tile's main loop, beside
    its wgmmas. A ping-pong's other warpgroup multiplies meanwhile, and a split along k stores through the stages.
    Threads that store would keep the wgmmas waiting (tried: slower). An A in registers takes some of them: one slab's
    16 find room beside any held result. With a residual, the store buffers hold the result."""
    if family(target) != "hopper" or store != "tma" or tile.pingpong or tile.cluster_k > 1 or has_residual:
        return False
    sums = tile.cta_m * tile.mma_n // (128 * tile.num_consumer_warpgroups)
    more_slabs = warpgroup_slabs(tile) - 1
    fragments = 16 * more_slabs if a_in_registers else 0
    return sums * (2 if tile.promoted else 1) + sums * DTYPE_BYTES[out_dtype] // 4 + fragments <= HELD_REGISTERS


def segments(tile: Tile, out_dtype: str, target: str) -> tuple[int, int]:
    """(rows, columns) that a warp stores at a time where TMA cannot step over an n-major result's rows. Rows: 16 or 8,
    what its share of the store buffers holds; columns: at most SEGMENT_BYTES and 128 accumulators a thread, or in a
    split along k a store box's."""
    groups, rows = store_groups(tile, target), store_rows(tile, target)
    warps = 4 if family(target) == "hopper" else 4 // groups  # of a group
    out_bytes, box_cols = DTYPE_BYTES[out_dtype], store_cols(tile, out_dtype, target)
    share = EPILOGUE_STAGES * rows * box_cols * out_bytes // warps
    cols = box_cols
    if tile.cluster_k == 1:
        extent = tile.mma_n if family(target) == "hopper" else tile.mma_n // groups
        widest = min(SEGMENT_BYTES, share // 8, 128 * 32 * warps // rows * out_bytes)
        cols = _span_bytes(extent * out_bytes, widest) // out_bytes
    return (16 if 16 * cols * out_bytes <= share else 8), cols


def load_box(tile: Tile, operand: str, major: str, in_dtype: str) -> tuple[int, int]:
    """(contiguous, other) elements of one TMA load of operand "a" or "b"; CTAs that share it each load a part.

    k-major: a swizzle span of k by as many rows as lie together (those of the other half of a pair lie between its MMA
    tiles); else a span of rows (several boxes a stage) by the stage's k.
    """
    a_rows = tile.cta_m if tile.cta_group == 1 else tile.mma_m // 2
    rows = a_rows if operand == "a" else tile.load_n
    sharing = sharing_ctas(tile, operand)
    if major == "k":
        return SWIZZLE_BYTES // DTYPE_BYTES[in_dtype], rows // sharing
    return _span_bytes(rows * DTYPE_BYTES[in_dtype], SWIZZLE_BYTES) // DTYPE_BYTES[in_dtype], tile.k_tile // sharing


def sharing_ctas(tile: Tile, operand: str) -> int:
    """CTAs that one multicast load of "a" or "b" serves: those along n, or those of the same half along m."""
    return tile.cluster_n if operand == "a" else tile.cluster_m // tile.cta_group


def reads_a_from_registers(in_dtype: str, a_major: str, target: str) -> bool:
    """Hopper: whether threads pick A's fragments out of shared memory, whence wgmma reads only 2 bytes m-major."""
    return family(target) == "hopper" and DTYPE_BYTES[in_dtype] != 2 and a_major == "m"


def swizzle_atom_bytes(in_dtype: str, major: str, target: str) -> int:
    """What a swizzle moves as a whole: 16 bytes, but 32 for Blackwell's TF32 whose rows are contiguous (PTX ISA,
    tcgen05 shared memory layout, 128-byte swizzle with 32-byte atomicity)."""
    return 32 if family(target) == "blackwell" and in_dtype == "float32" and major != "k" else 16


def _span_bytes(extent_bytes: int, widest: int) -> int:
    """The widest power of two of at most `widest` bytes that divides `extent_bytes`, 16 if none does: of up to 128, the
    swizzle spans (16: no swizzle)."""
    spans = (512, 256, 128, 64, 32, 16)
    return next(span for span in spans if span <= widest and (extent_bytes % span == 0 or span == 16))


def stage_bytes(tile: Tile, in_dtype: str) -> int:
    """Shared memory of one pipeline stage of one CTA: its part of A and of B."""
    return (tile.cta_m + tile.load_n) * tile.k_tile * DTYPE_BYTES[in_dtype]


def store_box_bytes(tile: Tile, out_dtype: str, target: str) -> int:
    """One store buffer of all store groups of a CTA."""
    rows = store_groups(tile, target) * store_rows(tile, target)
    return rows * store_cols(tile, out_dtype, target) * DTYPE_BYTES[out_dtype]


def epilogue_bytes(tile: Tile, out_dtype: str, target: str, has_residual: bool = False) -> int:
    """Store buffers of a CTA and, on Blackwell, of the same number and size those into which a residual is loaded."""
    copies = 1 + (has_residual and family(target) == "blackwell")
    return store_buffers(tile, out_dtype, target, has_residual) * store_box_bytes(tile, out_dtype, target) * copies


def workspace_bytes(tile: Tile, num_clusters: int) -> int:
    """Global memory beside the operands: flags and a float32 accumulator for each CTA, where clusters share tiles."""
    return FLAG_BYTES + 4 * tile.cta_m * tile.mma_n * tile.cluster_ctas * num_clusters if tile.stream_k else 0


def num_stages(tile: Tile, in_dtype: str, out_dtype: str, arch: Arch, has_residual: bool = False) -> int:
    """As many stages as shared memory allows beside the barriers and the epilogue's buffers."""
    free = arch.smem_bytes - BARRIER_BYTES - epilogue_bytes(tile, out_dtype, arch.target, has_residual)
    return free // stage_bytes(tile, in_dtype)


def smem_bytes(tile: Tile, in_dtype: str, out_dtype: str, arch: Arch, has_residual: bool = False) -> int:
    """Dynamic shared memory of a launch."""
    stages = num_stages(tile, in_dtype, out_dtype, arch, has_residual) * stage_bytes(tile, in_dtype)
    return BARRIER_BYTES + stages + epilogue_bytes(tile, out_dtype, arch.target, has_residual)


def acc_cols(tile: Tile) -> int:
    """TMEM columns of one accumulator of a Blackwell CTA (all `num_accs` MMA tiles of it)."""
    return tile.num_accs * (tile.load_n if tile.mma_m == 128 and tile.cta_group == 2 else tile.mma_n)


def acc_stages(tile: Tile, tmem_cols: int = 512) -> int:
    """2 where TMEM holds two accumulators: the epilogue of one then overlaps the main loop of the other."""
    return 2 if 2 * acc_cols(tile) <= tmem_cols else 1


def tmem_cols(tile: Tile) -> int:
    """TMEM columns that a Blackwell CTA allocates: a power of two of at least 32 (PTX ISA, tcgen05.alloc)."""
    return max(32, 1 << (acc_stages(tile) * acc_cols(tile) - 1).bit_length())


def is_tma_storable(problem: Problem) -> bool:
    """Whether TMA can step over the result's rows."""
    contiguous = problem.n if problem.c_major == "n" else problem.m
    return contiguous * DTYPE_BYTES[problem.out_dtype] % TMA_ALIGN_BYTES == 0

"""A tile, the facts that follow from it, and THE legality rule `why_not`. States no preference: that is `plan`."""

from __future__ import annotations

import dataclasses
import math
import re

from jax_bwgemm.arch import Arch, family
from jax_bwgemm.problem import A_MAJORS, B_MAJORS, C_MAJORS, DTYPE_BYTES, FP8_DTYPES, INT8_DTYPES, Problem

SWIZZLE_BYTES = 128  # the k extent of a stage; a k-major operand's rows are exactly one swizzle span
SEGMENT_BYTES = 512  # of a row that a warp of threads stores at once: 16 bytes a lane
STORE_SPAN_BYTES = 64  # one row of a store box: narrow boxes, so that several stores are in flight in 32 KiB
TMA_ALIGN_BYTES = 16  # of addresses and row pitches, CUDA driver API, cuTensorMapEncodeTiled
BARRIER_BYTES = 1024  # mbarriers and the TMEM address, padded so that the first stage starts on a swizzle atom
EPILOGUE_STAGES = 4
FLAG_BYTES = 4096  # at the front of a workspace: 8 bytes for each CTA and store group
MAX_CLUSTER_CTAS = 16  # H100 and B200; above 8 the kernel must opt in, CUDA C++ programming guide, clusters
TMEM_LANES = 128
HELD_REGISTERS = 192  # of a Hopper consumer's 240, for its sums and a rounded result: no variant spills
INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Tile:
    """`mma_m` x `mma_n`: what one tcgen05.mma covers, or the wgmmas that one CTA runs side by side.

    `cta_group` 2 spreads it over a CTA pair, each half holding half the rows of A and of the result and `load_n`
    columns of B. `num_accs` MMA tiles lie along m and share each stage of B. `k_tile` is in elements; the cluster in
    CTAs, of which `cluster_k` divide k among themselves and add their parts up. `pingpong` (Hopper): two warpgroups,
    each with a tile of its own, take turns at the tensor cores. `split_tail` (Hopper): the tiles that fill no whole
    wave of clusters are divided along k between all of them, which meet in a workspace in global memory. `promoted`
    (Hopper, float8): the sums of each stage are added to others in float32 registers.
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
    split_tail: bool = False
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
        ways = ("_pingpong" if self.pingpong else "") + ("_tail" if self.split_tail else "")
        ways += "_promoted" if self.promoted else ""
        return f"{self.mma_m}x{self.mma_n}x{self.k_tile}{accs}_cta{self.cta_group}_{cluster}{ways}"

    @classmethod
    def from_str(cls, text: str) -> Tile:
        """The inverse of `str`: `Tile.from_str("128x256x64_cta1_cluster2x1")`."""
        pattern = (
            r"(\d+)x(\d+)x(\d+)(?:_acc(\d+))?_cta(\d+)_cluster(\d+)x(\d+)(?:x(\d+))?(_pingpong)?(_tail)?(_promoted)?"
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
        Tile(128, 128, cluster_m=2, pingpong=True),
        Tile(128, 256, cluster_k=2),
        Tile(128, 256, cluster_k=4),
        Tile(128, 128, cluster_k=2),
        Tile(128, 128, cluster_k=4),
        Tile(64, 128, cluster_k=2),
        Tile(128, 256, cluster_m=2, split_tail=True),
        Tile(128, 256, split_tail=True),
        Tile(128, 128, cluster_m=2, split_tail=True),
        Tile(128, 96, cluster_m=2),
        Tile(128, 96),
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
        Tile(128, 16, cluster_k=2),
        Tile(64, 32, cluster_k=4),
        Tile(64, 16, cluster_k=4),
        Tile(128, 64, cluster_k=2),
        Tile(128, 64, cluster_k=4),
    ),
    "blackwell": (
        Tile(128, 16),
        Tile(128, 32),
        Tile(128, 64),
        Tile(128, 16, cluster_k=4),
        Tile(128, 32, cluster_k=4),
        Tile(128, 64, cluster_k=4),
    ),
}  # the same for the transposed product of few rows, whose n is narrow


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


def defers_store(tile: Tile, out_dtype: str, store: str, target: str) -> bool:
    """Hopper: whether a tile's rounded result stays in registers and leaves during the next tile's main loop, beside
    its wgmmas. A ping-pong's other warpgroup multiplies meanwhile, and a split along k stores through the stages."""
    if family(target) != "hopper" or store != "tma" or tile.pingpong or tile.cluster_k > 1:
        return False
    sums = tile.cta_m * tile.mma_n // (128 * tile.num_consumer_warpgroups)
    return sums * (2 if tile.promoted else 1) + sums * DTYPE_BYTES[out_dtype] // 4 <= HELD_REGISTERS


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


def swizzle_atom_bytes(in_dtype: str, major: str) -> int:
    """What a swizzle moves as a whole: 16 bytes, but 32 for TF32 whose rows are contiguous (PTX ISA, tcgen05 shared
    memory layout, 128-byte swizzle with 32-byte atomicity)."""
    return 32 if in_dtype == "float32" and major != "k" else 16


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
    """Store buffers of a CTA and, of the same number and size, those into which a residual is loaded."""
    return EPILOGUE_STAGES * store_box_bytes(tile, out_dtype, target) * (1 + has_residual)


def workspace_bytes(tile: Tile, num_clusters: int) -> int:
    """Global memory beside the operands: flags and a float32 accumulator for each CTA, where the tail is split."""
    return FLAG_BYTES + 4 * tile.cta_m * tile.mma_n * tile.cluster_ctas * num_clusters if tile.split_tail else 0


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


def padding(problem: Problem, operand: str) -> int:
    """Elements by which the contiguous dimension of operand "a" or "b" must grow before TMA can step over its rows."""
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k}
    major, dtype = (problem.a_major, problem.a_dtype) if operand == "a" else (problem.b_major, problem.b_dtype)
    return -sizes[major] % (TMA_ALIGN_BYTES // DTYPE_BYTES[dtype])


def why_not(tile: Tile, problem: Problem, arch: Arch) -> str | None:
    """None if `tile` can compute `problem` on `arch`, else one sentence that names the rule and the value."""
    return (
        why_not_dtypes(problem)
        or why_not_on(problem, arch)
        or why_not_tile(tile, problem, arch)
        or why_not_sizes(problem)
    )


def why_not_dtypes(problem: Problem) -> str | None:
    """The part of `why_not` that neither sizes nor a tile nor a device enter: what is asked before tracing."""
    a, b, out = problem.a_dtype, problem.b_dtype, problem.out_dtype
    legal_out: tuple[str, ...] = ("bfloat16", "float16", "float32", *FP8_DTYPES)
    if {a, b} <= set(INT8_DTYPES):
        legal_out = ("int32",)
        if problem.epilogue.kind != "identity":
            return f"integer operands require no epilogue, got {problem.epilogue.kind}"
    elif not {a, b} <= set(FP8_DTYPES) and (a != b or a not in ("bfloat16", "float16", "float32")):
        return (
            "operands require two of float8_e4m3fn and float8_e5m2, two of int8 and uint8, or bfloat16, float16 or "
            f"float32, both the same, got {a} and {b}"
        )
    if out not in legal_out:
        return f"the result of {a} and {b} requires {' or '.join(legal_out)}, got {out}"
    majors = problem.a_major, problem.b_major, problem.c_major
    if majors[0] not in A_MAJORS or majors[1] not in B_MAJORS or majors[2] not in C_MAJORS:
        rule = f"a in {A_MAJORS}, b in {B_MAJORS} and the result in {C_MAJORS}"
        return f"majors require {rule}, got {majors[0]!r}, {majors[1]!r} and {majors[2]!r}"
    if problem.c_major == "m" and problem.epilogue.has_bias:
        return "a bias requires an n-major result, got c_major 'm'"
    return None


def why_not_on(problem: Problem, arch: Arch) -> str | None:
    """The part of `why_not` in which the device meets dtypes and majors, but no tile and no size."""
    dtype = problem.a_dtype
    if arch.flops_per_clk(dtype) == 0:
        return f"{arch.target} has no tensor core instruction for {dtype}"
    majors = problem.a_major, problem.b_major
    if family(arch.target) == "hopper" and DTYPE_BYTES[dtype] != 2 and majors != ("k", "k"):
        rule = f"both operands k-major for {dtype} (PTX ISA, wgmma.mma_async)"
        return f"sm_90a requires {rule}, got {majors[0]!r} and {majors[1]!r}"
    return None


def why_not_tile(tile: Tile, problem: Problem, arch: Arch) -> str | None:
    """The part of `why_not` that no size enters."""
    in_bytes, out_bytes = DTYPE_BYTES[problem.a_dtype], DTYPE_BYTES[problem.out_dtype]
    if tile.k_tile * in_bytes != SWIZZLE_BYTES:
        return f"`k_tile` requires {SWIZZLE_BYTES // in_bytes} elements ({SWIZZLE_BYTES} bytes), got {tile.k_tile}"
    reason = _why_not_cluster(tile) or (
        _why_not_hopper(tile) if family(arch.target) == "hopper" else _why_not_blackwell(tile, arch)
    )
    if reason:
        return reason
    if store_cols(tile, problem.out_dtype, arch.target) * out_bytes < 32:
        return f"a store box requires 32 bytes of columns, got `mma_n` {tile.mma_n} for {problem.out_dtype}"
    for operand, major in (("a", problem.a_major), ("b", problem.b_major)):
        if reason := _why_not_load(tile, operand, major, problem.a_dtype):
            return reason
    if reason := _why_not_promoted(tile, problem, arch):
        return reason
    if problem.epilogue.has_residual:
        if family(arch.target) == "hopper":
            return "a residual requires a Blackwell kernel: sm_90a has no warp that loads it, got one"
        if tile.cluster_k > 1 or not is_tma_storable(problem):
            return f"a residual requires rows that TMA can step over and no split along k, got {problem} in {tile}"
    stages = num_stages(tile, problem.a_dtype, problem.out_dtype, arch, problem.epilogue.has_residual)
    if stages < 3:
        return f"a pipeline requires 3 stages in {arch.smem_bytes} bytes of shared memory, got {max(stages, 0)}"
    exchange = 4 * tile.cta_m * tile.mma_n
    if tile.cluster_k > 1 and exchange > stages * stage_bytes(tile, problem.a_dtype):
        return f"`cluster_k` requires an accumulator that fits the stages it is exchanged through, got {exchange} bytes"
    return None


def needs_promotion(problem: Problem, arch: Arch) -> bool:
    """Whether the problem wants float32 sums that the device's tensor cores do not keep."""
    return problem.promoted and problem.a_dtype in FP8_DTYPES and family(arch.target) == "hopper"


def _why_not_promoted(tile: Tile, problem: Problem, arch: Arch) -> str | None:
    is_needed = needs_promotion(problem, arch)
    if is_needed != tile.promoted:
        rule = "a tile with `promoted`" if is_needed else "float8 operands, sm_90a and the algorithm ANY_F8_ANY_F8_F32"
        return f"{'promoted sums require' if is_needed else '`promoted` requires'} {rule}, got {problem} in {tile}"
    if tile.promoted and (tile.pingpong or tile.cluster_k > 1 or tile.split_tail):
        return f"`promoted` requires no ping-pong and no split along k, got {tile}"
    return None


def _why_not_cluster(tile: Tile) -> str | None:
    sizes = tile.cluster_m, tile.cluster_n, tile.cluster_k
    if any(size < 1 or size & (size - 1) for size in sizes) or tile.cluster_ctas > MAX_CLUSTER_CTAS:
        got = "x".join(map(str, sizes))
        return f"a cluster requires powers of two and at most {MAX_CLUSTER_CTAS} CTAs, got {got}"
    if tile.cluster_m % tile.cta_group:
        return f"`cluster_m` requires a multiple of cta_group {tile.cta_group}, got {tile.cluster_m}"
    if tile.split_tail and (tile.cluster_k > 1 or tile.pingpong):
        return f"`split_tail` requires cluster_k 1 and no ping-pong, got {tile}"
    if tile.cluster_k > 1 and (tile.cluster_m, tile.cluster_n, tile.num_accs) != (tile.cta_group, 1, 1):
        return f"`cluster_k` above 1 requires cluster {tile.cta_group}x1 and one accumulator, got {tile}"
    return None


def _why_not_load(tile: Tile, operand: str, major: str, in_dtype: str) -> str | None:
    """A multicast splits a box between the CTAs that share it: whole 8-row swizzle atoms each."""
    contiguous, other = load_box(tile, operand, major, in_dtype)
    if contiguous * DTYPE_BYTES[in_dtype] < 32:
        return f"operand {operand} requires {major}-major rows of 32 bytes a CTA, got {tile}"
    if swizzle_atom_bytes(in_dtype, major) == 32 and contiguous * DTYPE_BYTES[in_dtype] != 128:
        return f"a {major}-major float32 operand {operand} requires a multiple of 32 {major} a CTA, got {tile}"
    if other % 8 or other == 0:
        rule = "a multiple of 8 rows for each CTA that loads a part of it"
        return f"operand {operand} requires {rule}, got {other} in {tile}"
    return None


def _why_not_hopper(tile: Tile) -> str | None:
    if tile.cta_group != 1:
        return f"`cta_group` requires 1 on sm_90a (CTA pairs came with Blackwell), got {tile.cta_group}"
    if tile.num_accs != 1:
        return f"`num_accs` requires 1 on sm_90a (its accumulators are registers), got {tile.num_accs}"
    if tile.pingpong and tile.cluster_k > 1:
        return f"`pingpong` requires cluster_k 1 (a split stores through the stages), got {tile.cluster_k}"
    legal_m = (64, 128) if tile.pingpong else (64, 128, 256)
    if tile.mma_m not in legal_m:
        return f"`mma_m` requires one of {legal_m} on sm_90a, got {tile.mma_m}"
    if tile.mma_n % 16 or not 16 <= tile.mma_n <= 256:
        return f"`mma_n` requires a multiple of 16 in 16..256 on sm_90a, got {tile.mma_n}"
    regs = tile.mma_m * tile.mma_n // (128 * (1 if tile.pingpong else tile.num_consumer_warpgroups))
    most = 64 if tile.promoted else 128
    if regs > most:
        return f"an accumulator requires at most {most} registers a thread, got {regs} for {tile}"
    return None


def _why_not_blackwell(tile: Tile, arch: Arch) -> str | None:
    if tile.pingpong:
        return "`pingpong` requires sm_90a: a Blackwell epilogue overlaps through TMEM, got True"
    if tile.promoted:
        return "`promoted` requires sm_90a: Blackwell's tensor cores sum in float32, got True"
    if tile.split_tail:
        return "`split_tail` requires sm_90a: the Blackwell kernel has no workspace yet, got True"
    if tile.cta_group not in (1, 2):
        return f"`cta_group` requires 1 or 2, got {tile.cta_group}"
    legal_m = (64, 128) if tile.cta_group == 1 else (128, 256)
    if tile.mma_m not in legal_m:
        return f"`mma_m` requires one of {legal_m} for cta_group {tile.cta_group}, got {tile.mma_m}"
    step = 16 * tile.cta_group  # PTX ISA, tcgen05.mma shapes; half of B must be whole 8-column groups
    if tile.mma_n % step or not step <= tile.mma_n <= 256:
        return f"`mma_n` requires a multiple of {step} in {step}..256 for cta_group {tile.cta_group}, got {tile.mma_n}"
    if tile.num_accs not in (1, 2) or (tile.num_accs == 2 and tile.mma_m // tile.cta_group != TMEM_LANES):
        rule = f"1, or 2 where an MMA fills the {TMEM_LANES} TMEM lanes"
        return f"`num_accs` requires {rule}, got {tile.num_accs} for mma_m {tile.mma_m}"
    cols = acc_cols(tile)
    if cols > arch.tmem_cols:
        return f"accumulators require at most {arch.tmem_cols} TMEM columns, got {cols}"
    return None


def why_not_sizes(problem: Problem) -> str | None:
    """The part of `why_not` that neither the tile nor the device enters: what coordinates can count."""
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k, "batch": problem.batch}
    for name, size in sizes.items():
        if not 1 <= size <= INT32_MAX:
            return f"`{name}` requires 1..{INT32_MAX}, got {size}"
    if problem.out_dtype == "int32":  # the tensor cores clamp where XLA wraps around
        largest = math.prod(255 if dtype == "uint8" else 128 for dtype in (problem.a_dtype, problem.b_dtype))
        if problem.k > INT32_MAX // largest:
            return f"`k` requires at most {INT32_MAX // largest}, beyond which sums could leave int32, got {problem.k}"
    return None

"""A tile: what MMAs, a CTA and a cluster cover. What a CTA of it has is `resources`' subject, what is legal
`legality`'s, what is best `plan`'s."""

from __future__ import annotations

import dataclasses
import re

from jax_bwgemm.facts.problem import DTYPE_BYTES

SWIZZLE_BYTES = 128  # the k extent of a stage; a k-major operand's rows are exactly one swizzle span
MAX_CLUSTER_CTAS = 16  # H100 and B200; above 8 the kernel must opt in, CUDA C++ programming guide, clusters
FEW = 64  # rows or columns: no MMA has fewer rows, so up to here they are padding, while columns come in steps of 16
THIN_COLS = 8  # PTX ISA, mma.m16n8k16
INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Tile:
    """`mma_m` x `mma_n`: what one tcgen05.mma covers, or the wgmmas that one CTA runs side by side.

    `cta_group` 2 spreads it over a CTA pair, each half holding half the rows of A and of the result and `load_n`
    columns of B. `num_accs` MMA tiles lie along m and share each stage of B. `k_tile` is in elements; the cluster in
    CTAs, of which `cluster_k` divide k among themselves and add their parts up. `pingpong` (Hopper): two warpgroups,
    each with a tile of its own, take turns at the tensor cores. `stream_k` (Hopper): the last tiles
    are divided along k between clusters, which meet in a workspace in global memory. `promoted` (Hopper, float8): the
    sums of each stage are added to others in float32 registers. `gated`: half of the columns are those of a
    second b, so that a thread has the sums of both for the same places of the result. A pair's CTAs load one b each.
    `symmetric`: b is a's transpose; only cluster tiles on and under the diagonal are computed, and those under it are
    stored twice, as they are and mirrored. `direct` (Hopper): for small products; a CTA for each tile, whose threads
    load the operands themselves, of any row pitch, and store the result, without TMA, barriers in memory or a cluster;
    of THIN_COLS columns, for one pass over a large matrix.
    `by_rows`: warps store the rows of an n-major result, where TMA could (where it cannot, every tile does so).
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
    gated: bool = False
    symmetric: bool = False
    direct: bool = False
    by_rows: bool = False

    def __post_init__(self) -> None:
        for name, kind in _FIELDS.items():
            value = getattr(self, name)
            if type(value) is not kind or (kind is int and value < 1):  # 64.0 equals 64, and True 1
                rule = "an int of at least 1" if kind is int else "True or False"
                raise ValueError(f"`{name}` of a tile requires {rule}, got {value!r}")

    @property
    def cta_m(self) -> int:
        """Rows of A and of the result that a CTA holds."""
        return self.num_accs * self.mma_m // self.cta_group

    @property
    def is_thin(self) -> bool:
        """Whether it is for a matrix and a few vectors: its threads read the matrix into registers."""
        return self.direct and self.mma_n == THIN_COLS

    @property
    def load_n(self) -> int:
        """Columns of B that a CTA holds."""
        return self.mma_n // self.cta_group

    @property
    def out_n(self) -> int:
        """Columns of the result that a CTA, or a pair, computes."""
        return self.mma_n // self.num_bs

    @property
    def num_bs(self) -> int:
        """How many b it multiplies a with."""
        return 2 if self.gated else 1

    @property
    def span(self) -> tuple[int, int]:
        """Rows and columns of a cluster tile."""
        return self.cluster_m * self.cta_m, self.cluster_n * self.out_n

    @property
    def cluster_ctas(self) -> int:
        return self.cluster_m * self.cluster_n * self.cluster_k

    @property
    def num_consumer_warpgroups(self) -> int:
        """Where accumulators are registers: each takes mma_m / this rows, or in a ping-pong the whole tile; `legality`
        says what its registers hold."""
        slabs = self.mma_m // 64
        return 2 if self.pingpong else slabs if slabs <= 3 else 2

    def __str__(self) -> str:
        accs = f"_acc{self.num_accs}" if self.num_accs > 1 else ""
        cluster = f"cluster{self.cluster_m}x{self.cluster_n}" + (f"x{self.cluster_k}" if self.cluster_k > 1 else "")
        ways = ("_pingpong" if self.pingpong else "") + ("_streamk" if self.stream_k else "")
        ways += ("_promoted" if self.promoted else "") + ("_gated" if self.gated else "")
        ways += ("_symmetric" if self.symmetric else "") + ("_direct" if self.direct else "")
        ways += "_rows" if self.by_rows else ""
        return f"{self.mma_m}x{self.mma_n}x{self.k_tile}{accs}_cta{self.cta_group}_{cluster}{ways}"

    @classmethod
    def from_str(cls, text: str) -> Tile:
        """The inverse of `str`: `Tile.from_str("128x256x64_cta1_cluster2x1")`."""
        pattern = (
            r"(\d+)x(\d+)x(\d+)(?:_acc(\d+))?_cta(\d+)_cluster(\d+)x(\d+)(?:x(\d+))?(_pingpong)?(_streamk)?(_promoted)?"
            r"(_gated)?(_symmetric)?(_direct)?(_rows)?"
        )
        if not isinstance(text, str):
            raise TypeError(f"`tile` requires a `Tile` or its name, got {text!r}")
        match = re.fullmatch(pattern, text, re.ASCII)
        if match is None:
            raise ValueError(f"`tile` requires the form '128x256x64_cta1_cluster2x1', got {text!r}")
        mma_m, mma_n, k_tile, accs, cta_group, cluster_m, cluster_n, cluster_k = (
            int(x or 1) for x in match.groups()[:8]
        )
        return cls(
            mma_m, mma_n, k_tile, cta_group, cluster_m, cluster_n, cluster_k, accs, *map(bool, match.groups()[8:])
        )


_FIELDS = {field.name: bool if field.type == "bool" else int for field in dataclasses.fields(Tile)}


def k_tile(in_dtype: str) -> int:
    """Elements of k in one stage: SWIZZLE_BYTES of them."""
    return SWIZZLE_BYTES // DTYPE_BYTES[in_dtype]

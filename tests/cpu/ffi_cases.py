"""One legal custom call, in the launcher's words, and its variations: shared by the tests of the native library."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from jax_bwgemm.facts.problem import DTYPE_BYTES
from jax_bwgemm.runtime import ffi

# Parameters of a kernel as these tests call them, in its order. Leaves of 128 and 8 bytes; others have 4.
KINDS = (
    "tma_a", "tma_b", "tma_c", "tma_r", "c", "m", "n", "k", "batch", "a_batch_step", "b_batch_step", "raster_group",
    "raster_along_n", "raster_order", "a_policy", "b_policy", "c_policy", "stream_tiles", "stream_clusters",
    "workspace", "token", "alpha", "bias",
)  # fmt: skip
KIND_SIZES = dict.fromkeys(("tma_a", "tma_b", "tma_c", "tma_r"), 128)
KIND_SIZES |= dict.fromkeys(("c", "a_policy", "b_policy", "c_policy", "workspace", "token", "bias"), 8)
STREAM_K = ("stream_tiles", "stream_clusters", "workspace", "token")
FLAG_BYTES, CLUSTER_BYTES = 4096, 2 * 128 * 256 * 4  # of a workspace; the latter: two CTAs' float32
ROLES = {"tma_a": "a", "tma_b": "b", "tma_c": "out", "tma_r": "residual", "c": "out"}
RANGES = {"raster_group": "[1..]", "raster_along_n": "[0..1]", "raster_order": "[0..1]"}
ELEMENTS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "s32"}  # of a tensor map; others: u8


@dataclasses.dataclass
class TensorMap:
    """The text of one, to be changed."""

    element: str
    box: list[int]
    swizzle_bytes: int
    swizzle_atom_bytes: int

    def __str__(self) -> str:
        return f"{self.element}[{','.join(map(str, self.box))}]/{self.swizzle_bytes}/{self.swizzle_atom_bytes}"


@dataclasses.dataclass
class Call:
    """A custom call, to be changed before it is planned or made. All but the attributes are by role."""

    attributes: dict[str, Any]
    rules: dict[str, str]
    maps: dict[str, TensorMap]
    leaves: list[list[Any]]  # source, offset, size
    buffers: dict[str, ffi.Buffer]
    results: tuple[str, ...]
    max_active_clusters: int = 66
    token: int = 1

    def __getattr__(self, role: str) -> ffi.Buffer:
        try:
            return self.__dict__["buffers"][role]
        except KeyError:
            raise AttributeError(role) from None

    @property
    def said(self) -> dict[str, Any]:
        """All attributes."""
        roles = list(self.rules)
        split = next((i for i, role in enumerate(roles) if role in self.results), len(roles))
        texts = [f"{role}:{rule}" for role, rule in self.rules.items()]
        return self.attributes | {
            "buffers": " ".join((*texts[:split], "->", *texts[split:])),
            "tensor_maps": " ".join(f"{roles.index(role)}:{facts}" for role, facts in self.maps.items()),
            "params": " ".join(f"{source}@{offset}+{size}" for source, offset, size in self.leaves),
        }

    @property
    def given(self) -> tuple[list[ffi.Buffer], list[ffi.Buffer]]:
        """Operands and results."""
        of = lambda wanted: [x for role, x in self.buffers.items() if (role in self.results) is wanted]  # noqa: E731
        return of(False), of(True)

    def plan(self) -> ffi.LaunchPlan:
        return ffi.launch_plan(self.said, *self.given, self.max_active_clusters, self.token)

    def source(self, kind: str) -> str:
        """Of the parameter that these tests call `kind`."""
        return source(kind, list(self.rules))

    def use(self, plan: ffi.LaunchPlan, role: str) -> ffi.BufferUse:
        return plan.buffers[list(self.rules).index(role)]

    def leaf(self, plan: ffi.LaunchPlan, kind: str) -> bytes:
        offset, size = next((at, size) for found, at, size in self.leaves if found == self.source(kind))
        return plan.param_block[offset : offset + size]


def walk(call: Call, names: Iterable[str]) -> Call:
    """It takes these of a walk of k tiles of 64, too, behind all other leaves, and `k_step`."""
    end = max(at + size for _, at, size in call.leaves)
    sources = "walk:k_step/64", *(f"walk:{name}" for name in names)
    call.leaves += [[source, end + 4 * i, 4] for i, source in enumerate(sources)]
    return call


def source(kind: str, roles: list[str]) -> str:
    if kind.startswith("tma_"):
        return f"tma:{roles.index(ROLES[kind])}"
    if kind in ("c", "bias", "workspace"):
        return f"ptr:{roles.index(ROLES.get(kind, kind))}"
    if kind.endswith("_batch_step"):
        return f"step:{roles.index(kind[0])}"
    if kind in ("m", "n", "k", "batch"):
        return f"size:{kind}"
    if kind.endswith("_policy"):
        return f"l2:{kind[0]}_l2"
    return {"token": "token", "alpha": "float:alpha"}.get(kind, f"int:{kind}{RANGES.get(kind, '')}")


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
    """The leaves of a kernel in its order."""
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
    token: int = 1,
    **attributes: Any,
) -> Call:
    """A Hopper tile 128x256, clusters of 2x1 that share B: each CTA loads 128 rows of 128 bytes of it. With a workspace
    it is a stream-K."""
    out = "l,m,n" if c_major == "n" else "l,n,m"
    shapes: dict[str, tuple[str, str, tuple[int, ...]]] = {
        "a": (dtypes[0], "l?,m,k+" if majors[0] == "k" else "l?,k,m+", a_shape(a_batch or batch, m, k, majors[0])),
        "b": (dtypes[1], "l?,k,n+" if majors[1] == "n" else "l?,n,k+", b_shape(b_batch or batch, n, k, majors[1])),
    }
    if has_bias:
        shapes["bias"] = dtypes[2], c_major, (n if c_major == "n" else m,)
    own = dtypes[2], out, (batch, m, n) if c_major == "n" else (batch, n, m)
    shapes |= ({"residual": own} if has_residual else {}) | {"out": own}
    if workspace_bytes:
        shapes["workspace"] = "uint8", "bytes", (workspace_bytes,)
    align = {"out": 16 if store == "tma" else DTYPE_BYTES[dtypes[2]]}
    leaves, _ = lay_out(kinds or kinds_of(has_bias, store, has_residual, workspace_bytes > 0))
    return Call(
        attributes=_attributes() | attributes,
        rules={role: f"{dtype}[{dims}]%{align.get(role, 16)}" for role, (dtype, dims, _) in shapes.items()},
        maps={
            role: _tensor_map(dtype, role, 128 if role in "ab" else 64)
            for role, dtype in (("a", dtypes[0]), ("b", dtypes[1]), ("residual", dtypes[2]), ("out", dtypes[2]))
            if any(ROLES.get(kind) == role and kind != "c" for kind, _, _ in leaves)
        },
        leaves=[[source(kind, list(shapes)), offset, size] for kind, offset, size in leaves],
        buffers={role: ffi.Buffer.of(dtype, shape) for role, (dtype, _, shape) in shapes.items()},
        results=("out", "workspace"),
        token=token,
    )


def _attributes() -> dict[str, Any]:
    geometry = dict(
        cta_m=128, mma_n=256, out_n=256, cluster_m=2, cluster_n=1, cluster_k=1, num_threads=384, smem_bytes=232448
    )
    raster = dict(raster_group=8, raster_along_n=1, raster_order=1)
    launch = dict(stream_tiles=0, stream_clusters=1, tile_grid=0, rounds=1, pdl=0)
    return dict(geometry, **raster, a_l2="normal", b_l2="normal", c_l2="normal", alpha=0.5, **launch)


def _tensor_map(dtype: str, role: str, rows: int) -> TensorMap:
    element = "tf32" if dtype == "float32" and role in ("a", "b") else ELEMENTS.get(dtype, "u8")
    return TensorMap(element, [128 // DTYPE_BYTES[dtype], rows, 1], 128, 16)

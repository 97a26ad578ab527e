"""Facts of silicon, one frozen record per device; every number with its source. Knows no tile and no problem."""

from __future__ import annotations

import dataclasses
import re

from jax_bwgemm.facts.constants import Constants
from jax_bwgemm.facts.families import BLACKWELL, FAMILIES, HOPPER, Family
from jax_bwgemm.facts.problem import INT8_DTYPES


@dataclasses.dataclass(frozen=True)
class Arch:
    """One device. `target` is what its kernels are compiled for: of a family ("f"), they run on each of its compute
    capabilities from the named one on; of an architecture ("a"), on that alone (PTX ISA, `.target`). `integer_target`:
    where integers' are compiled for another. Rates are dense and per SM and clock, 0 where there is no instruction.

    `constants` are the cost model's: a device that was measured may have others than its family. `clusters`: how many
    of 1, 2, 4, 8 and 16 CTAs run at once, one CTA a SM; empty where nobody has asked a device.
    """

    name: str
    target: str
    compute_capability: tuple[int, int]
    num_sms: int
    clock_ghz: float
    bf16_flops_per_clk: int
    tf32_flops_per_clk: int
    fp8_flops_per_clk: int
    int8_ops_per_clk: int
    smem_bytes: int
    tmem_cols: int
    l2_bytes: int
    memory_tb_per_s: float
    clusters: tuple[int, ...]
    constants: Constants
    source: str
    integer_target: str = ""

    @property
    def targets(self) -> tuple[str, ...]:
        """All whose kernels it runs."""
        return (self.target, self.integer_target) if self.integer_target else (self.target,)

    def target_of(self, in_dtype: str) -> str:
        """What kernels for operands of a dtype are compiled for."""
        return (in_dtype in INT8_DTYPES and self.integer_target) or self.target

    @property
    def family(self) -> Family:
        return family_of(self.target)

    def max_clusters(self, ctas: int) -> int:
        """Clusters of `ctas`, a power of two, that run at once: what a device said, which may have had more SMs."""
        power = ctas.bit_length() - 1
        known = self.clusters[power] if power < len(self.clusters) else self.num_sms
        return max(1, min(known, self.num_sms // ctas))

    @property
    def peak_tflops(self) -> float:
        """bf16 with float32 accumulation at `clock_ghz`, in TFLOP/s."""
        return self.num_sms * self.clock_ghz * self.bf16_flops_per_clk / 1e3

    def flops_per_clk(self, in_dtype: str) -> int:
        """The tensor cores' rate for operands of `in_dtype`, per SM and clock."""
        if in_dtype == "float32":
            return self.tf32_flops_per_clk
        if in_dtype in INT8_DTYPES:
            return self.int8_ops_per_clk
        return self.fp8_flops_per_clk if in_dtype.startswith("float8") else self.bf16_flops_per_clk


_SMEM_227_KIB = 227 * 1024  # CUDA C++ programming guide, technical specifications: 227 KB a block for 9.0 and 10.x
_H200_CLUSTERS = (132, 66, 30, 15, 7)  # cuOccupancyMaxActiveClusters of our 128x128 kernel

ARCHS = {
    arch.name: arch
    for arch in (
        Arch("h100", "sm_90a", (9, 0), 132, 1.83, 4096, 2048, 8192, 8192, _SMEM_227_KIB, 0,
             50 * 2**20, 3.35, _H200_CLUSTERS, HOPPER.constants,
             "NVIDIA H100 datasheet and whitepaper (SXM); clusters as on an H200"),
        Arch("h200", "sm_90a", (9, 0), 132, 1.98, 4096, 2048, 8192, 8192, _SMEM_227_KIB, 0,
             60 * 2**20, 4.3, _H200_CLUSTERS, HOPPER.constants,
             "measured on an H200 SXM, driver 580.159.04: SMs, clock, L2, copy bandwidth, clusters"),
        Arch("b200", "sm_100f", (10, 0), 148, 1.965, 8192, 4096, 16384, 16384, _SMEM_227_KIB, 512,
             126 * 2**20, 7.7, (), BLACKWELL.constants,
             "NVIDIA Blackwell datasheet and published microbenchmarks; not measured by this project",
             integer_target="sm_100a"),  # tcgen05.mma.kind::i8 is no instruction of the family (PTX ISA)
        Arch("b300", "sm_100f", (10, 3), 148, 1.92, 8192, 4096, 16384, 0, _SMEM_227_KIB, 512,
             126 * 2**20, 8.0, (), BLACKWELL.constants,
             "NVIDIA Blackwell Ultra datasheet; not measured by this project"),
    )
}  # fmt: skip

_FAMILY_OF = {target: family for family in FAMILIES for target in family.targets}
TARGETS = tuple(_FAMILY_OF)
_OF_OTHERS = {(10, 1)}  # Jetson Thor, 11.0 since CUDA 13: sm_101f is of sm_110f's family (PTX ISA, .target, table)


def family_of(target: str) -> Family:
    """The record of a target's family."""
    if target not in _FAMILY_OF:
        meant = device_of(target)
        hint = f": pass {meant.target!r}" if meant else ""
        raise ValueError(f"`target` requires one of {', '.join(TARGETS)}, got {target!r}{hint}")
    return _FAMILY_OF[target]


def device_of(name: str) -> Arch | None:
    """The device that a compiler's name for its architecture means, though it is no target of ours: "sm_103a"."""
    found = re.fullmatch(r"sm_(\d+)(\d)[af]?", name)
    arch = detect("", f"{found[1]}.{found[2]}") if found else ""
    return arch if isinstance(arch, Arch) else None


def arch_of(target: str) -> Arch:
    """The first device that runs a target's kernels: whatever a kernel is compiled from is the same of the others."""
    family_of(target)
    return next(arch for arch in ARCHS.values() if target in arch.targets)


def by_name(name: str) -> Arch:
    """The device called `name`, a key of `ARCHS`."""
    if not isinstance(name, str) or name not in ARCHS:
        meant = next(
            (known for known in ARCHS if known in str(name).lower()), None
        )  # "H200", "gh200", as `detect` does
        hint = f": pass {meant!r}" if meant else ""
        raise ValueError(f"`device` requires one of {', '.join(ARCHS)}, got {name!r}{hint}")
    return ARCHS[name]


def detect(kind: str, compute_capability: str, num_sms: int | None = None) -> Arch | str:
    """The record of a device as its driver describes it ("NVIDIA H200", "9.0"), else one sentence why there is none.

    A device whose kind is not listed takes the first record of its compute capability or, where a family's kernels run
    on it, of the last one before that; `num_sms` overrides its SMs.
    """
    same = [arch for arch in ARCHS.values() if "{}.{}".format(*arch.compute_capability) == compute_capability]
    if not same:
        same = _of_family(compute_capability)
    if not same:
        legal = ", ".join(dict.fromkeys("{}.{}".format(*arch.compute_capability) for arch in ARCHS.values()))
        return f"a device requires compute capability {legal}, got {compute_capability} ({kind})"
    arch = next((arch for arch in same if arch.name.upper() in kind.upper()), same[0])
    return dataclasses.replace(arch, num_sms=num_sms or arch.num_sms)


def _of_family(compute_capability: str) -> list[Arch]:
    """The records of the last compute capability before this one whose kernels are a family's, which has this one;
    without integers if a target of one architecture has them."""
    major, _, minor = compute_capability.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        return []
    own = int(major), int(minor)
    if own in _OF_OTHERS:
        return []
    before = [
        arch
        for arch in ARCHS.values()
        if arch.target.endswith("f") and arch.compute_capability[0] == own[0] and arch.compute_capability < own
    ]
    last = max((arch.compute_capability for arch in before), default=None)
    return [_of_all(arch) for arch in before if arch.compute_capability == last]


def _of_all(arch: Arch) -> Arch:
    """A record without what is its own architecture's alone: the integers of another target."""
    return dataclasses.replace(arch, integer_target="", int8_ops_per_clk=0) if arch.integer_target else arch

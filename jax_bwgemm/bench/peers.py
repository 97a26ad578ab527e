"""Who ours is measured against: XLA under sets of flags, and Pallas' Hopper matmul. Knows no clock.

NVIDIA's `cutlass.jax` is no peer: `nvidia-cutlass-dsl` (4.8.1) has the call from JAX, `cutlass_call`, but no GEMM to
call. NVIDIA's are examples of the CUTLASS repository, or in `nvidia-cutlass-operators` (beta), for DLPack tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax_bwgemm.bench import pallas
from jax_bwgemm.bench.cases import Case
from jax_bwgemm.bench.products import Product, plain
from jax_bwgemm.facts.arch import Arch

# Compiler options of `jax.jit`. XLA remembers what it tuned for one computation, maybe across these: "default" comes
# first, so that it owes nothing to the others, and a result names the calls that XLA made under each.
FLAG_SETS: Mapping[str, Mapping[str, bool]] = {
    "default": {},
    "cublaslt": {"xla_gpu_enable_cublaslt": True},
    "no-triton": {"xla_gpu_enable_triton_gemm": False},
}
PEERS = (*FLAG_SETS, "pallas")


class Unavailable(Exception):
    """A peer that cannot do a case, or not here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way in which a peer computes a case. `config` names it among the peer's others."""

    product: Product
    options: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    config: str = ""


def parse(text: str) -> tuple[str, ...]:
    """`--peers`: "all", or names separated by commas. "default" is always among them: ratios refer to it."""
    names = PEERS if text == "all" else tuple(text.split(","))
    if unknown := [name for name in names if name not in PEERS]:
        raise ValueError(f"`--peers` requires all or names of {', '.join(PEERS)}, got {unknown[0]!r}")
    return tuple(name for name in PEERS if name in names or name == "default")


def candidates(peer: str, case: Case, arch: Arch) -> Sequence[Candidate]:
    """The peer's ways to compute `case`, the fastest of which counts. Raises Unavailable with the reason."""
    if peer in FLAG_SETS:
        return [Candidate(plain(case), FLAG_SETS[peer])]
    if reason := pallas.why_not(case, arch):
        raise Unavailable(reason)
    try:
        return [
            Candidate(plain(case, pallas.dot(config, arch)), config=str(config))
            for config in pallas.CONFIGS
            if config.fits(case)
        ]
    except Exception as error:  # others' code: what it imports is missing, or another jax's is called otherwise
        raise Unavailable(f"{type(error).__name__}: {error}") from error

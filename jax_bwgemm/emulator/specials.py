"""Special registers that are modelled, and how many bits each has."""

from __future__ import annotations

_TRIPLES = ("tid", "ntid", "ctaid", "nctaid", "cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid")
_SINGLES = ("laneid", "warpid", "cluster_ctarank", "cluster_nctarank", "smid", "clock", "dynamic_smem_size")
SPECIALS = {
    **{f"%{name}.{axis}": 32 for name in _TRIPLES for axis in "xyz"},
    **{f"%{name}": 32 for name in _SINGLES},
    "%clock64": 64,
    "%globaltimer": 64,
    "%is_explicit_cluster": 1,
}

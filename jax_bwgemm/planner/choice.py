"""Which of several priced candidates is the best, and what breaks ties between them. Prices none."""

from __future__ import annotations

import math

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.resources import acc_stages
from jax_bwgemm.planner.calibration import Calibration, is_covered
from jax_bwgemm.planner.candidates import Candidate
from jax_bwgemm.planner.order import ROUND_US

TIE = 1.03  # closer predictions than this say nothing: the model's own error is larger
CORRECTED_TIE = 1.01  # where predictions are corrected: 128x256 alone, of 4096^3 and 8192^3, is predicted to take 2 %
# less than in pairs, and takes 0.5 to 1 % less (H200)
POWER_US = 100.0  # from which on a tie is broken where predictions are corrected, too: bursts, which they are of, end
GIVES_WAY = 1.03  # times the best: what leaves SMs to other kernels may take so long where there are some
NOISE = 1.003  # so close, the model decides; tunings repeat within some 1 %, among which either choice will do
SURE_CLUSTER_CTAS = 2  # SMs come in pairs (TPCs); a larger cluster leaves some of a GPC empty


def preference(candidate: Candidate) -> tuple[bool, bool, bool, float]:
    """Launchable before legal before illegal, and measured before not; then the time. Ties keep the order in which
    tiles ship."""
    us, c = candidate.measured_us, candidate.cost
    predicted_us = c.us if c else 0.0
    return candidate.reason is not None, c is None, us is None, predicted_us if us is None else _whole_us(candidate)


def fastest_measured(judged: tuple[Candidate, ...]) -> Candidate:
    """Of measured candidates, the fastest first: among those that tie with it, what the model prefers."""
    least = _whole_us(judged[0])
    tied = [c for c in judged if c.reason is None and c.measured_us and _whole_us(c) <= NOISE * least]
    return min(tied, key=lambda candidate: candidate.cost.us if candidate.cost else math.inf)


def best_predicted(judged: tuple[Candidate, ...], arch: Arch, known: Calibration | None) -> Candidate:
    """Of candidates in order of preference, the first of which can be launched, and none of which was measured."""
    costs = [(c.cost, c) for c in judged if c.cost and c.reason is None]
    is_corrected = known is not None and is_covered(costs[0][1].tile, costs[0][1].problem)
    if is_corrected and costs[0][0].us < POWER_US:
        return costs[0][1]  # what was measured of kernels alike says more than any rule for ties
    tie = CORRECTED_TIE if is_corrected else TIE
    placed = [(cost, c) for cost, c in costs if c.tile.cluster_ctas <= SURE_CLUSTER_CTAS]
    if placed and placed[0][0].us <= tie * costs[0][0].us:
        costs = placed
    if costs[0][1].tile.direct:  # too small for power to count
        return costs[0][1]
    tied = [(cost, c) for cost, c in costs if cost.us <= tie * costs[0][0].us]
    return min(tied, key=lambda own: (_shows_epilogue(own[1], arch), own[0].l2_bytes, _reads(own[1], is_corrected)))[1]


def giving_way(best: Candidate, judged: tuple[Candidate, ...]) -> Candidate:
    """In place of a long kernel whose clusters must all be there at once, one that can be launched in rounds, if that
    takes hardly longer."""
    if not best.tile.stream_k or expected_us(best) < 2 * ROUND_US:
        return best
    is_measured = best.measured_us is not None
    able = [
        c for c in judged if c.reason is None and not c.tile.stream_k and is_measured == (c.measured_us is not None)
    ]
    other = min(able, key=expected_us, default=best)
    return other if expected_us(other) <= GIVES_WAY * expected_us(best) else best


def expected_us(candidate: Candidate) -> float:
    """Measured, else predicted; infinite where neither."""
    if candidate.measured_us:
        return _whole_us(candidate)
    return candidate.cost.us if candidate.cost else math.inf


def _whole_us(candidate: Candidate) -> float:
    """Measured, and what is predicted of padding its operands, which not every tile wants."""
    return (candidate.measured_us or 0.0) + (candidate.cost.padding_us if candidate.cost else 0.0)


def _reads(candidate: Candidate, is_corrected: bool) -> int:
    """The less, the fewer bytes MMAs read from shared memory for as many from the L2 cache: wide ones. 12288^3 took
    longer than XLA's on an H200 by 192x192, which is predicted to be 0.5 % faster than 128x256 (docs/results.md). Of
    other families nothing is measured."""
    return -candidate.tile.mma_n if is_corrected else 0


def _shows_epilogue(candidate: Candidate, arch: Arch) -> bool:
    """A single accumulator in TMEM: nothing hides its epilogue, and no measurement of ours says how long that is."""
    return arch.family.sums_in_tmem and acc_stages(candidate.tile, arch.tmem_cols) == 1

"""What XLA has though a kernel is at hand: by its own time, by what is expected of it, or for tiles that we lack."""

from __future__ import annotations

import dataclasses
import re
import warnings

import jax.numpy as jnp
import pytest
from fake_artifacts import fake_entry
from few_kernels import BEST, BF16, NARROW, SMALL, entry, with_epilogue
from lowered import hlo

import jax_bwgemm
from jax_bwgemm.facts.arch import by_name
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.planner import measured, sooner, xla
from jax_bwgemm.planner.cost import repack_us
from jax_bwgemm.planner.measured import Time
from jax_bwgemm.runtime import attempts
from jax_bwgemm.runtime.attempts import choose
from jax_bwgemm.runtime.rungs import Asked
from tests.cases import fused


def test_short_sums_are_xlas(have, monkeypatch):
    """Where XLA is expected to be done before our kernel. Not where somebody asks for a kernel."""
    monkeypatch.setattr(sooner, "xla_us", xla.xla_us)
    have(entry(NARROW), entry(SMALL), entry(SMALL, "relu"))
    few = Problem(128, 256, 40)
    sentence = r"XLA is expected to take [\d.]+ us for 128 x 256 sums of 40 products, our kernel [\d.]+: pass `tile=`"
    chosen = choose(Asked(few, "h200"))
    assert chosen.entry is None and re.search(sentence, chosen.reason)
    assert choose(Asked(few, "h200", SMALL)).entry is not None
    assert choose(Asked(with_epilogue(few, activation="relu"), "h200")).entry is not None
    assert choose(Asked(dataclasses.replace(few, batch=2, a_batch=2, b_batch=2), "h200")).entry is not None
    assert choose(Asked(Problem(128, 255, 420), "h200")).entry is None  # whose rows are padded before
    assert choose(Asked(Problem(4096, 2048, 420), "h200")).entry is not None


@pytest.mark.parametrize(
    "xla_us, is_sooner, why",
    [(1.0, True, "XLA is expected"), (32.0, False, "XLA is expected"), (None, False, "the kernels at hand")],
)
def test_that_kernels_lack_is_said_where_xla_is_sooner_for_it(have, monkeypatch, xla_us, is_sooner, why):
    """The best tile is predicted to take 26 us, and the only one at hand 41."""
    monkeypatch.setattr(sooner, "xla_us", lambda *_: xla_us)
    have(entry(NARROW))
    chosen = choose(Asked(Problem(2048, 2048, 2048), "h200"))
    assert chosen.entry is None and chosen.is_sooner == is_sooner and chosen.reason.startswith(why)


def test_a_kernel_at_hand_runs_where_xla_itself_would_take_longer(have, monkeypatch):
    """Whatever a better tile would take, which is not at hand and which XLA is not expected to have either."""
    monkeypatch.setattr(sooner, "xla_us", lambda *_: 400.0)
    have(entry(NARROW))
    assert choose(Asked(Problem(2048, 2048, 2048), "h200")).entry is not None


def test_xla_is_asked_of_the_operand_before_its_transpose(have, monkeypatch):
    """Which it reads, whatever a kernel of ours gets."""
    have(entry(NARROW))
    seen = []
    monkeypatch.setattr(sooner, "xla_us", lambda problem, _: seen.append((problem.a_major, problem.b_major)))
    for is_transpose, majors in (
        ((False, False), ("k", "n")),
        ((False, True), ("k", "k")),
        ((True, False), ("m", "n")),
    ):
        seen.clear()
        choose(Asked(Problem(2048, 2048, 2048), "h200", is_transpose=is_transpose))
        assert set(seen) == {majors}


@pytest.fixture
def timed(have, tmp_path, monkeypatch):
    """Writes what the only kernel took of a product, 100 us, and XLA."""
    tn = fake_entry(Variant("sm_90a", *BF16, "m", "n", BEST, fused("identity")))
    have(entry(BEST), entry(BEST, "relu"), tn)
    monkeypatch.setenv("JAX_BWGEMM_TABLES", str(tmp_path))

    def write(problem, xla_us, us=100.0):
        own = tn if problem.a_major == "m" else entry(BEST)
        time = Time(str(BEST), False, us, own.cubin_sha256[: measured.CUBIN_DIGITS])
        record = measured.Record(measured.key(problem), measured.now(), (time,), xla_us)
        measured.save(measured.Table("h200", {}, {record.problem: record}), measured.user_path("h200"))

    return write


@pytest.mark.parametrize(
    "change", [{}, {"batch": 2, "a_batch": 2, "b_batch": 2}, {"a_major": "m"}], ids=["plain", "batch", "tn"]
)
def test_what_xla_was_timed_to_be_faster_with_is_xlas(timed, change):
    problem = dataclasses.replace(Problem(4096, 4096, 4104), **change)
    timed(problem, 98.9)
    chosen = choose(Asked(problem, "h200"))
    assert chosen.entry is None and chosen.is_sooner and chosen.for_its_sizes
    assert chosen.reason.startswith("XLA was timed to take 98.9 us for 4096 x 4096 sums of 4104 products, our kernel 1")
    assert choose(Asked(problem, "h200", BEST)).entry is not None
    timed(problem, 99.1)
    assert choose(Asked(problem, "h200")).entry is not None


@pytest.mark.parametrize("more_us, from_source", [(-0.5, False), (0.5, True)])
def test_a_measured_and_a_predicted_way_are_compared_with_their_launches(timed, more_us, from_source):
    """As given, a was measured, without a launch, and XLA transposes it; from before its transpose, padded, it is
    predicted, with one."""
    given, arch = Problem(4100, 4096, 4096), by_name("h200")
    predicted_us = choose(Asked(dataclasses.replace(given, a_major="m"), "h200")).us
    timed(given, None, predicted_us - arch.constants.launch_us - repack_us(given, "a", arch) + more_us)
    chosen = choose(Asked(given, "h200", is_transpose=(True, False)))
    assert chosen.entry is not None and chosen.route.from_source == (from_source, False)
    assert (chosen.plan.record is None) == from_source


def test_xlas_time_counts_for_what_it_was_of(timed, have, monkeypatch):
    """Not for an epilogue, for which the kernel's time is borrowed, nor where XLA reads the operand from before its
    transpose. And no expectation counts beside it."""
    problem = Problem(4096, 4096, 4104)
    monkeypatch.setattr(sooner, "xla_us", lambda *_: 1.0)
    timed(problem, 50.0)
    assert choose(Asked(with_epilogue(problem, activation="relu"), "h200")).entry is not None
    assert choose(Asked(problem, "h200")).entry is None
    timed(problem, 150.0)
    assert choose(Asked(problem, "h200")).entry is not None
    timed(problem, 50.0)
    have(entry(BEST))
    assert choose(Asked(problem, "h200", is_transpose=(True, False))).entry is not None


def test_what_is_expected_of_xla_is_compared_with_a_measured_time_and_its_launch(timed, monkeypatch):
    """Of short sums, of which the formula alone tells something. XLA's own time was not taken."""
    problem, launch_us = Problem(4096, 4096, 64), by_name("h200").constants.launch_us
    timed(problem, None)
    for us, is_xlas in ((105.9, True), (106.1, False)):
        attempts.forget()
        monkeypatch.setattr(sooner, "xla_us", lambda *_, us=us: launch_us + us)
        assert (choose(Asked(problem, "h200")).entry is None) == is_xlas


def test_what_xla_is_sooner_with_is_no_fallback(artifacts_dir, monkeypatch):
    """Nothing is raised or warned; `explain` and `stats` tell."""
    monkeypatch.setattr(sooner, "xla_us", lambda *_: 1.0)
    x = jnp.ones((256, 256), jnp.bfloat16)
    jax_bwgemm.stats(reset=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = hlo(lambda a, b: jax_bwgemm.matmul(a, b, on_fallback="error", device="h200"), x, x)
    assert "dot_general" in text and "custom_call" not in text
    (why,) = jax_bwgemm.stats(reset=True).fallbacks
    assert "XLA is expected to take 1.0 us" in why
    assert "XLA is expected to take 1.0 us" in str(jax_bwgemm.explain(x, x, device="h200"))

"""CUPTI tells the kernels of a product apart, and what was timed is what runs afterwards. No time is judged."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.bench.candidates import time_kernels
from jax_bwgemm.cli.main import main
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.units import unit
from jax_bwgemm.planner import measured
from jax_bwgemm.runtime.decision import decide, kernels

PROBLEMS = (
    Problem(4096, 4096, 4096),
    Problem(512, 256, 1024, b_major="k"),
    Problem(16, 4096, 4096),
    Problem(1, 1000, 4096, a_major="m"),
    Problem(1023, 1025, 1027),
    Problem(256, 512, 256, 3, a_batch=3),
    Problem(512, 512, 512, epilogue=chain(1.0, True, "relu")),
    Problem(512, 512, 512, epilogue=unit("silu", is_gated=True)),
)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("rounds", [1, 5])
def test_each_kernel_has_a_time(problem: Problem, rounds: int, arch: Arch) -> None:
    timed = time_kernels(problem, arch, rounds)
    if timed is None:
        pytest.skip(f"no kernel at hand for {problem}")
    assert len(timed.times_us) == len(kernels(problem, arch)[1])
    floor_us = problem.flops / (2 * arch.peak_tflops * 1e6)
    assert all(us > max(floor_us, 0.5) for us in timed.times_us), "faster than the tensor cores: another kernel's times"


def test_what_was_timed_runs(arch: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_BWGEMM_TABLES", str(tmp_path))
    a, b = (jax.random.normal(jax.random.key(i), (1000, 1000), jnp.bfloat16) for i in (0, 1))

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return (jax_bwgemm.matmul(a, b, on_fallback="error").astype(jnp.float32) ** 2).sum()

    report = jax_bwgemm.autotune(jax.value_and_grad(loss, argnums=(0, 1)), a, b)
    print(report)
    assert len(report.timed) == 3 and report.without_kernel == ()
    assert len(jax_bwgemm.autotune(jax.value_and_grad(loss, argnums=(0, 1)), a, b).known) == 3
    plan = decide(Problem(1000, 1000, 1000), None, None).plan
    assert plan is not None and plan.source == "measured"
    got = np.asarray(jax.jit(lambda a, b: jax_bwgemm.matmul(a, b, on_fallback="error"))(a, b), np.float64)
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    assert np.linalg.norm(got - want) <= 2.0**-9 * np.linalg.norm(want)


def test_the_commands(arch: Arch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = tmp_path / "table.json", tmp_path / "regret.json"
    assert main(["bench", "--tune", "--shapes", "512x512x512:nt", "--rounds", "5", "--table", str(table)]) == 0
    (record,) = measured.load(table).records.values()
    assert 1 < len(record.times) <= len(kernels(Problem(512, 512, 512, b_major="k"), arch)[1])
    assert main(["bench", "--regret", "6", "--rounds", "5", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["products"]
    print(capsys.readouterr().out)

"""`bench --power`: which ways are compared, and what is written of them. No power is judged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jax_bwgemm.bench import power
from jax_bwgemm.bench.cases import Case
from jax_bwgemm.bench.programs import Program
from jax_bwgemm.bench.report import Load
from jax_bwgemm.cli.main import main
from jax_bwgemm.facts.arch import ARCHS

pytestmark = pytest.mark.usefixtures("artifacts_dir")

H200 = ARCHS["h200"]
CASE = Case(8192, 8192, 8192)


def test_the_ways_of_a_large_product() -> None:
    """The kernels near the fastest, the fastest one's other orders, its zeros; each name once."""
    found = power.ways(CASE, H200)
    names = [way.name for way in found]
    assert len(set(names)) == len(names)
    tiles = [name for name in names if "," not in name]
    assert 2 <= len(tiles) <= power.MOST_KERNELS and names[: len(tiles)] == tiles
    fastest = tiles[0]
    orders = [way for way in found if " of " in way.name]
    assert len(orders) in (len(power.RASTERS), len(power.RASTERS) - 1)  # its own is among them, or not
    assert all(way.name.startswith(f"{fastest}, ") for way in found[len(tiles) :])
    plans = [way.decision.plan for way in orders]
    own = found[0].decision.plan
    kept = {(plan.raster_group, plan.raster_along_n, plan.raster_order) for plan in plans if plan}
    assert own and (own.raster_group, own.raster_along_n, own.raster_order) not in kept and len(kept) == len(orders)
    assert [way.zeros for way in found[-3:]] == ["a", "b", "ab"] and not any(way.zeros for way in found[:-3])
    limit = power.NEAR * (power._predicted_us(found[0].decision) or 0.0)
    assert all((power._predicted_us(way.decision) or limit) <= limit for way in found[: len(tiles)])


def test_a_product_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "kernels", lambda problem, arch: (None, []))
    with pytest.raises(ValueError, match="`--power` requires a product that has a kernel, got 8192x8192x8192"):
        power.ways(CASE, H200)


def test_zeros() -> None:
    values = [(jnp.ones((2, 2)), jnp.ones((2, 3)))]
    assert power._zeroed(values, False) is values
    (forms,) = power._zeroed(values, True)
    assert [x.shape for x in forms] == [(2, 2), (2, 3)] and not any(x.any() for x in forms)


def test_what_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every way as soon as it is measured, XLA first and last."""
    asked: list[tuple[str, int]] = []

    def sustain(case: Case, calls: dict[str, Any], products: int, seconds: float) -> list[Load]:
        ((name, _),) = calls.items()
        asked.append((name, products))
        return [Load(str(case), name, seconds, 700.0, 1400.0, 665.0, 60.0, 9)]

    few = dataclasses.replace(CASE, m=256, n=256, k=256)
    monkeypatch.setattr(power, "gpu_arch", lambda who: dataclasses.replace(H200, l2_bytes=2**10))
    monkeypatch.setattr(power, "sustain", sustain)
    monkeypatch.setattr(power, "compile_peer", lambda *given: [Program(lambda operands: [])])
    monkeypatch.setattr(power.ffi, "register", lambda dirs: None)
    monkeypatch.setattr(power, "program", lambda *given: lambda *operands: jnp.zeros(()))
    assert main(["bench", "--power", "5", "--shapes", str(few), "--json", str(tmp_path / "power.json")]) == 0
    content = json.loads((tmp_path / "power.json").read_text())
    names = [load["product"] for load in content["loads"]]
    assert names == [name for name, _ in asked] and (names[0], names[-1]) == ("XLA", "XLA again")
    assert {products for name, products in asked if "XLA" not in name} == {power.LAUNCHES}
    assert content["seconds"] == 5.0 and content["loads"][1]["pj_per_flop"] == pytest.approx(0.95)
    out = capsys.readouterr().out
    assert "256x256x256: 5 s each way" in out and " 0.950 pJ/FLOP" in out and "wrote" in out


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_seconds_that_are_none(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--power", seconds]) == 2
    assert "`--power` requires seconds above 0" in capsys.readouterr().err

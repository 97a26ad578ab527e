"""`bench --meshes`, `--collectives` and `--models` on CPU devices: programs, what they write, and what they refuse."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import pytest

import jax_bwgemm
from jax_bwgemm.bench import candidates, collectives, decode, layers, meshes, models, timing
from jax_bwgemm.facts.arch import ARCHS

ROUNDS = timing.MIN_ROUNDS


@pytest.fixture(autouse=True)
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name; its products are XLA's here, and no clock waits."""

    def quiet(f: Any, *operands: Any, on_fallback: str = "", **settings: Any) -> Any:
        return f(*operands, on_fallback="ignore", **settings)

    for name in ("matmul", "mlp", "gated_mlp", "all_gather_matmul", "matmul_reduce_scatter"):
        monkeypatch.setattr(jax_bwgemm, name, functools.partial(quiet, getattr(jax_bwgemm, name)))
    monkeypatch.setattr(candidates, "target_arch", lambda device: ARCHS["h200"])
    monkeypatch.setattr(timing, "rest", lambda us: None)
    monkeypatch.setattr(timing, "HOST_BATCH", 1)


def test_meshes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, size in {"M": 64, "N": 32, "K": 16, "F": 48}.items():
        monkeypatch.setattr(meshes, name, size)
    rows = [row for row in meshes.rows() if row.name in ("k-sharded", "tensor-parallel MLP", "n-sharded")]
    monkeypatch.setattr(meshes, "rows", lambda: rows)
    path = tmp_path / "new" / "h200x8.json"
    assert meshes.main(ROUNDS, path, "") == 0
    found = json.loads(path.read_text())
    kinds = {row["name"].split(":")[0] for row in found["rows"]}
    assert kinds == {"jit", "explicit", "shard_map"} and len(found["rows"]) == len(rows)
    for row in found["rows"]:
        assert row["ours"] == row["jnp"] and row["error"] < 0.05
        assert row["ratio"] == pytest.approx(row["jnp_us"] / row["ours_us"])
    assert "jit: k-sharded" in capsys.readouterr().out


def test_meshes_want_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="`bench --meshes` requires at least 2 GPUs, got"):
        meshes.main(ROUNDS, None, "")


@pytest.mark.long
def test_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every way of every kind of row, with the same result; a set of flags that jax does not know is left out."""
    rows = [collectives.Row(kind, 64, 48, 32) for kind in ("gather", "scatter", "mlp")]
    monkeypatch.setattr(collectives, "ROWS", [*rows, collectives.Row("mlp", 64, 48, 32, has_gradient=True)])
    monkeypatch.setattr(collectives, "FLAG_SETS", {"default": {}, "unknown": {"xla_gpu_no_such_flag": True}})
    path = tmp_path / "new" / "h200x8.json"
    assert collectives.main(ROUNDS, path, "") == 0
    found = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in found] == [str(row) for row in collectives.ROWS]
    for row, num in zip(found, (7, 2 * 7, 3 * 7, 2 * 3 * 7), strict=True):
        assert set(row["times_us"]) == {"ours, default", "ours, not overlapped", "jnp", "XLA's own"}
        assert "no_such_flag" in row["left_out"]["ours, unknown"] and row["fastest"] == "ours, default"
        assert row["error"] < 0.05 and row["moved"] == num * ["collective-permute"]
        assert row["bound_us"] == max(row["products_us"], row["transfers_us"])
    (_, _, *lines, wrote) = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found) and "gather 64x48x32 |" in lines[0] and "wrote" in wrote


def test_collectives_want_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="`bench --collectives` requires at least 2 GPUs, got"):
        collectives.main(ROUNDS, None, "")


@pytest.mark.long
@pytest.mark.parametrize("num", [1, 8])
def test_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    """The same losses whatever the flags, on one device and with the batch over eight."""
    monkeypatch.setattr(jax, "device_count", lambda: num)
    monkeypatch.setattr(models, "FLAG_SETS", {"default": {}, "no-triton": {}})  # a CPU knows no other
    monkeypatch.setattr(timing, "choose_clock", lambda: ("host", timing.host_clock))
    path = tmp_path / "new" / "h200.json"
    assert models.main(ROUNDS, path, "", [models.Block(64, 96, 4, 8, 16, "einsum")]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    ours = {"ours", *(f"ours, {how}" for how in ("no-triton", "fused", "accelerated"))}
    assert set(row["times_us"]) == ours | {"default", "no-triton"}
    assert max(row["losses"].values()) == pytest.approx(min(row["losses"].values()), rel=1e-3)
    assert row["products_us"] == {}  # what a kernel is for, no host's clock tells
    flops = 2 * 3 * (8 * 16) * (4 * 64 * 64 + 3 * 64 * 96)
    assert row["limit_us"] == pytest.approx(flops / (num * ARCHS["h200"].peak_tflops * 1e6))


def test_what_products_take_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of either library's products and others: per call, in microseconds."""
    call = [
        ("sm_90a_bf16_bf16_bf16_knn_128x256x64_cta1_cluster2x1_identity_0", 700.0),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNN", 300.0),
        ("gemm_fusion_dot_3_0", 20.0),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x128x128", 90.0),
        ("loop_multiply_fusion", 8.0),
        ("input_reduce_fusion_2", 4.0),
    ]
    monkeypatch.setattr(timing, "kernel_times", lambda program, rounds, *operands, rests: rounds * call)
    assert models.products_us(None) == pytest.approx(1020.0)


@pytest.mark.long
def test_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and with gradients, gated and biased: as the same written with `@`."""
    monkeypatch.setattr(layers, "FLAG_SETS", {"default": {}})  # a CPU knows no other
    monkeypatch.setattr(timing, "choose_clock", lambda: ("host", timing.host_clock))
    path = tmp_path / "new" / "h200.json"
    shapes = [layers.Layer(16, 32, 48), layers.Layer(16, 32, 48, "gelu", is_gated=False)]
    assert layers.main(ROUNDS, path, "", shapes) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["layer"]["is_gated"], row["step"]) for row in rows] == [
        (gated, step) for gated in (True, False) for step in ("forward", "gradients", "sums")
    ]
    assert all(set(row["times_us"]) == {"ours", "accelerated", "installed", "default"} for row in rows)
    for layer in shapes:
        operands = layers.make_operands(layer)
        for step in (layers.gradients, layers.sums):
            got, want = (step(f, *operands) for f in (layer.fused, layer.plain))
            for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert jax.numpy.allclose(g.astype("float32"), w.astype("float32"), rtol=0.1, atol=0.1)


@pytest.mark.long
def test_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "OPTIONS", {"default": {}})  # a CPU knows no other
    path = tmp_path / "new" / "h200.json"
    assert decode.main(ROUNDS, path, "", decode.Model(3, 64, 32, 96, 4)) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["form"] for row in rows] == ["list", "scan"]
    assert all(row["difference"] == 0 and row["executes"] == 0 and row["ours_us"] > 0 for row in rows)  # both XLA's
    model = decode.Model(3, 64, 32, 96, 4)
    by_list, by_scan = (decode.FORMS[form](model, *decode.make_operands(model, form)) for form in decode.FORMS)
    assert jax.numpy.allclose(by_list.astype("float32"), by_scan.astype("float32"), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("module", "flag"), [(models, "models"), (layers, "layers"), (decode, "decode")])
def test_they_want_a_gpu(monkeypatch: pytest.MonkeyPatch, module: Any, flag: str) -> None:
    monkeypatch.setattr(candidates, "target_arch", lambda device: "there is none")
    with pytest.raises(
        ValueError, match=f"`bench --{flag}` requires a Hopper or Blackwell GPU, got none: there is none"
    ):
        module.main(ROUNDS, None, "")


def test_a_programs_kernels_are_counted() -> None:
    class Program:
        def as_text(self) -> Any:
            line = 'custom-call(%a), custom_call_target="{}", backend_config={}\n'
            ours = line.format("jax_bwgemm_matmul_v2", '{variant = "sm_90a_x"}')
            return 2 * ours + line.format("__cublas$lt$matmul", "{}") + "%y = add(%x, %x)\n"

    assert models.kernels(Program()) == {"__cublas$lt$matmul": 1, "sm_90a_x": 2}

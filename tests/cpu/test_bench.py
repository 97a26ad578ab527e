"""The benchmark's pure parts, and all of it once on a CPU, where XLA is ours as well. No time is judged."""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_results import H200, RESULT

from jax_bwgemm.bench import accuracy, machine, pallas, peers, products, programs, render, report, sustained, timing
from jax_bwgemm.bench import run as bench
from jax_bwgemm.bench.cases import (
    DEFAULT,
    EPILOGUES,
    FORMS,
    LARGEST,
    LEAST_FLOPS,
    MAX_ROTATION,
    Case,
    random_cases,
    rotation,
)
from jax_bwgemm.cli.main import main
from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.units import unit


def test_the_default_list_is_what_it_was_meant_to_be() -> None:
    assert len(set(DEFAULT)) == len(DEFAULT) == 34
    named = {"8192x8192x8192:nt:e4m3->bf16", "4096x14336x8192:tn->f32", "4096x4096x4096:f32", "128*512x512x128"}
    assert named | {"4096x8192x1024:bias+silu+residual", "8192x14336x4096:swiglu"} < set(DEFAULT)


@pytest.mark.parametrize("text", [*DEFAULT, "3*8x16x32:tn", "8x8x8->f32", "8x8x8:s8->s32", "8x8x8:nt:f16->f32:bias"])
def test_a_case_is_its_text(text: str) -> None:
    assert str(Case.from_str(text)) == text


def test_random_cases() -> None:
    cases = random_cases(150, seed=3)
    assert len(set(cases)) == 150 and cases == random_cases(150, seed=3) and cases[:50] == random_cases(50, seed=3)
    assert cases != random_cases(150, seed=4)
    sizes = [(case.m, case.n, case.k) for case in cases]
    aligned = [all(size % 8 == 0 for size in own) for own in sizes]
    assert all(is_aligned for i, is_aligned in enumerate(aligned) if i % 3 != 2)
    assert sum(aligned) < 110  # of those of any size, few are so by chance
    assert all(1 <= size <= LARGEST for own in sizes for size in own)
    assert all(case.flops >= LEAST_FLOPS and case.dtype == "bfloat16" and not case.epilogue for case in cases)
    assert {case.form for case in cases} == set(FORMS)
    small = sum(case.m <= 64 for case in cases)
    assert 30 <= small <= 75  # log-uniform, but for products that are too small: below 3 in 7


def test_every_case_has_a_text() -> None:
    for form, dtype, out, epilogue in itertools.product(
        FORMS, ("bfloat16", "float8_e4m3fn"), ("", "float32"), EPILOGUES
    ):
        case = Case(8, 24, 16, 3, form, dtype, out, epilogue)
        assert Case.from_str(str(case)) == case


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8x8",
        "8x8x8x8",
        "0x8x8",
        "8x8x8:tt",
        "0*8x8x8",
        "-1x8x8",
        "8x8x8:f64",
        "8x8x8:relu+bias",
        "8x8x8->",
        "8x8x8:",
    ],
)
def test_a_bad_case_is_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="a shape requires the form"):
        Case.from_str(text)


def test_forms_store_an_operand_transposed() -> None:
    case = Case(2, 3, 5, batch=7, form="tn")
    assert case.operands == {"a": ((7, 5, 2), "bfloat16"), "b": ((7, 5, 3), "bfloat16")}
    assert (case.problem.a_major, case.problem.b_major) == ("m", "n")
    case = Case(2, 3, 5, form="nt", dtype="float32")
    assert case.operands == {"a": ((2, 5), "float32"), "b": ((3, 5), "float32")}
    assert (case.problem.a_major, case.problem.b_major) == ("k", "k")


def test_an_epilogue_has_operands_of_its_own() -> None:
    case = Case.from_str("2x3x5:e4m3->bf16:bias+silu+residual")
    assert list(case.operands.items())[2:] == [("bias", ((3,), "bfloat16")), ("residual", ((2, 3), "bfloat16"))]
    assert (case.flops, case.min_bytes) == (60, 10 + 15 + 2 * (3 + 6 + 6))
    case = Case.from_str("2x3x5:nt:swiglu")
    assert case.operands["up"] == ((3, 5), "bfloat16")
    assert (case.flops, case.min_bytes) == (120, 2 * (10 + 15 + 15 + 6))


def test_rotation_leaves_the_cache_behind() -> None:
    l2_bytes = 60 * 2**20
    assert rotation(Case(8192, 8192, 8192), l2_bytes) == 1
    assert rotation(Case(1024, 1024, 1024), l2_bytes) == 20  # 6 MiB each
    assert rotation(Case(64, 64, 64), l2_bytes) == MAX_ROTATION


def test_limits_are_compute_and_memory() -> None:
    compute_us, memory_us = report.limits_us(Case(8192, 8192, 8192), H200)
    assert compute_us == pytest.approx(2 * 8192**3 / (132 * 1.98e3 * 4096))
    assert memory_us == pytest.approx(3 * 2 * 8192**2 / (H200.memory_tb_per_s * 1e6))
    fp8, tf32 = (report.limits_us(Case(8192, 8192, 8192, dtype=x), H200)[0] for x in ("float8_e4m3fn", "float32"))
    assert 2 * fp8 == compute_us == tf32 / 2
    assert report.limits_us(Case(64, 64, 64, dtype="int8"), ARCHS["b300"])[0] == 0.0


def test_error_is_relative_and_of_the_last_matrix() -> None:
    case = Case(4, 6, 8, batch=2, form="nt")
    rng = np.random.default_rng(0)
    operands = {name: rng.standard_normal(shape) for name, (shape, _) in case.operands.items()}
    sample = accuracy.sample(case, operands)
    assert sorted(sample.rows) == [0, 1, 2, 3] and sorted(sample.cols) == [0, 1, 2, 3, 4, 5]
    product = operands["a"] @ operands["b"].swapaxes(1, 2)
    assert sample.error(np.concatenate([product[:1] * 7, 1.01 * product[1:]])) == pytest.approx(0.01)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_the_formulas_are_the_float64_one(form: str, epilogue: str) -> None:
    """Plain JAX and, through its fallback, ours."""
    case = Case(40, 24, 56, 2 if form == "nt" else 1, form, "float32", "", epilogue)
    (operands,) = programs.make_operands(case, 1)
    sample = accuracy.sample(case, {name: np.asarray(x) for name, x in operands.items()})
    with jax.default_matmul_precision("highest"):
        for product in (products.plain(case), products.ours(case, "ignore")):
            assert sample.error(np.asarray(product(**operands))) < 1e-6


def test_what_takes_time_of_its_own_is_tuned_beside_the_product_alone() -> None:
    """A relu borrows the product's times; a gate and a residual do not."""
    alone = Case(8, 16, 24).problem
    for epilogue in ("", "bias+relu"):
        assert Case(8, 16, 24, epilogue=epilogue).tuned == (alone,)
    for epilogue, own in (
        ("bias+gelu", chain(has_bias=True, activation="gelu")),
        ("relu+residual", chain(activation="relu", has_residual=True)),
        ("bias+silu+residual", chain(has_bias=True, activation="silu", has_residual=True)),
        ("swiglu", unit("silu", is_gated=True)),
    ):
        assert Case(8, 16, 24, epilogue=epilogue).tuned == (alone, dataclasses.replace(alone, epilogue=own))


def test_float64_of_the_activations() -> None:
    """Against values computed by hand, since the test above has one sign of an error only."""
    case = Case(1, 3, 1, dtype="float32", epilogue="silu")
    operands = {"a": np.ones((1, 1)), "b": np.array([[-2.0, 0.0, 3.0]])}
    sample = accuracy.sample(case, operands)
    expected = np.array([-2 / (1 + math.exp(2)), 0.0, 3 / (1 + math.exp(-3))])
    np.testing.assert_allclose(sample.expected[0], expected[sample.cols])
    sample = accuracy.sample(dataclasses.replace(case, epilogue="gelu"), operands)
    np.testing.assert_allclose(sample.expected[0], np.array([-0.0454023, 0.0, 2.9963626])[sample.cols], atol=1e-6)


def test_a_large_result_is_sampled() -> None:
    case = Case(300, 700, 8)
    sample = accuracy.sample(case, {"a": np.ones((300, 8)), "b": np.ones((8, 700))})
    assert sample.expected.shape == (accuracy.NUM_ROWS, accuracy.NUM_COLS)
    assert len(set(sample.rows)) == accuracy.NUM_ROWS and len(set(sample.cols)) == accuracy.NUM_COLS


def test_copies_of_operands_differ() -> None:
    first, second = programs.make_operands(Case(16, 8, 8, dtype="float8_e4m3fn"), 2)
    assert first["a"].dtype == jnp.float8_e4m3fn
    arrays = [np.asarray(x, np.float32) for x in (*first.values(), *second.values())]
    assert len({x.tobytes() for x in arrays}) == 4
    (integers,) = programs.make_operands(Case(64, 8, 64, dtype="int8", out_dtype="int32"), 1)
    assert np.asarray(integers["a"]).min() < -100 and np.asarray(integers["a"]).max() > 100


def test_peers_are_chosen_by_name() -> None:
    assert peers.parse("all") == ("default", "cublaslt", "no-triton", "pallas")
    assert peers.parse("pallas") == ("default", "pallas")
    with pytest.raises(ValueError, match="`--peers` requires all or names of default, .*, got 'cutlass'"):
        peers.parse("default,cutlass")


def test_this_xla_knows_every_set_of_flags() -> None:
    case = Case(8, 8, 8)
    operands = programs.make_operands(case, 1)
    for peer in peers.FLAG_SETS:
        (program,) = programs.compile_peer(peer, case, H200, operands)
        assert program.run(operands)[0].shape == (8, 8)


def test_a_refused_flag_is_not_available_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "FLAG_SETS", {"default": {}, "odd": {"xla_gpu_no_such_flag": True}})
    case = Case(8, 8, 8)
    with pytest.raises(peers.Unavailable, match="No such compile option: 'xla_gpu_no_such_flag'"):
        programs.compile_peer("odd", case, H200, programs.make_operands(case, 1))


@pytest.mark.parametrize(
    ("text", "arch", "reason"),
    [
        ("4096x4096x4096", "b200", "requires Hopper, got b200"),
        ("4096x4096x4096:nt", "h200", "two row-major matrices"),
        ("8*1024x1024x1024", "h200", "two row-major matrices"),
        ("4096x4096x4096:f32", "h200", "16-bit operands"),
        ("4096x4096x4096->f32", "h200", "16-bit operands"),
        ("5000x5000x5000", "h200", "multiples of its tile's, got 5000, 5000 and 5000"),
    ],
)
def test_what_pallas_cannot_do(text: str, arch: str, reason: str) -> None:
    with pytest.raises(peers.Unavailable, match=reason):
        peers.candidates("pallas", Case.from_str(text), ARCHS[arch])


def test_pallas_takes_what_its_tiles_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas, "dot", lambda config, arch: lambda a, b: a @ b)
    found = peers.candidates("pallas", Case(64, 128, 64), H200)
    assert [candidate.config for candidate in found] == ["64x64_wgN_cluster1_minorN"]
    assert len(peers.candidates("pallas", Case(256, 256, 64), H200)) == len(pallas.CONFIGS)


@pytest.mark.parametrize("config", pallas.CONFIGS, ids=str)
def test_pallas_is_called_as_this_jax_wants_it(config: pallas.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to StableHLO with Mosaic's module in it, for a GPU that is not here."""
    module = pytest.importorskip("jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu")
    monkeypatch.setattr(module, "get_num_sms", lambda: H200.num_sms)
    case = Case(512, 256, 128, epilogue="bias+silu")
    operands = [{name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in case.operands.items()}] * 3
    traced = jax.jit(programs._each(products.plain(case, pallas.dot(config, H200)))).trace(operands)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 1  # for three products


@pytest.mark.parametrize("config", pallas.CONFIGS, ids=str)
def test_pallas_has_all_stages_that_fit(config: pallas.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu")
    monkeypatch.setattr(module, "get_num_sms", lambda: H200.num_sms)
    stages = config.stages(H200.smem_bytes)
    assert 4 <= stages <= pallas.MAX_STAGES
    if stages < pallas.MAX_STAGES:
        monkeypatch.setattr(pallas.Config, "stages", lambda self, smem_bytes: stages + 1)
        a, b = (jax.ShapeDtypeStruct((512, 512), "bfloat16") for _ in "ab")
        with pytest.raises(ValueError, match="exceeds available shared memory"):
            pallas.dot(config, H200).trace(a, b).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'absl'"), TypeError("unexpected keyword")])
def test_a_pallas_that_cannot_be_called_is_not_available(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def dot(*args: Any) -> products.Product:
        raise error

    monkeypatch.setattr(pallas, "dot", dot)
    with pytest.raises(peers.Unavailable, match=f"{type(error).__name__}: {error}"):
        peers.candidates("pallas", Case(512, 512, 512), H200)


def test_load_alternates_in_halves_and_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.cycle(["1900 MHz, 600.5 W, 60", "1700 MHz, 700.5 W, 70", "1800 MHz, [N/A], 65"])
    monkeypatch.setattr(machine, "_output", lambda command: next(readings))
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) or jnp.zeros(1) for name in ("ours", "default")}
    case = Case(8, 8, 8)
    loads = sustained.sustain(case, calls, 2, 0.2, period_s=0.01)
    assert [name for name, _ in itertools.groupby(order)] == ["ours", "default", "ours", "default"]
    for load in loads:
        assert load.shape == "8x8x8" and load.samples > 0 and load.seconds >= 0.2
        assert 1700 <= load.clock_mhz <= 1900 and 60 <= load.temperature_c <= 70 and load.power_w < 700
        num_calls = order.count(load.product) - sustained.HALVES  # one of each half is not timed
        assert load.tflops == pytest.approx(num_calls * 2 * case.flops / load.seconds / 1e12)


def test_load_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_output", lambda command: "")
    (load,) = sustained.sustain(Case(8, 8, 8), {"ours": lambda: jnp.zeros(1)}, 1, 0.02, period_s=0.01)
    assert (load.samples, load.clock_mhz) == (0, 0.0) and load.tflops > 0


SMALL = dataclasses.replace(H200, l2_bytes=2**10)


@pytest.fixture
def host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure_handler", lambda: {})
    monkeypatch.setattr(timing, "rest", lambda work_us: None)
    monkeypatch.setattr(timing, "choose_clock", lambda: ("host", timing.host_clock))


def test_the_whole_pass(host_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU ours is XLA's, which the rows must say."""
    texts = ["2*32x16x64:nt", "16x32x8:tn", "24x16x8:bias+silu+residual", "8x16x24:f32:swiglu"]
    cases = [Case.from_str(text) for text in texts]
    settings = bench.Settings(cases, peers.PEERS, 15, sustained=0.02, sustained_cases=cases[:1])
    result = bench.measure_all(settings, SMALL)
    assert [row.shape for row in result.rows] == texts and not result.skipped
    for row in result.rows:
        assert 0 < row.ours.error < 0.01 and row.error_ratio < 1.5
        assert row.ours.low <= row.ours.us <= row.ours.high
        assert set(row.peers) == set(peers.FLAG_SETS) and set(row.unavailable) == {"pallas"}
        assert row.variant == "" and row.fallback.startswith("XLA computes") and row.rounds == 15
    assert [load.product for load in result.sustained] == ["ours", "default"]
    assert render.markdown(result).count("(XLA) |") == 4


def test_a_row_that_fails_is_skipped_and_the_others_count(host_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_ours(case: Case, operands: Any) -> programs.Program:
        if case.m == 8:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory\nand more")
        return programs.compile_peer("default", case, H200, operands)[0]

    monkeypatch.setattr(bench, "compile_ours", compile_ours)
    result = bench.measure_all(bench.Settings([Case(8, 8, 8), Case(16, 8, 8)], ["default"]), SMALL)
    assert [row.shape for row in result.rows] == ["16x8x8"]
    assert result.skipped == {"8x8x8": "RESOURCE_EXHAUSTED: no memory"}


@pytest.mark.long
def test_every_peer_that_a_row_has(host_clock: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pallas in one row, with the configuration that counts, and not in others: shown, drawn and kept with reasons."""
    pytest.importorskip("matplotlib")
    hopper = dataclasses.replace(SMALL, num_sms=132)
    monkeypatch.setattr(pallas, "dot", lambda config, arch: lambda a, b: a @ b)
    cases = [Case.from_str(text) for text in ("64x128x64", "64x128x72", "64x128x64:nt")]
    result = bench.measure_all(bench.Settings(cases, peers.parse("all")), hopper)
    row, *others = result.rows
    assert row.peers["pallas"].config in {"64x64_wgN_cluster1_minorN"} and not row.unavailable
    reasons = [other.unavailable["pallas"] for other in others]
    assert "multiples of its tile's, got 64, 128 and 72" in reasons[0] and "row-major" in reasons[1]
    text = render.markdown(result)
    assert "Pallas us" in text and text.count("| - |") == 4 and "pallas not available" not in text
    report.save(result, tmp_path / "r.json")
    assert main(["bench", "--render", str(tmp_path / "r.json"), "--plots", str(tmp_path)]) == 0
    assert [other.unavailable for other in report.load(tmp_path / "r.json").rows] == [
        {}, *({"pallas": reason} for reason in reasons)
    ]  # fmt: skip
    nowhere = dataclasses.replace(result, rows=tuple(others))
    assert f"pallas not available: {reasons[0]} (rows: 1)." in render.markdown(nowhere)


def test_xla_itself_failing_skips_a_row_and_a_set_of_flags_does_not(
    host_clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_peer(peer: str, case: Case, *args: Any) -> list[programs.Program]:
        if peer == ("default" if case.m == 8 else "cublaslt"):
            raise peers.Unavailable(f"no {peer}")
        return programs.compile_peer(peer, case, *args)

    monkeypatch.setattr(bench, "compile_peer", compile_peer)
    result = bench.measure_all(bench.Settings([Case(8, 8, 8), Case(16, 8, 8)]), SMALL)
    assert result.skipped == {"8x8x8": "no default"}
    assert result.rows[0].unavailable == {"cublaslt": "no cublaslt"}


def test_the_fastest_configuration_counts() -> None:
    programs_ = [programs.Program(lambda operands: [], config=name) for name in "abc"]
    clock_us = {"a": 5.0, "b": 3.0, "c": 4.0}
    by_run = {program.run: clock_us[program.config] for program in programs_}
    assert bench._fastest(programs_, [], lambda run, *_: lambda: by_run[run]).config == "b"


def test_calls_of_a_program_are_named() -> None:
    text = """custom-call(x), custom_call_target="__cublas$lt$matmul"
      fusion(x), kind=kCustom, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
      custom-call(x), custom_call_target="__cublas$lt$matmul" """
    compiled = types.SimpleNamespace(as_text=lambda: text)
    assert programs._program(compiled).calls == ("__cublas$lt$matmul", "__triton_gemm")


def test_a_machine_without_a_gpu_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--shapes", "128x128x128"]) == 2
    assert "`bench` requires a Hopper or Blackwell GPU, got none" in capsys.readouterr().err


def test_the_command_writes_shows_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    asked: list[bench.Settings] = []
    monkeypatch.setattr(bench, "measure", lambda settings, keep: asked.append(settings) or RESULT)
    command = (
        f"bench --shapes 8x8x8:f32 --peers all --seconds 0 --sustained 3 --json {tmp_path}/r.json --plots {tmp_path}"
    )
    assert main(command.split()) == 1  # a row was skipped
    (settings,) = asked
    assert list(settings.cases) == [Case(8, 8, 8, dtype="float32"), *settings.sustained_cases]  # in bursts, too
    assert settings.peers == peers.PEERS
    assert settings.sustained_cases == [Case(8192, 8192, 8192), Case(8192, 14336, 4096)]
    assert report.load(tmp_path / "r.json") == RESULT and (tmp_path / "roofline.png").exists()
    shown = capsys.readouterr().out
    assert "19.0 (no-triton)" in shown and "1 below 0.97 to best, the least " in shown
    assert main(["bench", "--json", str(tmp_path / "r.json")]) == 1
    assert len(asked[1].cases) == 34 and asked[1].peers == tuple(peers.FLAG_SETS) and not asked[1].sustained_cases

"""`python -m jax_bwgemm emulate`: what it prints, how it ends."""

from __future__ import annotations

import gzip
import json
import pathlib

import pytest

from jax_bwgemm.cli.main import main
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.runtime import ffi
from tests.emu.shipped import copy_alone, rewrite_ptx, why_missing

SINGLE = Variant("sm_100f", "bfloat16", "bfloat16", "bfloat16", "k", "n", Tile(128, 128))
INTEGER = Variant("sm_100a", "int8", "int8", "int32", "k", "k", Tile(128, 128, 128))
PAIR = Variant("sm_100f", "bfloat16", "bfloat16", "bfloat16", "k", "n", Tile(256, 256, cta_group=2, cluster_m=2))
HOPPER = Variant("sm_90a", "float16", "float16", "float32", "m", "n", Tile(128, 128))
WHY_NOT = ffi.status() or next(filter(None, map(why_missing, (SINGLE, INTEGER, PAIR, HOPPER))), None)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
pytest.importorskip("rich", reason="tables are drawn with rich")
Output = pytest.CaptureFixture[str]


@pytest.fixture
def own_artifacts(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A directory with one kernel, of single CTAs; returns its PTX."""
    ptx = copy_alone(SINGLE, tmp_path)
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path))
    return ptx


def break_kernel(ptx: pathlib.Path, old: str, new: str) -> None:
    text = gzip.decompress(ptx.read_bytes()).decode()
    assert old in text
    rewrite_ptx(ptx, gzip.compress(text.replace(old, new).encode()))


def test_report(capsys: Output) -> None:
    """A pair's tile: 64 KiB of b cross to its two CTAs, half to each; the first 128 rows of a to the first."""
    command = f"emulate --arch sm_100f --cta-group 2 --tile {PAIR.tile} --shape 256x256x128"
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert out.startswith(PAIR.name)
    for schedule in ("eager", "lazy", "loads-eager", "mmas-eager", "random"):
        assert f"│ {schedule} " in out
    for row in ("warp instructions", "MMAs                               │      8", "barrier waits"):
        assert row in out
    assert "bytes of b that TMA loads per CTA  │ 32,768" in out
    assert "bytes of c that TMA stores per CTA │ 65,536" in out


def test_counts(capsys: Output) -> None:
    """Two pairs' tiles of 256x256 over k = 128: 2 stages of 4 MMAs each, issued by the even CTA of the one pair."""
    command = f"emulate --tile {PAIR.tile} --shape 512x256x128 --schedule lazy --clusters 1 --counts"
    assert main(command.split()) == 0
    rows = capsys.readouterr().out.replace(" ", "").splitlines()
    assert any(row.startswith("4tilesof128x256") and row.endswith("on2CTAs") for row in rows)
    for row in (
        "│bytesofathatTMAloads│65,536│32,768│",
        "│bytesofbthatarrive│65,536│32,768│",
        "│bytesofcthatTMAstores│131,072│65,536│",
        "│MMAinstructions│0to16│4│",
        "│bytesfromotherCTAs'sharedmemory│0│0│",
    ):
        assert row in rows


def test_integers_are_exact(capsys: Output) -> None:
    command = f"emulate --tile {INTEGER.tile} --shape 136x72x144 --dtype s8 --majors kk --schedule random"
    assert main(command.split()) == 0
    assert "│       0.00e+00 │ 0.00e+00 │ ok │" in capsys.readouterr().out


def test_hopper_batch_epilogue_majors_and_one_cluster(capsys: Output) -> None:
    command = "emulate --arch sm_90a --shape 2*136x72x72 --dtype f16 --out-dtype f32 --majors mn --clusters 1"
    assert main([*command.split(), "--schedule", "random", "--seeds", "2", "--device", "h100"]) == 0
    out = capsys.readouterr().out
    assert "2x136x72x72 float16*float16->float32 a:m-major b:n-major identity on grid" in out
    assert "│ random   │    2 │" in out
    for steps, kind in (("--alpha 0.5 --activation relu", "scale_bias_relu"), ("--activation gelu", "bias_gelu")):
        command = f"emulate --shape 40x72x72 --bias {steps} --schedule lazy --cta-group 1"
        assert main(command.split()) == 0
        assert f"_cta1_cluster1x1_{kind}\n" in capsys.readouterr().out


def test_trace_and_timeline(capsys: Output, tmp_path: pathlib.Path) -> None:
    command = f"emulate --cta-group 1 --shape 40x72x72 --schedule lazy --trace 0:4 --timeline {tmp_path / 't.json'}"
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert "tcgen05.mma" in out and "waits for parity" in out and " 1 lanes  " in out
    assert "timeline of schedule lazy" in out
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("--shape 5x5", "`--shape` requires the form [BATCH*]MxNxK, got '5x5'"),
        ("--seeds 0", "`--seeds` requires at least 1, got 0"),
        ("--arch sm_90a --cta-group 2", "`--cta-group` requires 1 with sm_90a, got 2"),
        ("--arch sm_90a --cta-group 1 --dtype f32", "requires a k-major b for float32"),
        (f"--cta-group 1 --tile {PAIR.tile}", f"`--cta-group` requires 2 with the tile {PAIR.tile}, got 1"),
        ("--tile 5x5", "`tile` requires the form '128x256x64_cta1_cluster2x1', got '5x5'"),
        ("--arch sm_90a --device b200", "`emulate` 'sm_90a' requires the `device` h100, h200, got 'b200'"),
        ("--dtype s32", "got int32"),
        ("--clusters 0", "`--clusters` requires at least 1, got 0"),
        ("--cta-group 1 --trace x", "`--trace` requires the form CTA:WARP, got 'x'"),
        (
            "--tile 128x128x64_cta1_cluster1x1 --trace 900:0",
            "`--trace` requires a CTA below 16 and a warp below 6, got 900:0",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command: str, sentence: str, capsys: Output) -> None:
    assert main(["emulate", *command.split()]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_missing_kernel_names_the_command_that_builds_it(own_artifacts: pathlib.Path, capsys: Output) -> None:
    assert main(["emulate", "--tile", str(PAIR.tile)]) == 2
    assert f"`python -m jax_bwgemm build --only '{PAIR.name}'`" in capsys.readouterr().err
    own_artifacts.unlink()
    assert main(["emulate", "--tile", str(SINGLE.tile)]) == 2
    assert (
        f"{own_artifacts} is in the manifest but missing; run `python -m jax_bwgemm build`" in capsys.readouterr().err
    )
    assert main(["emulate", "--arch", "sm_90a", "--activation", "tanh"]) == 2
    error = capsys.readouterr().err
    assert "; it is none of those that `python -m jax_bwgemm build` builds: give another tile" in error
    assert "--only" not in error


def test_a_fault_is_reported_and_exit_code_1(
    own_artifacts: pathlib.Path, capsys: Output, tmp_path: pathlib.Path
) -> None:
    """With a timeline up to the fault."""
    break_kernel(own_artifacts, "fence.proxy.async", "// fence.proxy.async")
    command = f"emulate --tile {SINGLE.tile} --shape 40x72x72 --timeline {tmp_path / 't.json'}"
    assert main(command.split()) == 1
    assert "the emulator stopped the kernel: [missing-proxy-fence]" in capsys.readouterr().err
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_a_wrong_result_is_exit_code_1(own_artifacts: pathlib.Path, capsys: Output) -> None:
    """A shift by one row is no rule's business: only float64 knows."""
    text = gzip.decompress(own_artifacts.read_bytes()).decode()
    first = next(line for line in text.splitlines() if "tcgen05.mma" in line)
    break_kernel(own_artifacts, first, first + "\n" + first)
    assert main(f"emulate --tile {SINGLE.tile} --shape 40x72x72 --schedule lazy".split()) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_result_that_is_not_written_is_exit_code_1(own_artifacts: pathlib.Path, capsys: Output) -> None:
    """The result starts as NaN, and so does its error."""
    break_kernel(own_artifacts, "cp.async.bulk.tensor.3d.global", "// cp.async.bulk.tensor.3d.global")
    assert main(f"emulate --tile {SINGLE.tile} --shape 40x72x72 --schedule lazy".split()) == 1
    assert "nan" in capsys.readouterr().out

"""The command line: what it prints and how it ends, with and without what a machine may lack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jax_bwgemm.cli.main import main

ROOT = Path(__file__).parent.parent.parent


def test_explain_names_every_candidate_and_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "8192", "8192", "8192", "--device", "b200"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("8192x8192x8192 bfloat16*bfloat16->bfloat16 a:k-major b:n-major identity")
    assert "256x256x64_cta2_cluster2x1" in text and "128x256x64_cta1_cluster1x1" in text
    assert "runs " in text


def test_explain_takes_dtypes_majors_epilogue_and_tile(capsys: pytest.CaptureFixture[str]) -> None:
    command = "explain 512 256 128 --batch 3 --dtype f16 --out-dtype f32 --a-major m --b-major k --bias --alpha 2"
    assert main([*command.split(), "--activation", "relu", "--tile", "128x128x64_cta1_cluster1x1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("3x512x256x128 float16*float16->float32 a:m-major b:k-major scale_bias_relu")


def test_explain_says_why_xla_takes_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "512", "512", "512", "--dtype", "s8", "--out-dtype", "s32", "--device", "b300"]) == 0
    assert "because sm_103a has no tensor core instruction for int8" in capsys.readouterr().out
    assert main(["explain", "512", "512", "512", "--dtype", "s8"]) == 0
    assert "runs XLA's dot_general, because the result of int8 and int8 requires int32" in capsys.readouterr().out


def test_explain_takes_operands_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    command = "explain 512 512 512 --dtype e4m3 --b-dtype e5m2 --b-major k --device b200"
    assert main([*command.split(), "--out-dtype", "bf16"]) == 0
    assert capsys.readouterr().out.startswith("512x512x512 float8_e4m3fn*float8_e5m2->bfloat16")
    assert main(command.split()) == 2
    assert "`--out-dtype` requires a dtype for operands that differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("explain 0 1 1", "`m` requires at least 1, got 0"),
        ("explain 1 1", "`k` requires at least 1, got None"),
        ("explain 128 128 128 --tile 5x5", "`tile` requires the form '128x256x64_cta1_cluster2x1', got '5x5'"),
        ("build --arch sm_80", "`target` requires one of sm_90a, sm_100a, sm_103a, got 'sm_80'"),
        ("build --arch ,", "`--arch` requires at least one of"),
        ("build --out /dev/null/here --only sm_90a_pad_8bit", "Not a directory: '/dev/null/here'"),
        ("build --jobs 0", "`--jobs` requires at least 1, got 0"),
        ("build --only nothing", "`--only` requires a glob that some variant's name matches, got 'nothing'"),
        ("bench --shapes 5x5", "a shape requires the form"),
        ("bench --render no-such-file", "a result file requires what this version of `bench` writes"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_module_runs_without_the_compiler_and_without_rich() -> None:
    """What a user who installed the wheel has: jax and numpy."""
    blocked = "import sys; sys.modules |= dict.fromkeys(('cutlass', 'rich'))\n"
    code = blocked + "from jax_bwgemm.cli.main import main; sys.exit(main(['explain', '512', '512', '512']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_build_with_nothing_to_do_does_not_import_the_compiler() -> None:
    code = "import sys; from jax_bwgemm.kernels.aot import catalog, make; print('cutlass' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_reader_that_leaves_is_no_error_message() -> None:
    command = [sys.executable, "-u", "-m", "jax_bwgemm", "explain", "4096", "4096", "4096", "--device", "h200"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        assert done.stdout is not None and done.stderr is not None
        done.stdout.close()
        assert done.stderr.read() == b""
    assert done.returncode == 1

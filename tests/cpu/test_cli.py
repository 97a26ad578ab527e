"""The command line: what it prints and how it ends, with and without what a machine may lack."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_bwgemm.cli.explain_json import of_function
from jax_bwgemm.cli.main import main
from jax_bwgemm.explain import FunctionExplanation
from jax_bwgemm.runtime.record import Product

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
    assert "because sm_100f has no tensor core instruction for int8" in capsys.readouterr().out
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
        ("explain 4096 4096", "`explain` requires m, n and k, got 4096 4096: give k, too"),
        ("explain", "`explain` requires m, n and k, got none: give m, n, k, too"),
        (
            "explain --choices --json",
            "`--json`, `--plot` and `--function` require neither `--published` nor `--choices`",
        ),
        ("explain --published --choices", "`explain` requires `--published` or `--choices`, got both"),
        ("explain --choices --install", "`--install` requires `--function`, got none"),
        ("bench --layers --models", "`bench` requires one benchmark at a time, got --models and --layers"),
        ("bench --soak 0 --cover 0", "`bench` requires one benchmark at a time, got --cover and --soak"),
        ("bench --tune --random 5", "`--random` requires products alone, got --tune: leave it out"),
        ("bench --random 5 --of tall", "`--of` requires --regret or --orders, got products: leave it out"),
        ("bench --random -5", "`--random` requires at least 1, got -5"),
        ("bench --random x", "argument --random: invalid int value: 'x'; see `python -m jax_bwgemm bench --help`"),
        ("bench --nope", "unrecognized arguments: --nope; see `python -m jax_bwgemm bench --help`"),
        ("nope", "argument command: invalid choice: 'nope'"),
        ("emulate --alpha nan", "`--alpha` requires a number that is finite in float32, got nan"),
        ("emulate --alpha=-inf", "`--alpha` requires a number that is finite in float32, got -inf"),
        ("emulate --alpha 1e39", "`--alpha` requires a number that is finite in float32, got 1e+39"),
        ("explain 512 512 --choices", "`--choices` requires no sizes beside it, got 512 512"),
        (
            "explain --published --tile 5x5 --device b200",
            "no option of a single product beside it, got --device, --tile",
        ),
        (
            "explain --function json:dumps --tile 5x5 --dtype f32 --bias",
            "`--function` requires no option of a single product beside it, got --dtype, --bias, --tile",
        ),
        ("explain --function json:dumps", "a callable without arguments that returns (f, *args), got 'json:dumps'"),
        ("explain --function .:x", "a callable without arguments that returns (f, *args), got '.:x'"),
        ("explain --function ..fm:good", "a callable without arguments that returns (f, *args), got '..fm:good'"),
        ("explain 1 1 1 --install", "`--install` requires `--function`, got none"),
        ("emulate --clusters -1 --shape 128x128x64 --arch sm_90a", "`--clusters` requires at least 1, got -1"),
        ("emulate --seeds 0", "`--seeds` requires at least 1, got 0"),
        ("bench --calibrate no-such-file", "`bench` requires a file that `--regret --json` wrote, got no-such-file"),
        ("bench --spare no-such-file", "`bench` requires a file that `--regret --json` wrote, got no-such-file"),
        ("explain 1 1 1 --batch 0", "`batch` requires at least 1, got 0"),
        ("explain 128 128 128 --tile 5x5", "`tile` requires the form '128x256x64_cta1_cluster2x1', got '5x5'"),
        ("build --arch sm_80", "`target` requires one of sm_90a, sm_100f, sm_100a, got 'sm_80'"),
        ("build --arch sm_103a", "`target` requires one of sm_90a, sm_100f, sm_100a, got 'sm_103a': pass 'sm_100f'"),
        ("build --arch ,", "`--arch` requires at least one of"),
        ("build --out /dev/null/here --only sm_90a_pad_8bit", "Not a directory: '/dev/null/here'"),
        ("build --jobs 0", "`--jobs` requires at least 1, got 0"),
        ("build --only nothing", "`--only` requires a glob that some variant's name matches, got 'nothing'"),
        ("bench --shapes 5x5", "a shape requires the form"),
        ("bench --render no-such-file", "a result file requires what this version of `bench` writes"),
        ("bench --fill nope.md", "`--fill` requires a page that can be read, got nope.md: No such file or directory"),
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


def test_explain_as_json(capsys: pytest.CaptureFixture[str], artifacts_dir: Path) -> None:
    assert main(["explain", "8192", "8192", "8192", "--device", "b200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kernel"].startswith("sm_100f_bf16_bf16_bf16_knn_") and found["device"] == "b200"
    assert found["problem"].startswith("8192x8192x8192 bfloat16") and found["flops"] == 2 * 8192**3
    (chosen,) = (c for c in found["candidates"] if c["chosen"])
    assert chosen["tile"] in found["kernel"] and chosen["predicted_us"] > 0 and chosen["reason"] is None
    assert found["plan"]["source"] == "model" and found["plan"]["raster_order"] in ("groups", "snake")
    assert main(["explain", "512", "512", "512", "--dtype", "s8", "--json"]) == 0
    xlas = json.loads(capsys.readouterr().out)
    assert xlas["kernel"] is None and "requires int32" in xlas["reason"] and "plan" not in xlas


FUNCTION = """
import jax, jax.numpy as jnp, jax_bwgemm
X = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
N = jax.ShapeDtypeStruct((4096, 4096), jnp.int32)
made = lambda: (lambda x, n: (jax_bwgemm.matmul(jax_bwgemm.matmul(x, x), x), jax_bwgemm.matmul(n, n)), X, N)
none = lambda: (lambda x: x + 1, X)
jaxs = lambda: (lambda x: jax_bwgemm.matmul(x @ x, x) @ x, X)
wrong = lambda: (X, X)
number = 3
"""


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, artifacts_dir: Path) -> None:
    (tmp_path / "step_of_mine.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "step_of_mine", raising=False)


@pytest.mark.usefixtures("function")
def test_explain_takes_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--function", "step_of_mine:made", "--device", "h200"]) == 0
    assert capsys.readouterr().out.startswith("products: 3, 2 of them by our kernels, predicted to take ")
    assert main(["explain", "--function", "step_of_mine:made", "--device", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [bool(product["kernel"]) for product in found["products"]].count(True) == 2
    assert found["us"] == sum(product["us"] for product in found["products"]) > 0
    for name, rest in (("wrong", "which returns"), ("number", ""), ("nothing", ""), ("", "")):
        assert main(["explain", "--function", f"step_of_mine:{name}"]) == 2
        error = capsys.readouterr().err
        assert "requires MODULE:NAME, a callable without arguments that returns (f, *args)" in error and rest in error
    assert main(["explain", "--function", "step_of_nobody:made"]) == 2
    assert "No module named 'step_of_nobody'" in capsys.readouterr().err
    assert main(["explain", "5", "--function", "step_of_mine:made"]) == 2
    assert "`--function` requires no sizes beside it, got 5" in capsys.readouterr().err


@pytest.mark.usefixtures("function")
def test_explain_counts_jaxs_own_products(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", "--function", "step_of_mine:jaxs", "--device", "h200"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert text.startswith("products: 1, 1 of them")
    assert text.endswith("\nand 2 of JAX's own (`@`, einsum), which `jax_bwgemm.install()` takes over: see --install\n")
    assert main([*command, "--install"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("products: 3, ") and "JAX's own" not in text
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["products"]), found["left_to_jax"]) == (1, 2)


def test_explain_plans_for_the_device_of_the_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value, rest, device in (
        ("UNSET", "", "", "h200"),
        ("DEVICE", "b300", "", "b300"),
        ("EMULATE", "sm_100f", "", "b200"),
        ("DEVICE", "b300", "--device h100", "h100"),
    ):
        with monkeypatch.context() as context:
            context.setenv(f"JAX_BWGEMM_{name}", value)
            assert main(["explain", "512", "512", "512", "--json", *rest.split()]) == 0
        assert json.loads(capsys.readouterr().out)["device"] == device
    monkeypatch.setenv("JAX_BWGEMM_DEVICE", "nonsense")
    assert main(["explain", "512", "512", "512"]) == 2
    assert "got 'nonsense', from JAX_BWGEMM_DEVICE" in capsys.readouterr().err


PLOTTED = (
    "4096 4096 4096",
    "5000 5000 5000 --tile 128x256x64_cta1_cluster2x1_streamk",
    "4096 4096 4096 --batch 3 --device b200",
    "1 28672 4096",  # swapped
    "40000 60000 4096",
)


@pytest.mark.parametrize("text", PLOTTED)
def test_explain_draws_a_product(text, artifacts_dir, swapped_rows, tmp_path, capsys) -> None:
    """The same picture every time: tiles, waves and order; its text names the kernel."""
    for name in ("one.svg", "two.svg"):
        assert main(["explain", *text.split(), "--plot", str(tmp_path / name)]) == 0
    said = capsys.readouterr().out
    runs = said.partition("\nruns ")[2].partition(",")[0]
    picture = (tmp_path / "one.svg").read_text()
    assert runs in picture and "clusters at work" in picture and "coloured by wave" in picture
    assert ("divided along k" in picture) == ("are divided along k" in said)
    assert picture == (tmp_path / "two.svg").read_text()


def test_the_waves_that_are_drawn(artifacts_dir, monkeypatch, tmp_path, capsys) -> None:
    """5000x5000 is 20x20 cluster tiles of 256x256 on 66 clusters: the last 70 are shared, the others 5 whole waves."""
    from matplotlib.axes import Axes

    drawn: list[Any] = []
    bar, imshow = Axes.bar, Axes.imshow
    monkeypatch.setattr(Axes, "bar", lambda self, x, height, **o: (drawn.append(height), bar(self, x, height, **o))[1])
    monkeypatch.setattr(Axes, "imshow", lambda self, x, **o: (drawn.append(x), imshow(self, x, **o))[1])
    assert main(["explain", *PLOTTED[1].split(), "--plot", str(tmp_path / "x.png")]) == 0
    tiles, whole, shared = drawn
    assert tiles.shape == (20, 20) and whole.tolist() == [66] * 5 and shared == 66
    assert np.unique(tiles, return_counts=True)[1].tolist() == [66] * 5 + [70]
    assert tiles[:8, :8].max() == 0  # a wave is a block of the result


TALL = "128x128x64_cta1_cluster1x1"  # of 4688 x 4688 cluster tiles there


def test_what_cannot_be_drawn(artifacts_dir, tmp_path, capsys, monkeypatch) -> None:
    for text, sentence in (
        ("512 512 512 --dtype s8 --plot x.png", "requires a product that a kernel computes, got XLA's: the result of"),
        ("512 512 512 --plot x.gif", "`--plot` requires a file that ends with one of .pdf, .png, .svg, got 'x.gif'"),
        (f"600000 600000 64 --tile {TALL} --plot x.png", "requires at most 4194304 cluster tiles, got 21977344"),
    ):
        monkeypatch.chdir(tmp_path)
        assert main(["explain", *text.split()]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.usefixtures("function")
def test_explain_draws_a_function(tmp_path, capsys) -> None:
    assert main(["explain", "--function", "step_of_mine:made", "--plot", str(tmp_path / "x.svg")]) == 0
    picture = (tmp_path / "x.svg").read_text()
    assert picture.count("sm_90a_bf16") == 2 and "XLA&#x27;s, because" in picture.replace("'", "&#x27;")
    assert "3 products, predicted to take" in picture
    assert main(["explain", "--function", "step_of_mine:none", "--plot", str(tmp_path / "x.svg")]) == 2
    assert "`--plot` requires a function with products, got none" in capsys.readouterr().err


def test_without_matplotlib_a_plot_says_what_is_missing() -> None:
    blocked = "import sys; sys.modules |= dict.fromkeys(('matplotlib', 'rich'))\n"
    code = blocked + "from jax_bwgemm.cli.main import main; sys.exit(main('explain 9 9 9 --plot x.png'.split()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and not (ROOT / "x.png").exists()
    assert done.stderr.endswith("plots require matplotlib, which is not installed: pip install matplotlib\n")


def test_a_time_that_is_unknown_is_null() -> None:
    """JSON has no infinity."""
    unknown = FunctionExplanation((Product("4x4x4", "kernel", math.inf), Product("8x8x8", "kernel", 1.5)))
    found = json.loads(json.dumps(of_function(unknown), allow_nan=False))
    assert (found["flops"], found["min_bytes"]) == (0, 0)
    assert found["us"] is None and [product["us"] for product in found["products"]] == [None, 1.5]

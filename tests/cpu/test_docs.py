"""The documentation is true: its code runs and prints what it says, its commands and messages exist."""

from __future__ import annotations

import ast
import doctest
import fnmatch
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import DOCS, PAGES, ROOT, Block, blocks, commands, messages, name

import jax_bwgemm
from jax_bwgemm.cli import main as cli
from jax_bwgemm.kernels.aot.catalog import catalogue
from jax_bwgemm.runtime import config, record

MOST_NOT_RUN = 3  # blocks that need a GPU: few enough to be read by a person
WITH_CODE = [page for page in PAGES if any(block.language in ("python", "sh") for block in blocks(page))]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As the page on fallbacks says; what a page installs or writes ends with it."""
    monkeypatch.setenv("JAX_BWGEMM_ON_FALLBACK", "ignore")
    for variable in [x for x in os.environ if re.fullmatch("JAX_BWGEMM_(COMPLETE|SHARE|FUZZ|MACHINE|BATCH_CASES)", x)]:
        monkeypatch.delenv(variable)  # which `doctor` does not know
    (tmp_path / "tables").mkdir()
    monkeypatch.setenv("JAX_BWGEMM_TABLES", str(tmp_path / "tables"))
    monkeypatch.chdir(tmp_path)
    before, level = dict(os.environ), record.LOGGER.level
    jax_bwgemm.stats(reset=True)
    yield
    record.LOGGER.setLevel(level)
    os.environ.clear()
    os.environ.update(before)
    jax_bwgemm.uninstall()
    config.forget_reported()


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_code_runs_and_prints_what_the_page_says(page: Path, quiet: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Python in one namespace a page; a command that is followed by its output as the command line does it."""
    if page.stem == "flax":
        pytest.importorskip("flax")
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        capsys.readouterr()
        if block.language == "python" and block.is_run:
            code = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's line
            exec(compile(code, name(page), "exec"), namespace)
        elif block.language == "sh" and block.output is not None:
            command = shlex.split(block.text, comments=True)
            assert command[:3] == ["python", "-m", "jax_bwgemm"], f"{name(page)}:{block.line}"
            assert cli.main(command[3:]) == 0
        else:
            continue
        if block.output is not None:
            _check_output(block, capsys.readouterr().out, page)


def _check_output(block: Block, got: str, page: Path) -> None:
    assert block.output is not None
    if not doctest.OutputChecker().check_output(block.output, got, FLAGS):
        pytest.fail(f"{name(page)}:{block.line} says\n{block.output}\nand prints\n{got}")


def test_few_blocks_are_not_run() -> None:
    found = [f"{name(page)}:{block.line}" for page in PAGES for block in blocks(page) if not block.is_run]
    assert len(found) <= MOST_NOT_RUN, found


def test_a_block_says_what_it_is() -> None:
    """So that no code hides in one that is not looked at."""
    legal = {"python", "sh", "text", "{toctree}", "{shipped}", "{include}", "{eval-rst}"}
    for page in PAGES:
        assert {block.language for block in blocks(page)} <= legal, name(page)


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=name)
def test_commands_are_ours(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(page):
        if not command or command == "...":
            continue
        try:
            cli._parser().parse_args(shlex.split(command))
        except SystemExit as error:
            assert error.code == 0, f"{name(page)}: python -m jax_bwgemm {command}\n{capsys.readouterr().err}"


def test_a_build_of_some_kernels_names_kernels() -> None:
    text = "".join(page.read_text() for page in [*PAGES, ROOT / "CONTRIBUTING.md"])
    globs = set(re.findall(r"--only '(.+?)'", text))
    names = [variant.name for variant in catalogue()]
    assert globs and all(fnmatch.filter(names, glob) for glob in globs), globs


def test_targets_of_make_and_examples_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    for page in PAGES:
        text = page.read_text()
        quoted = re.findall(r"(?:^ *|`)make ((?:[a-z-]+\b ?)+)", text, re.M)
        assert {target for found in quoted for target in found.split()} <= targets, name(page)
        for path in re.findall(
            r"(?<![\w./])(?:examples|tests|jax_bwgemm|docs|ffi)/[\w/.-]+\.(?:py|json|cc|txt|md)", text
        ):
            assert (ROOT / path).is_file(), f"{name(page)}: {path}"


def test_links_are_readable_as_files_too() -> None:
    """On a forge, which shows no text for a link without one."""
    for page in PAGES:
        for text, target in re.findall(r"!?\[([^\]]*)\]\(([^)#\s]+)", page.read_text()):
            assert text, f"{name(page)}: {target}"
            assert "://" in target or (page.parent / target).exists(), f"{name(page)}: {target}"


def _templates() -> Iterator[str]:
    """Every text of the sources that is no docstring, with `...` for what is put in."""
    for path in (ROOT / "jax_bwgemm").rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(x.value if isinstance(x, ast.Constant) else "..." for x in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value
    for path in (ROOT / "ffi").glob("*.cc"):
        yield from re.findall(r'"((?:[^"\\]|\\.)*)"', re.sub(r'"\s*\n\s*"', "", path.read_text()))


def test_quoted_messages_are_those_of_the_source() -> None:
    templates, quoted = list(_templates()), messages(DOCS / "troubleshooting.md")
    assert len(quoted) > 40
    for message in quoted:
        pattern = re.compile(".*?".join(map(re.escape, message.split("..."))), re.S)
        assert any(pattern.search(template) for template in templates), message


def test_every_variable_of_the_environment_is_documented() -> None:
    page = (DOCS / "api/config.md").read_text()
    documented = set(re.findall(r"^\| `(JAX_BWGEMM_\w+)`", page, re.M))
    named = {text for text in _templates() if re.fullmatch(r"JAX_BWGEMM_[A-Z_]+", text)}
    assert named | set(config._VARIABLES) == documented


def test_every_rule_of_the_emulator_is_documented() -> None:
    page, folder = (DOCS / "emulator.md").read_text(), ROOT / "jax_bwgemm/emulator"
    table = page[page.index("| rule |") : page.index("PTX that it cannot run")]
    documented = {found for row in table.splitlines() if row for found in re.findall(r"`([a-z-]+)`", row.split("|")[1])}
    trees = [ast.parse(path.read_text()) for path in folder.glob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    raised = [node for node in calls if ast.unparse(node.func).rpartition(".")[2] in ("Fault", "fault")]
    given = {x.value for node in raised for x in ast.walk(node.args[0]) if isinstance(x, ast.Constant)}
    sources = "".join(path.read_text() for path in folder.glob("*.py"))
    made = {rule for rule in documented if f'"{rule}"' in sources or re.sub("-.*-", "-{name}-", rule) in sources}
    assert given <= documented == made, (given - documented, documented - made)

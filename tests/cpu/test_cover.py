"""`bench --cover`: the distribution, the losses, what would be added and what is never chosen."""

from __future__ import annotations

import dataclasses

import pytest

from jax_bwgemm.bench import cover
from jax_bwgemm.bench.cases import Case
from jax_bwgemm.cli.main import main
from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels.aot.catalog import catalogue

BF16 = ("bfloat16",) * 3
SLOW, FAST, OTHER = (Variant("sm_90a", *BF16, "k", "n", Tile(64, n)) for n in (64, 128, 256))
TURNED = dataclasses.replace(FAST, a_major="m")
CASE = Case.from_str("1024x1024x1024")


def product(kind: str, without_us: float = 100.0, **times_us: float) -> cover.Drawn:
    kernels = {"slow": SLOW, "fast": FAST, "other": OTHER, "turned": TURNED}
    return cover.Drawn(kind, CASE, {kernels[name]: us for name, us in times_us.items()}, without_us)


def test_loss() -> None:
    """To the best of all tiles; where none ships, of what takes over."""
    of = product("", 6.0, slow=5.0, fast=4.0)
    assert of.loss([SLOW]) == pytest.approx(0.25) and of.loss([SLOW, FAST]) == 0
    assert of.loss([OTHER]) == of.loss([]) == pytest.approx(0.5)


def test_the_expected_loss_weighs_classes_by_their_shares() -> None:
    """Class "" has 0.34 and ":f16" 0.12, however many products each has."""
    products = [product("", slow=5.0, fast=4.0)] * 3 + [product(":f16", slow=6.0, fast=4.0)]
    assert cover.expected(products, [SLOW]) == pytest.approx((0.34 * 0.25 + 0.12 * 0.5) / 0.46)
    assert cover.by_class(products, [SLOW]) == {"": [0.25] * 3, ":f16": [0.5]}


def test_additions_are_the_greatest_gain_a_kernel_first() -> None:
    """FAST and TURNED are one tile under two majors: 0.25 + 0.25 for two kernels; OTHER alone gains 0.3."""
    products = [
        product("", slow=5.0, fast=4.0),
        product("", slow=5.0, turned=4.0),
        product("", slow=5.2, other=4.0),
    ]
    found = list(cover.additions(products, [SLOW], budget=3))
    assert [added for added, _ in found] == [(OTHER,), (FAST, TURNED)]
    assert [loss for _, loss in found] == pytest.approx([0.5 / 3, 0.0])
    assert [added for added, _ in cover.additions(products, [SLOW], budget=1)] == [(OTHER,)]
    assert not list(cover.additions(products, [SLOW, FAST, TURNED, OTHER], budget=9))


def test_unused() -> None:
    """What is chosen for a product is not, nor is the only tile of its kind."""
    archs = [ARCHS["h100"], ARCHS["h200"]]
    never = cover.unused([Case.from_str("4096x4096x4096:bias+relu"), Case.from_str("64x4096x4096")], archs)
    assert never and all(own.target == "sm_90a" for own in never)
    crossed = [own for own in catalogue(["sm_90a"]) if own.a_dtype == "bfloat16" and own.out_dtype == "float16"]
    assert crossed and not set(crossed) & set(never)
    one = Case.from_str("300x5504x40:f16")
    chosen = cover.choice(one, "h200").variant
    assert chosen in cover.unused([CASE], archs) and chosen not in cover.unused([one], archs)


@pytest.mark.long
def test_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a seed; of every class; of aligned sizes and others; gradients of plain products only."""
    assert sum(cover.CLASSES.values()) == pytest.approx(1) == sum(cover.KINDS.values())
    monkeypatch.setattr(cover, "CLASSES", {"": 0.5, ":f16": 0.3, ":bias+gelu": 0.2})
    one = cover.drawn(24, 0, ARCHS["h200"])
    assert [own.class_name for own in one] == [""] * 24 + [":f16"] * 24 + [":bias+gelu"] * 24
    again = (*one[:2], *one[24:26], *one[48:50])
    assert [own.case for own in cover.drawn(2, 0, ARCHS["h200"])] == [own.case for own in again]
    assert cover.drawn(1, 1, ARCHS["h200"])[0].case != one[0].case
    assert all(own.case.flops >= cover.MIN_FLOPS and own.times_us for own in one)
    assert {own.case.form for own in one} == {"nn", "nt", "tn"}
    assert not any(own.case.form == "tn" and own.case.epilogue for own in one)
    assert {own.case.batch > 1 for own in one} == {own.case.n % 8 == 0 for own in one} == {True, False}


BOUNDS = {"": 0.02, ":bias": 0.08, ":bias+gelu": 0.08, ":residual": 0.08, ":f16": 0.12, ":f16:bias": 0.2}


@pytest.mark.long
def test_what_the_catalogue_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on the mean of a class, of products that it was not chosen by: who removes a kernel or adds a tile to the
    planner's lists sees what it costs."""
    monkeypatch.setattr(cover, "CLASSES", dict.fromkeys(BOUNDS, 1 / len(BOUNDS)))
    products = cover.drawn(12, 5, ARCHS["h200"])
    losses = cover.by_class(products, catalogue(["sm_90a"]))
    found = {name: sum(losses[name]) / len(losses[name]) for name in BOUNDS}
    assert all(found[name] <= bound for name, bound in BOUNDS.items()), found


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--cover", "1", "--budget", "2", "--device", "b200"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("b200: predicted loss") and "kernels are chosen for none of" in text
    assert main(["bench", "--cover", "0"]) == 2
    assert "`--cover` requires at least 1 product of each class, got 0" in capsys.readouterr().err


def test_anew_names_what_to_ship_and_what_it_loses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first kernel alone loses most; all that products want lose nothing."""
    monkeypatch.setattr(cover, "CLASSES", {"": 1.0})
    texts = []
    for budget in ("1", "1000"):
        assert main(["bench", "--cover", "3", "--anew", "--budget", budget]) == 0
        texts.append(capsys.readouterr().out.splitlines())
    one, all_of_them = texts
    assert one[1] == all_of_them[1] and len(one) == 5 < len(all_of_them)
    assert all_of_them[-1].endswith(" 0.00 %") and not one[-1].endswith(" 0.00 %")


@pytest.mark.long
def test_what_the_catalogue_loses_by_class() -> None:
    """To the best of all tiles in the planner's lists, as predicted, of products that it was not chosen by."""
    products = cover.drawn(24, 7, ARCHS["h200"])
    ships = catalogue(["sm_90a"])
    means = {name: sum(losses) / len(losses) for name, losses in cover.by_class(products, ships).items()}
    assert means[""] < 0.01 and max(means.values()) < 0.12 and cover.expected(products, ships) < 0.04, means

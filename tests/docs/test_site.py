"""The pages as they were built: every one is near, every name is there, and nothing comes from elsewhere."""

from __future__ import annotations

import html.parser
import importlib
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import jax_bwgemm

ROOT = Path(__file__).parent.parent.parent
DOCS, SITE = ROOT / "docs", ROOT / "build/docs"
GENERATED = {"genindex.html", "search.html", "py-modindex.html"}
MOST_CLICKS = 2
MODULES = "checkpoint_policies", "export", "emulator", "flax", "flax.nnx", "flax.linen"  # beside what `jax_bwgemm` has


class _Links(html.parser.HTMLParser):
    """Where the text of a page leads to, without the navigation around it, and what the page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self._depth = 0  # inside of <article>
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "article":
            self._depth += 1
        if tag == "a" and self._depth and given.get("href"):
            self.links.append(given["href"] or "")
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.loads.append(given["src"] or "")
        if tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon", "preconnect"):
            self.loads.append(given["href"] or "")

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "article"


def pages() -> list[Path]:
    found = sorted(SITE.rglob("*.html"))
    assert found, f"{SITE} has no pages: `make docs`"
    return found


def neighbours(page: Path) -> set[Path]:
    links = (urldefrag(link).url for link in _Links(page.read_text()).links)
    return {(page.parent / unquote(link)).resolve() for link in links if link and "://" not in link}


def test_every_page_is_built() -> None:
    sources = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert sources == {page.relative_to(SITE) for page in pages() if page.name not in GENERATED}


def test_every_page_is_reached_in_two_clicks() -> None:
    """By links of the text, as on a telephone, whose navigation is folded away."""
    reached = {(SITE / "index.html").resolve()}
    for _ in range(MOST_CLICKS):
        reached |= {link for page in reached if page.suffix == ".html" and page.is_file() for link in neighbours(page)}
    assert {page.resolve() for page in pages() if page.name not in GENERATED} <= reached


def test_links_lead_somewhere() -> None:
    for page in pages():
        assert all(link.exists() for link in neighbours(page)), [x for x in neighbours(page) if not x.exists()]


def test_nothing_is_loaded_from_elsewhere() -> None:
    for page in pages():
        assert not [load for load in _Links(page.read_text()).loads if "//" in load], page
    for style in SITE.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text()), style


def test_every_public_name_is_in_the_reference() -> None:
    from sphinx.util.inventory import InventoryFile

    with (SITE / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", os.path.join)
    names = {name for kind, own in inventory.items() if kind.startswith("py:") for name in own}
    public = {f"jax_bwgemm.{name}" for name in jax_bwgemm.__all__} - {"jax_bwgemm.__version__"}
    for module in (importlib.import_module(f"jax_bwgemm.{name}") for name in MODULES):
        public |= {f"{module.__name__}.{name}" for name in _public(module)}
    assert public <= names, sorted(public - names)


def _public(module: Any) -> list[str]:
    """What a module says is public, or what is defined in it."""
    named = [name for name, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
    found: list[str] = getattr(module, "__all__", [name for name in named if not name.startswith("_")])
    return found


def test_docstrings_are_rendered_and_not_shown_as_they_are_written() -> None:
    for page in (SITE / "api").rglob("*.html"):
        text = page.read_text()
        assert "system-message" not in text and "Args:" not in text, page

"""Pictures of rectangles and text, as SVG: the same bytes from the same input."""

from __future__ import annotations

import dataclasses
from html import escape
from pathlib import Path

FONT = "font-family='DejaVu Sans, Arial, sans-serif'"
INK, PALE, GRID = "#222222", "#eeeeee", "#999999"
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")  # Paul Tol's bright scheme


@dataclasses.dataclass
class Picture:
    """Marks are painted in the order in which they are added; lengths in pixels."""

    width: float
    height: float
    marks: list[str] = dataclasses.field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str = PALE, label: str = "") -> None:
        at = f"x='{x:.1f}' y='{y:.1f}' width='{max(width, 0.6):.1f}' height='{height:.1f}'"
        title = f"<title>{escape(label)}</title>" if label else ""
        edge = f"stroke='{GRID}' stroke-width='0.5'" if width > 3 else ""
        self.marks.append(f"<rect {at} fill='{fill}' {edge}>{title}</rect>")

    def text(self, x: float, y: float, words: str, size: int = 12, anchor: str = "start", fill: str = INK) -> None:
        at = f"x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' fill='{fill}' {FONT}"
        self.marks.append(f"<text {at}>{escape(words)}</text>")

    def write(self, path: Path) -> None:
        size = f"width='{self.width:g}' height='{self.height:g}' viewBox='0 0 {self.width:g} {self.height:g}'"
        lines = [f"<svg xmlns='http://www.w3.org/2000/svg' {size}>", *self.marks, "</svg>"]
        lines.insert(1, f"<rect width='{self.width:g}' height='{self.height:g}' fill='white'/>")
        path.write_text("\n".join(lines) + "\n")

"""Draws the pictures of the documentation: design/NAME.dot to design/NAME.svg, by graphviz's `dot`.

    python docs/draw_pictures.py

Each picture names the SHA-256 of its source, so that a test sees one that is older than its source without graphviz.
"""

import hashlib
import subprocess
from pathlib import Path

DESIGN = Path(__file__).parent / "design"


def draw(source: Path) -> str:
    """Return the SVG of a .dot file, with the digest of the file in a comment on its last line."""
    drawn = subprocess.run(["dot", "-Tsvg", str(source)], check=True, capture_output=True, text=True).stdout
    return f"{drawn.rstrip()}\n{make_mark(source)}\n"


def make_mark(source: Path) -> str:
    """Return the comment that a picture drawn from this source ends with."""
    return f"<!-- source sha256: {hashlib.sha256(source.read_bytes()).hexdigest()} -->"


def main() -> None:
    """Draw every picture."""
    for source in sorted(DESIGN.glob("*.dot")):
        source.with_suffix(".svg").write_text(draw(source))


if __name__ == "__main__":
    main()

"""Draw the README's figures of one SIGKILL as bars, as two SVGs: from the kill to the next step, torchrun and ttprun.

    python scripts/bench/bars.py --out docs/bars        # writes docs/bars-light.svg and docs/bars-dark.svg

Nothing is run: the figures are those of the table "What it costs", which scripts/bench/recovery.py has measured. Begin
with main().
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

from timeline import COLOURS

README = Path(__file__).resolve().parents[2] / "README.md"
PROGRAMS = ("a loop of your own", "Lightning", "transformers")
# "0.4 s; without a standby 2.9 s (torchrun: 3.0 s)": ttprun's figure, and torchrun's.
FIGURES = re.compile(r"([\d.]+) s(?:; [^|(]*)? \((?:torchrun: )?([\d.]+) s\)")
WIDTH, LEFT, RIGHT, ROW, BAR = 860, 228, 60, 21, 15
TITLE = "Seconds from the kill of one rank to the next step (2 ranks on 2 CPU cores; under ttprun a standby was ready)"


def figures_of(readme: str) -> list[tuple[str, float, float]]:
    """For each program: its name, torchrun's seconds and ttprun's. Raises ValueError if the README has others."""
    found = FIGURES.findall(readme[readme.index("| SIGKILL to next step") :])
    return [(name, float(plain), float(ours)) for name, (ours, plain) in zip(PROGRAMS, found, strict=True)]


def drawn(figures: list[tuple[str, float, float]], colours: dict[str, str]) -> str:
    """The picture: for each program two bars, on one scale."""
    scale = (WIDTH - LEFT - RIGHT) / max(plain for _, plain, _ in figures)
    parts = [f'<text x="8" y="18" fill="{colours["text"]}" font-weight="600">{escape(TITLE)}</text>']
    y = 34
    for name, plain, ours in figures:
        parts.append(f'<text x="8" y="{y + 22}" fill="{colours["text"]}">{escape(name)}</text>')
        for launcher, seconds, colour in (("torchrun", plain, "wait"), ("ttprun", ours, "step")):
            end = LEFT + seconds * scale
            parts.append(
                f'<text x="{LEFT - 8}" y="{y + 12}" fill="{colours["dim"]}" text-anchor="end">{launcher}</text>'
            )
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR}" fill="{colours[colour]}"/>')
            parts.append(f'<text x="{end + 6:.1f}" y="{y + 12}" fill="{colours["text"]}">{seconds:g} s</text>')
            y += ROW
        y += 12
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img"'
    style = 'font-family="ui-sans-serif,system-ui,sans-serif" font-size="13"'
    said = "; ".join(f"{name}: torchrun {plain:g} s, ttprun {ours:g} s" for name, plain, ours in figures)
    return f"{head} {style}><title>{escape(said)}</title>\n" + "\n".join(parts) + "\n</svg>\n"


def main() -> int:
    """Read the figures, draw, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/bars"), help="without -light.svg and -dark.svg")
    options = parser.parse_args()
    figures = figures_of(README.read_text(encoding="utf-8"))
    for name, colours in COLOURS.items():
        options.out.with_name(f"{options.out.name}-{name}.svg").write_text(drawn(figures, colours), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

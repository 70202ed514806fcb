#!/usr/bin/env python3
"""Draws docs/step-at-128k.svg from the table of bench/RESULTS.md that follows <!-- figures: step-at-128k -->.

    bench/draw_chart.py          writes the file
    bench/draw_chart.py --check  fails where the file is not what the table gives
"""
import html
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "RESULTS.md"
CHART = ROOT / "docs" / "step-at-128k.svg"

ROW_HEIGHT = 44
TOP = 84
# One column of bars: cell of the table, title, left edge, width, unit of the cell's numbers.
COLUMNS = [
    (1, "one layer, us (less is better)", 300, 190),
    (3, "kv: facts found of 64", 530, 130),
    (4, "pass key: facts found", 700, 130),
]


def rows():
    """Cells of the table's rows, without its head."""
    text = RESULTS.read_text()
    table = text.split("<!-- figures: step-at-128k -->\n", 1)[1].lstrip("\n").split("\n\n", 1)[0]
    lines = table.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def time_us(cell):
    return float(re.fullmatch(r"(\d+) us", cell)[1])


def found(cell):
    """Share of facts found: "13 to 17 of 64" counts as its lower figure."""
    low, of = re.fullmatch(r"(\d+)(?: to \d+)? of (\d+)", cell).groups()
    return int(low) / int(of)


def bar(x, y, width, color, label):
    return (f'<rect x="{x}" y="{y}" width="{max(width, 1):.1f}" height="18" fill="{color}"/>'
            f'<text x="{x + max(width, 1) + 5:.1f}" y="{y + 14}" font-size="12">{html.escape(label)}</text>')


def draw():
    table = rows()
    height = TOP + ROW_HEIGHT * len(table) + 12
    longest = max(time_us(cells[1]) for cells in table)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" width="860" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" role="img" aria-labelledby="title">',
        '<title id="title">Time of a layer at 128k tokens and facts found, by way to attend</title>',
        f'<rect x="1" y="1" width="858" height="{height - 2}" rx="10" fill="#ffffff" stroke="#cbd5e1"/>',
        '<g fill="#0f172a">',
        '<text x="20" y="30" font-size="16" font-weight="bold">'
        'Decoding at 128k tokens: time and what is found</text>',
        '<text x="20" y="50" font-size="12" fill="#475569">'
        'Shape of Llama-3-8B on an H200; facts: bundled model; bench/RESULTS.md has all conditions</text>',
    ]
    for _, title, x, _ in COLUMNS:
        out.append(f'<text x="{x}" y="{TOP - 10}" font-size="12" font-weight="bold">{title}</text>')
    for i, cells in enumerate(table):
        y = TOP + ROW_HEIGHT * i + 6
        exact = i == 0
        name = cells[0].replace("`", "")
        out.append(f'<text x="20" y="{y + 14}">{html.escape(name)}</text>')
        out.append(f'<text x="20" y="{y + 28}" font-size="11" fill="#475569">{cells[5]} on the device</text>')
        for cell, _, x, width in COLUMNS:
            share = time_us(cells[cell]) / longest if cell == 1 else found(cells[cell])
            color = "#94a3b8" if exact else "#2563eb" if cell == 1 else "#059669"
            out.append(bar(x, y, share * (width - 60), color, cells[cell].replace(" us", "")))
    out += ['</g>', '</svg>', '']
    return "\n".join(out)


def main():
    chart = draw()
    if sys.argv[1:] == ["--check"]:
        if not CHART.exists() or CHART.read_text() != chart:
            sys.exit(f"{CHART} is not what {RESULTS} gives: run bench/draw_chart.py")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        CHART.write_text(chart)


if __name__ == "__main__":
    main()

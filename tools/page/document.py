#!/usr/bin/env python3
"""Makes HTML pages of documents of this repository, in the style of the pages that `keyhole --html` writes.

    tools/page/document.py FOLDER [FILE.md ...]

writes FOLDER/docs/fidelity.html and FOLDER/bench/RESULTS.html, to which its figures link, or one page for each FILE.md (a path
from the root of the tree). Links among the documents of one call lead from page to page, all others into the tree. A page is
one file: it has no scripts and asks no network.

What a comment in front of a table draws above it, its columns named by their heads:

    <!-- range: LOW MARK HIGH -->   for each row, on a logarithmic axis, a bar from LOW to HIGH with a mark at MARK
    <!-- bars: COLUMN of FULL -->   for each row a bar, whose whole length stands for FULL

The number of a cell is the first one in it. All other comments are left out.
"""
import base64
import html
import math
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
USUAL = ("docs/fidelity.md", "bench/RESULTS.md")
STYLE = """
main { max-width: 1080px; }
a { color: var(--accent); }
h3 { font-size: 15px; margin: 24px 0 6px; }
code { font-size: 0.92em; overflow-wrap: anywhere; }
ul, ol { margin: 6px 0 10px; padding-left: 22px; }
li { margin: 4px 0; overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; background: #ffffff; border-radius: 6px; }
nav { margin: 0 0 8px; font-size: 14px; }
nav a { display: inline-block; margin: 2px 16px 2px 0; }
th { white-space: normal; vertical-align: bottom; }
td code { white-space: nowrap; }
.wide td, .wide th { white-space: normal; min-width: 7em; vertical-align: top; }
.scroll { margin-bottom: 14px; }
.bar { grid-template-columns: minmax(0, 3fr) minmax(0, 6fr) minmax(0, 3fr); }
.bar-plot .decade { stroke: var(--back); stroke-width: 1; vector-effect: non-scaling-stroke; }
.bar-plot .low { fill: var(--k4); }
.bar-plot .mark { fill: var(--k0); }
@media (max-width: 640px) {
  .bar { grid-template-columns: minmax(0, 1fr) max-content; padding: 4px 0; }
  .bar-plot { grid-row: 2; grid-column: 1 / 3; }
}
"""


class Document:
    """A Markdown file, and where its page lies."""

    def __init__(self, path, folder):
        self.path = path  # from the root
        self.page = folder / Path(path).with_suffix(".html")
        self.text = (ROOT / path).read_text()


def anchor(title):
    """As GitHub makes it of a heading, and tests/tree/links checks it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
    return re.sub(r"[^a-z0-9 _-]", "", plain).replace(" ", "-")


def number(cell):
    """The first number of a cell; None where there is none."""
    found = re.search(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", cell)
    return float(found[0].replace(",", "")) if found else None


class Writer:
    """One document as HTML."""

    def __init__(self, document, others):
        self.document = document
        self.pages = {(ROOT / other.path).resolve(): other.page for other in others}
        self.out = []
        self.comment = ""  # the one in front of what comes next

    # ---- Inline ----

    def target(self, link):
        if re.match(r"[a-z]+:", link):
            return link
        path, _, part = link.partition("#")
        part = "#" + part if part else ""
        if not path:
            return part
        file = ((ROOT / self.document.path).parent / path).resolve()
        goal = self.pages.get(file, file)
        return os.path.relpath(goal, self.document.page.resolve().parent) + part

    def image(self, text, link):
        data = ((ROOT / self.document.path).parent / link).read_bytes()
        kind = {".svg": "svg+xml", ".png": "png"}[Path(link).suffix]
        coded = base64.b64encode(data).decode()
        return f'<img alt="{html.escape(text)}" src="data:image/{kind};base64,{coded}">'

    def inline(self, text):
        """Code, links, images, bold and italic text; all else is escaped."""
        pattern = r"(`+)(.+?)\1|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^() ]+)\)|\*\*(.+?)\*\*|\*([^*\s][^*]*?)\*"
        out, at = [], 0
        for found in re.finditer(pattern, text):
            out.append(html.escape(text[at : found.start()]))
            _, code, image, label, link, bold, italic = found.groups()
            if code is not None:
                out.append(f"<code>{html.escape(code)}</code>")
            elif link is not None and image:
                out.append(self.image(label, link))
            elif link is not None:
                out.append(f'<a href="{html.escape(self.target(link))}">{self.inline(label)}</a>')
            elif bold is not None:
                out.append(f"<strong>{self.inline(bold)}</strong>")
            else:
                out.append(f"<em>{self.inline(italic)}</em>")
            at = found.end()
        return "".join(out) + html.escape(text[at:])

    # ---- Tables, and what is drawn of them ----

    def plot(self, name, shapes, text):
        label = html.escape(f"{re.sub('[`*]', '', name)}: {text}")
        self.out.append(
            f'<div class="bar"><span class="bar-name">{self.inline(name)}</span><svg class="plot bar-plot" '
            f'viewBox="0 0 1000 14" preserveAspectRatio="none" role="img" aria-label="{label}">{shapes}</svg>'
            f'<span class="bar-text">{html.escape(text)}</span></div>'
        )

    def draw_range(self, head, rows, names):
        places = [head.index(name) for name in names]
        values = [[number(row[place]) for place in places] for row in rows]
        seen = [x for row in values for x in row if x]
        first, last = math.floor(math.log10(min(seen))), math.ceil(math.log10(max(seen)))

        def at(x):
            return 1000 * (math.log10(x) - first) / (last - first)

        grid = "".join(f'<line class="decade" x1="{at(10**e):.1f}" x2="{at(10**e):.1f}" y1="0" y2="14"/>'
                       for e in range(first + 1, last))
        low, mark, high = names
        self.out.append(
            f'<p class="note">Bars go from {html.escape(low)} to {html.escape(high)}, on an axis from '
            f"{10.0**first:.{max(0, -first)}f} to {10.0**last:.{max(0, -last)}f} with a line at every factor of ten; the mark is "
            f"{html.escape(mark)}. Beside them: {html.escape(' / '.join(names))}.</p>"
        )
        self.out.append('<div class="bars">')
        for row, (a, b, c) in zip(rows, values):
            shapes = ""
            if a and c:
                shapes += f'<rect class="low" x="{at(a):.1f}" y="3" width="{max(at(c) - at(a), 4):.1f}" height="8"/>'
            if b:
                shapes += f'<rect class="mark" x="{at(b) - 3:.1f}" y="0" width="6" height="14"/>'
            self.plot(row[0], grid + shapes, f"{row[places[0]].split(' ')[0]} / {row[places[1]]} / {row[places[2]]}")
        self.out.append("</div>")

    def draw_bars(self, head, rows, name, full):
        place = head.index(name)
        self.out.append('<div class="bars">')
        for row in rows:
            width = 1000 * min(1.0, (number(row[place]) or 0.0) / full)
            self.plot(row[0], f'<rect class="part c0" width="{width:.1f}" height="14"/>', row[place])
        self.out.append("</div>")

    def draw(self, head, rows):
        kind, _, what = self.comment.partition(": ")
        if kind == "range":
            self.draw_range(head, rows, what.split())
        elif kind == "bars":
            name, full = what.rsplit(" of ", 1)
            self.draw_bars(head, rows, name, float(full))

    def table(self, lines):
        cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])] for line in lines]
        head, rows = cells[0], [[cell.replace("\\|", "|") for cell in row] for row in cells[2:]]
        self.draw(head, rows)
        # Columns whose every cell begins with a number, or says that there is none, are aligned to the right.
        numeric = [all(re.match(r"[-+~]?\d|-?$", row[c]) for row in rows) for c in range(len(head))]
        prose = any(len(cell) > 60 for row in rows for cell in row)

        def line(kind, row):
            return "<tr>" + "".join(
                f'<{kind}{"" if numeric[c] else " class=text"}>{self.inline(cell)}</{kind}>' for c, cell in enumerate(row)
            ) + "</tr>"

        self.out.append(f'<div class="scroll{" wide" if prose else ""}" tabindex="0" role="region" aria-label="table"><table>')
        self.out.append("<thead>" + line("th", head) + "</thead><tbody>")
        self.out += [line("td", row) for row in rows]
        self.out.append("</tbody></table></div>")

    # ---- Blocks ----

    def items(self, lines):
        """A list, with lists inside; an item's lines after its first are indented."""
        ordered = re.match(r"\s*\d+\. ", lines[0]) is not None
        indent = len(lines[0]) - len(lines[0].lstrip())
        self.out.append("<ol>" if ordered else "<ul>")
        at = 0
        while at < len(lines):
            mark = re.match(r"\s*(?:[-*]|\d+\.) ", lines[at])
            end = at + 1
            while end < len(lines) and len(lines[end]) - len(lines[end].lstrip()) > indent:
                end += 1
            own = [lines[at][mark.end() :]] + lines[at + 1 : end]
            inner = next((i for i in range(1, len(own)) if re.match(r"\s+(?:[-*]|\d+\.) ", own[i])), len(own))
            self.out.append("<li>" + self.inline(" ".join(part.strip() for part in own[:inner])))
            if inner < len(own):
                self.items(own[inner:])
            self.out.append("</li>")
            at = end
        self.out.append("</ol>" if ordered else "</ul>")

    def heading(self, line):
        level = len(line) - len(line.lstrip("#"))
        title = line[level:].strip()
        self.out.append(f'<h{level} id="{anchor(title)}">{self.inline(title)}</h{level}>')

    def contents(self):
        titles = re.findall(r"^## (.*)$", self.document.text, re.M)
        links = "".join(f'<a href="#{anchor(title)}">{self.inline(title)}</a>' for title in titles)
        return f"<nav>{links}</nav>" if len(titles) > 2 and "## Contents" not in self.document.text else ""

    def body(self):
        lines = self.document.text.splitlines()
        at = 0

        def block(goes_on):
            end = at + 1
            while end < len(lines) and goes_on(lines[end]):
                end += 1
            return lines[at:end], end

        while at < len(lines):
            line = lines[at]
            begins_block = re.compile(r"#+ |```|\||(?:[-*]|\d+\.) |<!--")
            if not line.strip():
                at += 1
                continue
            if line.startswith("<!--"):
                self.comment = line.strip()[4:-3].strip()
                at += 1
                continue
            if line.startswith("#"):
                self.heading(line)
                if line.startswith("# "):
                    self.out.append(self.contents())
                at += 1
            elif line.startswith("```"):
                own, end = block(lambda other: not other.startswith("```"))
                self.out.append(f'<pre tabindex="0">{html.escape(chr(10).join(own[1:]))}</pre>')
                at = end + 1
            elif line.startswith("|"):
                own, at = block(lambda other: other.startswith("|"))
                self.table(own)
            elif re.match(r"(?:[-*]|\d+\.) ", line):
                own, at = block(lambda other: re.match(r"\s|(?:[-*]|\d+\.) ", other))
                self.items([part for part in own if part.strip()])
            else:
                own, at = block(lambda other: other.strip() and not begins_block.match(other))
                self.out.append(f"<p>{self.inline(' '.join(own))}</p>")
            self.comment = ""
        return "\n".join(self.out)

    def html(self):
        title = re.search(r"^# (.*)$", self.document.text, re.M)[1]
        style = (ROOT / "tools/page/page.css").read_text() + STYLE
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
            f'<link rel="icon" href="data:,">\n<title>{html.escape(title)}</title>\n<style>\n{style}</style>\n</head>\n'
            f"<body>\n<main>\n{self.body()}\n</main>\n</body>\n</html>\n"
        )


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    documents = [Document(path, folder) for path in sys.argv[2:] or USUAL]
    for document in documents:
        page = Writer(document, documents).html()
        document.page.parent.mkdir(parents=True, exist_ok=True)
        document.page.write_text(page)
        print(document.page)


if __name__ == "__main__":
    main()

"""One HTML page that needs nothing else: figures are in it, colours follow the reader's light or dark, it prints."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

from incseg.report.style import Drawn
from incseg.report.writers import inline_html

FIGURES_FOLDER = "figures"
"""Beside the page."""

# Contrast of text is at least 4.5 in both schemes; --grid is decoration.
_CSS = """
:root { color-scheme: light dark; --paper: #fffffe; --ink: #1b1f24; --faint: #5c656e; --grid: #d8dee4; --soft: #f3f5f7;
  --accent: #0b62a4; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e3e7eb; --faint: #98a3ae; --grid: #333a41; --soft: #1d2125; --accent: #6cb6f5; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 70rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.3rem; margin: 2.6rem 0 .6rem; padding-top: .9rem; border-top: 1px solid var(--grid); }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
p, li { max-width: 48rem; } a { color: var(--accent); } .faint, figcaption { color: var(--faint); }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; margin: 1rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; margin: .4rem 0 .8rem; }
th, td { padding: .22rem .55rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th:first-child { text-align: left; } tbody th { font-weight: 400; } thead th { font-weight: 600; }
thead th[colspan] { text-align: center; border-left: 1px solid var(--grid); }
tr.ours { background: var(--soft); }
ul.notes { padding-left: 1.1rem; font-size: .88rem; color: var(--faint); }
.notice { border-left: 3px solid #d55e00; background: var(--soft); padding: .6rem .9rem; margin: 1rem 0;
  font-size: .92rem; }
.notice ul { margin: .2rem 0 0; padding-left: 1.1rem; } .notice li { overflow-wrap: anywhere; }
pre { background: var(--soft); padding: .7rem .9rem; font-size: .78rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
code { font-size: .92em; }
figure { margin: .8rem 0 1.8rem; } figcaption { font-size: .88rem; max-width: 48rem; margin-top: .35rem; }
.letters { position: absolute; width: 0; height: 0; }
figure svg { display: block; height: auto; max-width: 100%; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--accent); }
@media (max-width: 45rem) { figure svg { max-width: none; } }
@media print {
  :root { color-scheme: light; --paper: #fff; --ink: #000; --faint: #444; --grid: #ccc; --soft: #f4f4f4;
    --accent: #000; }
  body { max-width: none; padding: 0; font-size: 10.5pt; } nav, .files { display: none; }
  figure, table, .notice { break-inside: avoid; } h2, h3 { break-after: avoid; } .scroll { overflow: visible; }
  table { font-size: 6.5pt; } th, td { padding: .1rem .25rem; white-space: normal; }
  figure svg { max-width: 100%; max-height: 22cm; }
  details::details-content { content-visibility: visible; display: block; } summary { color: inherit; }
}
"""


@dataclass
class Block:
    """A heading, paragraphs, figures, and what is HTML already; folded away where it is of less interest."""

    title: str
    texts: list[str] = field(default_factory=list)
    figures: list[Drawn] = field(default_factory=list)
    body: str = ""
    folded: bool = False


@dataclass
class Chapter:
    title: str
    blocks: list[Block]


@dataclass
class Notice:
    """Something the reader should know first."""

    title: str
    lines: list[str]


def page(title: str, about: str, notices: Sequence[Notice], chapters: Sequence[Chapter], footer: str) -> str:
    links = "".join(f'<li><a href="#c{i}">{html.escape(one.title)}</a></li>' for i, one in enumerate(chapters))
    parts = [f"<h1>{html.escape(title)}</h1>", f'<p class="faint">{inline_html(about)}</p>']
    for notice in notices:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in notice.lines)
        parts.append(f'<div class="notice"><strong>{html.escape(notice.title)}</strong><ul>{lines}</ul></div>')
    parts.append(f"<nav><ul>{links}</ul></nav>")
    letters: dict[str, str] = {}
    for figure in (figure for chapter in chapters for block in chapter.blocks for figure in block.figures):
        letters |= figure.letters
    parts.append(f'<svg class="letters" aria-hidden="true"><defs>{"".join(letters.values())}</defs></svg>')
    for index, chapter in enumerate(chapters):
        parts.append(f'<h2 id="c{index}">{html.escape(chapter.title)}</h2>')
        parts += [_block(block) for block in chapter.blocks]
    parts.append(f'<p class="faint">{inline_html(footer)}</p>')
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _block(block: Block) -> str:
    inner = "".join(f"<p>{inline_html(text)}</p>" for text in block.texts)
    inner += block.body + "".join(_figure(figure) for figure in block.figures)
    if block.folded:
        return f"<details><summary>{html.escape(block.title)}</summary>{inner}</details>"
    return (f"<h3>{html.escape(block.title)}</h3>" if block.title else "") + inner


def _figure(figure: Drawn) -> str:
    files = " ".join(f'<a href="{FIGURES_FOLDER}/{figure.name}.{kind}">{kind.upper()}</a>' for kind in ("png", "svg"))
    caption = f'<span id="{figure.name}">{inline_html(figure.caption)}</span> <span class="files">{files}</span>'
    return f'<figure><div class="scroll">{figure.svg}</div><figcaption>{caption}</figcaption></figure>'


def bullets(lines: Sequence[str]) -> str:
    return '<ul class="notes">' + "".join(f"<li>{inline_html(line)}</li>" for line in lines) + "</ul>"


def plain_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First column a name, the others figures."""
    head = "".join(f"<th>{inline_html(cell)}</th>" for cell in heading)
    body = "".join(
        f"<tr><th>{inline_html(first)}</th>{''.join(f'<td>{inline_html(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

#!/usr/bin/env python3
"""Draws what a command prints to a terminal of 90 columns as an SVG picture.

    docs/picture.py docs/demo.svg --from "2. Train" --without "^ +[a-z]+ +[0-9.]+ ms$" -- cargo xtask demo

It keeps bold, dim and colours, and of a line that the command draws over the last state. Every word has its place, so that the picture is
right with any font.
"""

import argparse
import html
import os
import pty
import re
import sys

COLUMNS, SIZE, LINE, PAD = 90, 14, 19, 16
# Of a character.
WIDTH = SIZE * 0.602
COLOURS = {"31": "#f47067", "32": "#57ab5a", "33": "#c69026", "34": "#539bf5", "35": "#b083f0", "36": "#39c5cf"}
SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07")


def printed(command):
    """What the command prints, and its exit status."""
    parts = []

    def read(fd):
        part = os.read(fd, 65536)
        parts.append(part)
        return part

    os.environ.update(COLUMNS=str(COLUMNS), TERM="xterm-256color")
    before = os.get_terminal_size(1).columns if os.isatty(1) else None
    if before != COLUMNS:
        command = ["sh", "-c", f"stty cols {COLUMNS} rows 50; exec \"$@\"", "sh", *command]
    status = pty.spawn(command, read)
    return b"".join(parts).decode(errors="replace"), os.waitstatus_to_exitcode(status)


def spans(line):
    """The parts of a line, each with its style."""
    found, style, at = [], frozenset(), 0
    for match in SEQUENCE.finditer(line):
        found.append((line[at:match.start()], style))
        at = match.end()
        if match[2] == "m":
            for code in (match[1] or "0").split(";"):
                style = frozenset() if code == "0" else style | {code}
    found.append((line[at:], style))
    return [(text, style) for text, style in found if text]


def drawn(spans, y):
    parts, column = [], 0
    for text, style in spans:
        attributes = ' font-weight="bold"' if "1" in style else ""
        attributes += ' opacity="0.65"' if "2" in style else ""
        colour = next((COLOURS[code] for code in style if code in COLOURS), None)
        attributes += f' fill="{colour}"' if colour else ""
        # Characters that fonts do not have in common stand by themselves.
        words = re.finditer(r"[!-~]+|[^\x00-~]", text)
        placed = (f'<tspan x="{PAD + (column + word.start()) * WIDTH:.0f}">{html.escape(word[0])}</tspan>' for word in words)
        parts.append(f'<tspan{attributes}>{"".join(placed)}</tspan>')
        column += len(text)
    return f'<text y="{y}">{"".join(parts)}</text>'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture")
    parser.add_argument("--from", dest="first", default="", metavar="TEXT", help="leave out what comes before the first line with it")
    parser.add_argument("--without", metavar="REGEX", help="leave out lines that it matches")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    text, status = printed(args.command)
    if status != 0:
        sys.exit(f"the command ended with {status}")
    # Of what was drawn over, the last.
    lines = [line.rstrip("\r").split("\r")[-1].rstrip() for line in text.split("\n")]
    plain = [SEQUENCE.sub("", line) for line in lines]
    begin = next((n for n, line in enumerate(plain) if args.first in line), 0)
    is_left_out = re.compile(args.without or "(?!)").search
    lines = [line for line, text in zip(lines[begin:], plain[begin:]) if not is_left_out(text)]
    while not lines[-1]:
        lines.pop()
    width, height = int(COLUMNS * WIDTH) + 2 * PAD, len(lines) * LINE + 2 * PAD
    body = "\n".join(drawn(spans(line), PAD + LINE * (n + 1) - 5) for n, line in enumerate(lines))
    with open(args.picture, "w") as picture:
        picture.write(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'font-family="ui-monospace, DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="{SIZE}" fill="#cdd9e5">\n'
            f'<rect width="{width}" height="{height}" rx="8" fill="#22272e"/>\n{body}\n</svg>\n')
    print(f"{args.picture}: {len(lines)} lines, {os.path.getsize(args.picture)} bytes")


if __name__ == "__main__":
    main()

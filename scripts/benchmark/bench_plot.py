# SPDX-License-Identifier: GPL-2.0
"""Line and bar plots as SVG, readable on light and on dark pages."""

import math
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 76, 232, 54, 62          # The legend is on the right.
LIGHT = ("#ffffff", "#1c2126", "#dfe3e8", ("#b5482a", "#1f6fb2", "#2c8a4b", "#8a4fb0"))
DARK = ("#16191d", "#e4e7eb", "#343a41", ("#f08a67", "#6db3f2", "#6ccb8a", "#c797ea"))


def colors(paper, ink, faint, series):
    rules = f"text {{ fill: {ink} }} .axis {{ stroke: {ink} }} .grid {{ stroke: {faint} }} .paper {{ fill: {paper} }}"
    for n, color in enumerate(series):
        rules += f"\n.fill{n} {{ fill: {color} }} .s{n} {{ stroke: {color} }} .dot.s{n} {{ fill: {color} }} .dot.hollow.s{n} {{ fill: {paper} }}"
    return rules


STYLE = f"""
svg {{ font: 13px system-ui, sans-serif }} .title {{ font-size: 16px; font-weight: 600 }}
.end {{ text-anchor: end }} .mid {{ text-anchor: middle }}
.line {{ fill: none; stroke-width: 2 }} .dashed {{ stroke-dasharray: 6 4 }} .range {{ stroke-width: 1 }}
{colors(*LIGHT)}
@media (prefers-color-scheme: dark) {{
{colors(*DARK)}
}}
"""


@dataclass
class Axis:
    """A label with its unit, whether equal steps are equal factors, and a value that is shown if they are not."""
    label: str
    log: int = 0            # The base, or 0.
    around: int = 0


@dataclass
class Line:
    """Points are (x, y, low, high): low and high are where the middle half of the rounds lies."""
    name: str
    points: list
    color: int
    dashed: bool = False


def number(value):
    if value >= 1e6 and value % 1e5 == 0:
        return f"{value / 1e6:g}M"
    return f"{value:,.10g}"


def linear_ticks(low, high):
    length = high - low or 1
    step = 10 ** math.floor(math.log10(length / 4))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if length / (m * step) <= 6)
    return [n * step for n in range(math.floor(low / step), math.ceil(high / step) + 1)]


def log_ticks(low, high, base):
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    if base == 2:
        every = max(1, (last - first) // 5)
        return [2 ** n for n in range(first, last + 1, every)]
    ticks = [m * 10 ** n for n in range(first, last + 1) for m in (1, 2, 5)]
    inside = [t for t in ticks if low <= t <= high]
    return [max((t for t in ticks if t <= low), default=low), *(t for t in inside if t > low),
            min((t for t in ticks if t >= high), default=high)]


class Scale:
    """Maps the values of an axis to a place on the page."""

    def __init__(self, axis, values, begin, end):
        self.axis, self.begin, self.end = axis, begin, end
        if axis.log:
            ticks = log_ticks(min(values), max(values), axis.log)
        else:
            ticks = linear_ticks(min(axis.around, *values), max(axis.around, *values))
        self.ticks = list(dict.fromkeys(ticks))
        self.low, self.high = self.of(self.ticks[0]), self.of(self.ticks[-1])

    def of(self, value):
        return math.log(value) if self.axis.log else value

    def at(self, value):
        return self.begin + (self.of(value) - self.low) / (self.high - self.low) * (self.end - self.begin)


def legend(lines):
    for n, line in enumerate(lines):
        x, y = WIDTH - RIGHT + 20, TOP + 10 + 22 * n
        dashed = " dashed" if line.dashed else ""
        yield f'<path class="line s{line.color}{dashed}" d="M{x} {y}h34"/>'
        yield f'<text x="{x + 42}" y="{y + 4}">{escape(line.name)}</text>'


def drawn(line, xs, ys, dots):
    dashed, hollow = (" dashed", " hollow") if line.dashed else ("", "")
    path = "L".join(f"{xs.at(x):.1f} {ys.at(y):.1f}" for x, y, _, _ in line.points)
    yield f'<path class="line s{line.color}{dashed}" d="M{path}"/>'
    for x, y, low, high in line.points if dots else ():
        if high > low:
            yield (f'<path class="range s{line.color}" d="M{xs.at(x):.1f} {ys.at(low):.1f}'
                   f'V{ys.at(high):.1f}"/>')
        yield f'<circle class="dot{hollow} s{line.color}" cx="{xs.at(x):.1f}" cy="{ys.at(y):.1f}" r="3.5"/>'


def page(path, title, height, body):
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
            f'<text class="title" x="20" y="30">{escape(title)}</text>']
    path.write_text("\n".join([*head, *body, "</svg>", ""]), encoding="utf-8")


def plot(path, title, x, y, lines, dots=True):
    """Lines over two axes; nothing if there are none."""
    points = [p for line in lines for p in line.points]
    if not points:
        return
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    xs = Scale(x, [p[0] for p in points], LEFT, right)
    ys = Scale(y, [v for p in points for v in p[1:]], bottom, TOP)
    body = []
    for tick in xs.ticks:
        at = xs.at(tick)
        body.append(f'<path class="grid" d="M{at:.1f} {TOP}V{bottom}"/>'
                    f'<text class="mid" x="{at:.1f}" y="{bottom + 20}">{number(tick)}</text>')
    for tick in ys.ticks:
        at = ys.at(tick)
        body.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{right}"/>'
                    f'<text class="end" x="{LEFT - 8}" y="{at + 4:.1f}">{number(tick)}</text>')
    middle = (TOP + bottom) / 2
    body += [f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>',
             f'<text class="mid" x="{(LEFT + right) / 2}" y="{HEIGHT - 18}">{escape(x.label)}</text>',
             f'<text class="mid" transform="translate(18 {middle}) rotate(-90)">{escape(y.label)}</text>']
    for line in lines:
        body += drawn(line, xs, ys, dots)
    page(path, title, HEIGHT, [*body, *legend(lines)])


def bars(path, title, label, names, groups):
    """Two bars a group, each a (value, low, high), and a third value that is part of both, or None."""
    if not groups:
        return
    left, right, each = 190, WIDTH - 80, 44
    bottom = TOP + 30 + each * len(groups)
    xs = Scale(Axis(label), [v for _, *values, _ in groups for value in values for v in value], left, right)
    body = [f'<path class="fill{n} bar" d="M{left + 130 * n} {TOP - 6}h24v10h-24z"/>'
            f'<text x="{left + 30 + 130 * n}" y="{TOP + 4}">{escape(name)}</text>' for n, name in enumerate(names)]
    for tick in xs.ticks:
        body.append(f'<path class="grid" d="M{xs.at(tick):.1f} {TOP + 20}V{bottom}"/>'
                    f'<text class="mid" x="{xs.at(tick):.1f}" y="{bottom + 20}">{number(tick)}</text>')
    for n, (name, *values, part) in enumerate(groups):
        y = TOP + 28 + each * n
        body.append(f'<text class="end" x="{left - 10}" y="{y + 20}">{escape(name)}</text>')
        for i, (value, low, high) in enumerate(values):
            at = y + 16 * i
            body.append(f'<path class="fill{i} bar" d="M{left} {at}H{xs.at(value):.1f}v14H{left}z"/>')
            if part is not None:
                body.append(f'<path class="fill2 bar" d="M{left} {at + 5}H{xs.at(part):.1f}v4H{left}z"/>')
            if high > low:
                body.append(f'<path class="axis" d="M{xs.at(low):.1f} {at + 7}H{xs.at(high):.1f}"/>')
            body.append(f'<text x="{xs.at(max(value, high)) + 6:.1f}" y="{at + 12}">{value:,.1f}</text>')
    body += [f'<path class="axis" d="M{left} {TOP + 20}V{bottom}"/>',
             f'<text class="mid" x="{(left + right) / 2}" y="{bottom + 44}">{escape(label)}</text>']
    page(path, title, bottom + 60, body)

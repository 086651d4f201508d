"""A trace as text, and as a picture (SVG)."""

from __future__ import annotations

from html import escape

from tests.collector.traces import Span, tree

COLUMNS, _NAMES_WIDE = 48, 26
_ROW, _NAMES, _BARS, _TIMES, _TOP = 20, 240, 560, 150, 34
_COLOURS = {
    "tandem-router": "#4f7fd9",
    "tandem-prefill": "#c98a1b",
    "tandem-decode": "#2f9e6b",
    "tandem-operator": "#8a5fc0",
}
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    'font-family="ui-sans-serif, sans-serif" font-size="12">'
)
_OTHER, _FAILED = "#7a7f8c", "#d64550"


def text(spans: list[Span]) -> str:
    """A line a span: its place in the tree, whose it is, when it began, how long it took."""
    begin, length = _extent(spans)
    rows = list(tree(spans))
    wide = max(_NAMES_WIDE, *(2 + 2 * depth + len(span.name) for span, depth in rows))
    lines = [f"{'span':<{wide}}{'of':<9}{'from ms':>9}{'ms':>9}  "]
    for span, depth in rows:
        left = round(COLUMNS * (span.begin - begin) / length)
        width = max(1, round(COLUMNS * (span.end - span.begin) / length))
        bar = (" " * left + ("x" if span.error else "=") * width)[:COLUMNS]
        name = "  " * depth + span.name
        times = f"{1e3 * (span.begin - begin):>9.1f}{1e3 * (span.end - span.begin):>9.1f}"
        lines.append(
            f"{name:<{wide}}{_short(span):<9}{times}  |{bar:<{COLUMNS}}| {_words(span)}".rstrip()
        )
    return "\n".join(lines) + "\n"


def picture(spans: list[Span], title: str) -> str:
    """SVG with a bar a span, coloured by process; a tick for each event, red for what failed."""
    begin, length = _extent(spans)
    rows = list(tree(spans))
    width, height = _NAMES + _BARS + _TIMES, _TOP + _ROW * len(rows) + 12
    parts = [
        _HEAD.format(width=width, height=height),
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (service, colour) in enumerate(_COLOURS.items()):
        x = _NAMES + 130.0 * number
        parts.append(f'<rect x="{x:.0f}" y="10" width="11" height="11" rx="2" fill="{colour}"/>')
        parts.append(_label(x + 17, 20, service.removeprefix("tandem-")))
    for number, (span, depth) in enumerate(rows):
        top = _TOP + _ROW * number
        if number % 2 == 0:
            parts.append(f'<rect y="{top}" width="{width}" height="{_ROW}" fill="#f4f6fa"/>')
        left = _NAMES + _BARS * (span.begin - begin) / length
        size = max(1.5, _BARS * (span.end - span.begin) / length)
        colour = _FAILED if span.error else _COLOURS.get(span.service, _OTHER)
        parts.append(_label(10 + 14 * depth, top + 14, span.name))
        parts.append(
            f'<rect x="{left:.1f}" y="{top + 4}" width="{size:.1f}" height="12" rx="2" '
            f'fill="{colour}"><title>{escape(_words(span) or span.name)}</title></rect>'
        )
        for when, name in span.events:
            x = _NAMES + _BARS * (when - begin) / length
            parts.append(
                f'<path d="M{x:.1f} {top + 2}v16" stroke="#111" stroke-width="1">'
                f"<title>{escape(name)}</title></path>"
            )
        took = f"{1e3 * (span.end - span.begin):.1f} ms"
        parts.append(
            _label(_NAMES + _BARS + 12, top + 14, took + (" failed" if span.error else ""))
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _extent(spans: list[Span]) -> tuple[float, float]:
    begin = min(span.begin for span in spans)
    return begin, max(1e-6, max(span.end for span in spans) - begin)


def _short(span: Span) -> str:
    return span.service.removeprefix("tandem-")


def _words(span: Span) -> str:
    counts: dict[str, int] = {}
    for _, name in span.events:
        counts[name] = counts.get(name, 0) + 1
    events = ", ".join(
        name if count == 1 else f"{count} x {name}" for name, count in counts.items()
    )
    dry = "dry run" if span.attributes.get("tandem.dry_run") else ""
    asked = " ".join(filter(None, (span.attributes.get("tandem.object.name"), dry)))
    return "; ".join(part for part in (span.error, asked, events) if part)


def _label(x: float, y: float, words: str) -> str:
    return f'<text x="{x}" y="{y}" fill="#1b2230">{escape(words)}</text>'

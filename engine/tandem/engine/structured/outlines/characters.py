"""Characters and sets of them as the regex crate reads them, plain or as JSON writes them between
quotes.

Sets never allow more than anybody's engine takes a shorthand for, nor forbid less: shorthands are
ASCII where they allow, and Unicode where they forbid.
"""

from __future__ import annotations

from tandem.engine.structured.grammar import GrammarError

JSON_TEXT = r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])*'
"""Any text, as JSON writes it."""
LINE_ENDS = ((10, 10), (13, 13), (0x2028, 0x2029))
"""What ``.`` is not."""
NEVER = "\0"
"""A character that no expression takes: the process that compiles puts it before each. Whatever is
there is looked for anywhere in a text, too, by the engine below, which takes a number of states
that grows with a power where it may come again."""
SHORTHANDS: dict[str, tuple[tuple[int, int], ...]] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "s": ((9, 13), (32, 32)),
}
"""``\\d`` and its like, in ASCII."""

_WIDEST = {"d": r"\d", "w": r"\w", "s": r"\s\x{FEFF}"}
"""All that somebody takes for one of them."""
_JSON_ESCAPES = {
    '"': '\\"',
    "\\": "\\\\",
    "\n": "\\n",
    "\t": "\\t",
    "\r": "\\r",
    "\f": "\\f",
    "\b": "\\b",
}
_ESCAPED = {*range(32), ord('"'), ord("\\")}

Range = tuple[int, int]


def literal(sign: str) -> str:
    """An expression of one character."""
    return sign if sign.isascii() and sign.isalnum() else f"\\x{{{ord(sign):X}}}"


def quoted(text: str) -> str:
    """An expression of ``text`` alone."""
    return "".join(map(literal, text))


def character(sign: str, *, in_json: bool) -> str:
    """An expression of one character, or of how JSON writes it."""
    if not in_json:
        return literal(sign)
    if sign in _JSON_ESCAPES:
        return quoted(_JSON_ESCAPES[sign])
    return quoted(f"\\u{ord(sign):04x}") if sign < " " else literal(sign)


def shorthand(sign: str, *, allows: bool) -> tuple[list[Range], list[str]]:
    """What ``\\d`` and its like (``sign`` is the letter) add to a set that allows or forbids:
    ranges and classes."""
    ranges = SHORTHANDS[sign.lower()]
    if sign.islower() and allows:
        return list(ranges), []
    if sign.isupper() and not allows:
        return [], [f"[^{''.join(_range(*each) for each in ranges)}]"]
    widest = _WIDEST[sign.lower()]
    return [], [f"[^{widest}]" if allows else widest]


def set_of(ranges: list[Range], classes: list[str], *, allows: bool, in_json: bool) -> str:
    """An expression of one character of a set, or of none of it. Within JSON a character that it
    escapes is written so, and left out where it is a control character without a letter, or where
    it is not known whether a class has it. Raises GrammarError where nothing is left."""
    written = "".join(_range(*each) for each in ranges) + "".join(classes)
    text = f"[{'' if allows else '^'}{written}]"
    if not in_json:
        has_never = not allows or classes or any(low == 0 for low, _ in ranges)
        return f"[{text}&&[^\\x00]]" if has_never else text

    def has(sign: str) -> bool:
        within = any(low <= ord(sign) <= high for low, high in ranges)
        return within if allows else not (within or classes)

    texts = [quoted(escape) for sign, escape in _JSON_ESCAPES.items() if has(sign)]
    if not allows or classes or any(map(_has_unescaped, ranges)):
        texts.append(f'[{text}&&[^"\\\\\\x00-\\x1f]]')
    if not texts:
        raise GrammarError("an expression without a set of which JSON writes nothing")
    return f"(?:{'|'.join(texts)})"


def _has_unescaped(each: Range) -> bool:
    low, high = each
    return high - low >= len(_ESCAPED) or any(at not in _ESCAPED for at in range(low, high + 1))


def _range(low: int, high: int) -> str:
    return f"\\x{{{low:X}}}" if low == high else f"\\x{{{low:X}}}-\\x{{{high:X}}}"

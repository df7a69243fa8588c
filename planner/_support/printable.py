"""Spell out characters that a terminal would obey, in texts that files, models and their authors named."""

import unicodedata

_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, direction and joining, surrogates, ends of lines
_MOST_LETTERS = 10_000  # of a message


def printable(text: str) -> str:
    """Return the text on one line, characters that a terminal would obey spelled out.

    >>> printable("red \\x1b[31m")
    'red \\\\x1b[31m'
    """
    return text if text.isprintable() else "".join(map(_printable, text))


def shortened(message: str) -> str:
    """Return a message of at most some lines of a terminal, without its middle where it is longer."""
    if len(message) <= _MOST_LETTERS:
        return message
    half = _MOST_LETTERS // 2
    return f"{message[:half]} ... {message[-half:]}"


def harmless_cell(value: object) -> object:
    """Return a cell that no spreadsheet takes for a formula: a text that begins like one is quoted.

    https://owasp.org/www-community/attacks/CSV_Injection
    """
    if not isinstance(value, str):
        return value
    value = printable(value)
    return f"'{value}" if value.startswith(("=", "@", "+", "-")) else value


def _printable(character: str) -> str:
    if character in "\n\t":
        return " "
    is_obeyed = unicodedata.category(character) in _OBEYED
    return character.encode("unicode_escape").decode() if is_obeyed else character

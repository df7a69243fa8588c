"""Make texts from files and models safe to print: escape characters that a terminal would act on."""

import unicodedata

_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, direction and joining, surrogates, ends of lines
_MOST_LETTERS = 10_000  # most characters of a message


def printable(text: str) -> str:
    """Return the text on one line, with escapes for characters that a terminal would act on.

    >>> printable("red \\x1b[31m")
    'red \\\\x1b[31m'
    """
    return text if text.isprintable() else "".join(map(_printable, text))


def shortened(message: str) -> str:
    """Cut the middle out of a message of more than `_MOST_LETTERS` characters, else return it unchanged."""
    if len(message) <= _MOST_LETTERS:
        return message
    half = _MOST_LETTERS // 2
    return f"{message[:half]} ... {message[-half:]}"


def harmless_cell(value: object) -> object:
    """Make a text printable, and put a quote before it if a spreadsheet would take it for a formula.

    A value that is not a string is returned unchanged.

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

"""Convert convolutions to and from the keys of stored answers.

A key omits the type, layout and batch size.
"""

from collections.abc import Iterator, Sequence

from planner.program import Convolution, Direction

_LETTERS = {Direction.FORWARD: "f", Direction.DATA: "d", Direction.WEIGHT: "w"}
_DIRECTIONS = {letter: direction for direction, letter in _LETTERS.items()}


def key_of(convolution: Convolution) -> str:
    """Return the key of a convolution, such as "d 3x9x9 4x3x3x3 0x0 1x1 1x1".

    The key has the direction, the size of one sample of x, the size of w, the padding, the stride and the
    dilation.

    >>> key_of(Convolution(Direction.DATA, "float32", (8, 3, 9, 9), (4, 3, 3, 3), (8, 4, 7, 7), False,
    ...                    (0, 0), (1, 1), (1, 1)))
    'd 3x9x9 4x3x3x3 0x0 1x1 1x1'
    """
    sizes = (convolution.x[1:], convolution.w, convolution.padding, convolution.stride, convolution.dilation)
    return " ".join((_LETTERS[convolution.direction], *("x".join(map(str, each)) for each in sizes)))


def convolution_of(key: str, dtype: str, channels_last: bool, batch: int) -> Convolution:
    """Return the convolution with a key, type, layout and batch size.

    >>> convolution_of("w 3x9x9 4x3x3x3 0x0 2x2 1x1", "float32", False, 8).y
    (8, 4, 4, 4)
    """
    letter, *fields = key.split(" ")
    x, w, padding, stride, dilation = (tuple(map(int, each.split("x"))) for each in fields)
    y = (batch, w[0], *_extents(x[1:], w[2:], padding, stride, dilation))
    sizes = (batch, *x), w, y
    return Convolution(_DIRECTIONS[letter], dtype, *sizes, channels_last, padding, stride, dilation)


def _extents(*sizes: Sequence[int]) -> Iterator[int]:
    for extent, kernel, pad, step, spread in zip(*sizes, strict=True):
        yield max((extent + 2 * pad - spread * (kernel - 1) - 1) // step + 1, 1)

"""cuDNN's version number as people write it."""


def cudnn_text(number: int | None) -> str | None:
    """Return the version that `torch.backends.cudnn.version()` means: 8902 is 8.9.2, 90100 is 9.1.0.

    None or 0 says that there is no cuDNN.
    """
    if not number:
        return None
    thousands = 10_000 if number >= 90_000 else 1_000  # CUDNN_VERSION counts otherwise from 9 on
    return f"{number // thousands}.{number % thousands // 100}.{number % 100}"

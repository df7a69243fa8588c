"""End the loops of transformers' `generate` at their maximum length.

`generate` reads from GPU tensors whether a loop goes on. They read as zero, so that neither an end-of-text
token nor the length would end the loop.
"""

from __future__ import annotations

import threading
from functools import wraps
from typing import Any

MODULE = "transformers.generation.utils"


def attach(utils: Any) -> None:
    """Patch transformers so that the loops of `generate` end once a MaxLengthCriteria is met."""
    if not all(hasattr(utils, name) for name in ("GenerationMixin", "MaxLengthCriteria")):
        return
    reached = threading.local()  # `length`: whether the last criterion of length was met
    mixin, criterion = utils.GenerationMixin, utils.MaxLengthCriteria
    measure, is_unfinished, generate = (
        criterion.__call__,
        mixin._has_unfinished_sequences,
        mixin.generate,
    )

    @wraps(measure)
    def measure_length(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        reached.length = input_ids.shape[-1] >= self.max_length
        return measure(self, input_ids, *args, **kwargs)

    @wraps(is_unfinished)
    def is_unfinished_by_length(self: Any, *args: Any, **kwargs: Any) -> bool:
        is_unfinished(self, *args, **kwargs)
        is_over, reached.length = getattr(reached, "length", False), False
        return not is_over

    @wraps(generate)
    def generate_to_length(self: Any, *args: Any, **kwargs: Any) -> Any:
        reached.length = False
        return generate(self, *args, **kwargs)

    criterion.__call__, mixin._has_unfinished_sequences = measure_length, is_unfinished_by_length
    mixin.generate = generate_to_length

from .provenance import (
    Details as Details,
)

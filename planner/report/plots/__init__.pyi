from .comparison import (
    draw_comparison as draw_comparison,
)
from .gpus import (
    draw_gpus as draw_gpus,
)
from .timeline import (
    draw_timeline as draw_timeline,
)

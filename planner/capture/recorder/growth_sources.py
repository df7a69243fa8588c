"""Find the code that makes memory grow from step to step.

It is also found whether only reference cycles hold the memory. A capture runs without Python's garbage
collector, so that blocks in cycles stay alive like other blocks. A collection after the loop shows the
difference: blocks that it frees were held by cycles only.
"""

import gc

from planner.capture.recorder.recorder import Recorder
from planner.program import GrowthSource, Trace, find_growth, growing_blocks


def growth_sources(trace: Trace, recorder: Recorder) -> tuple[GrowthSource, ...]:
    """Return the sites whose number of blocks grows with every step, with source lines if known.

    The trace must have just ended. The garbage collector runs once, to tell which blocks are held by
    reference cycles only.
    """
    growth = find_growth(trace)
    if growth is None:
        return ()
    before = recorder.living_blocks()
    gc.collect()
    after = recorder.living_blocks()
    lines = {detail.block: detail for detail in trace.provenance if detail.source}
    sources = []
    for site, blocks in growing_blocks(trace, growth).items():
        line = next((lines[block] for block in reversed(blocks) if block in lines), None)
        is_garbage = not before.isdisjoint(blocks) and after.isdisjoint(blocks)
        source, code = ("", "") if line is None else (line.source, line.code)
        sources.append(GrowthSource(site.module, site.op, source, code, is_garbage))
    return tuple(sources)

"""Colours of every picture, from Okabe and Ito (2008): distinct for all eyes and, by lightness, in grey."""

from planner.program import Role

CATEGORY_COLOURS = {  # from the bottom up, as they are stacked
    Role.PARAMETER: "#0072B2",
    Role.OPTIMIZER: "#CC79A7",
    Role.GRADIENT: "#D55E00",
    Role.INPUT: "#777777",  # their eighth is black, which a dark page swallows
    Role.ACTIVATION: "#7FBFE3",
    Role.TEMPORARY: "#F0E442",
    Role.WORKSPACE: "#009E73",
}
# Of all parts of a process by name; the last two are what no tensor or kernel holds.
PART_COLOURS = {
    **{role.value: colour for role, colour in CATEGORY_COLOURS.items()},
    "context": "#4B5563",
    "fragmentation": "#A3ABB8",
}

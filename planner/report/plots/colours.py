"""The colours of pictures, distinguishable for colour-blind readers and in greyscale.

They are based on Okabe and Ito (2008).
"""

from planner.program import Category

CATEGORY_COLOURS = {  # in the order in which pictures stack them, from the bottom up
    Category.PARAMETER: "#0072B2",
    Category.OPTIMIZER: "#CC79A7",
    Category.GRADIENT: "#D55E00",
    Category.INPUT: "#777777",  # their eighth colour is black, which is invisible on a dark page
    Category.ACTIVATION: "#7FBFE3",
    Category.TEMPORARY: "#F0E442",
    Category.WORKSPACE: "#009E73",
}
# Colours of all parts of a process by name; the last three are memory that no tensor or kernel holds.
PART_COLOURS = {
    **{category.value: colour for category, colour in CATEGORY_COLOURS.items()},
    "context": "#4B5563",
    "nccl": "#8A6D3B",
    "fragmentation": "#A3ABB8",
}

"""The arguments and results of operators are walked in order, whatever contains them."""

from planner.capture.arguments import leaves_of, map_leaves


def test_leaves_come_in_order() -> None:
    """Tuples, lists and values of dictionaries are opened at any depth; None is a leaf."""
    assert leaves_of((1, [2, (None, 3)]), {"dim": 4, "sizes": [5]}) == [1, 2, None, 3, 4, 5]


def test_containers_stay_as_they_are() -> None:
    """Each leaf is replaced at its place."""
    assert map_leaves(str, ((1, [2]), {"dim": 3})) == (("1", ["2"]), {"dim": "3"})

"""The module that a change of memory is in."""

from planner.planning.check import module_changes


def named(before: dict[str, int], after: dict[str, int]) -> tuple[str, int] | None:
    module = module_changes(before, after)[0]
    return None if module is None else (module.name, module.change_bytes)


def test_the_innermost_module_with_most_of_the_change_is_named() -> None:
    """A change in one layer is that layer's; one that is spread over a block is the block's."""
    before = {"body.0": 10, "body.1": 10, "head": 10, "": 3}
    assert named(before, before | {"body.1": 90}) == ("body.1", 80)
    assert named(before, before | {"body.0": 50, "body.1": 50}) == ("body", 80)
    assert named(before, before | {"body.1": 2}) == ("body.1", -8)


def test_a_new_or_removed_module_is_named() -> None:
    """A module that is there on one side alone counts as 0 on the other."""
    assert named({"a": 5}, {"a": 5, "b.c.d": 7}) == ("b.c.d", 7)
    assert named({"a": 5, "b.c.d": 7}, {"a": 5}) == ("b.c.d", -7)


def test_where_no_module_has_most_the_largest_in_the_same_direction_is_named() -> None:
    """A module that holds less at the new peak is not the one that has grown."""
    assert named({"a": 80, "b": 10, "": 0}, {"a": 0, "b": 100, "": 50}) == ("b", 90)


def test_memory_outside_of_modules_has_no_name() -> None:
    """Where only what lies outside of modules has changed, that is said; equal peaks have no module."""
    assert named({"a": 1}, {"a": 1, "": 5}) == ("", 5)
    assert named({"a": 1}, {"a": 1}) is None


def test_the_largest_changes_are_listed_by_themselves() -> None:
    """At most five, by falling size."""
    after = {str(number): number for number in range(1, 9)}
    assert [one.change_bytes for one in module_changes({}, after)[1]] == [8, 7, 6, 5, 4]

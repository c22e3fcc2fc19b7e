"""The pattern of head groups."""

from canon.masks.head_groups import head_groups


def test_the_stride_pattern():
    def widths(*arguments):
        groups = head_groups(*arguments)
        assert [head for heads in groups for head in heads] == list(range(arguments[0]))
        return [len(heads) for heads in groups]

    assert widths(8, 4) == [4, 4]
    assert widths(8, 4, 1) == [1, 3, 4]
    assert widths(8, 4, None, 2) == [4, 2, 2]
    assert widths(8, 4, 1, 2) == [1, 3, 2, 2]
    assert widths(12, 4, 3, 1) == [3, 1, 4, 3, 1]
    assert widths(3, 1) == [1, 1, 1]
    assert widths(2, 2, None, 1) == [1, 1]

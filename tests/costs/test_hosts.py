"""Two hosts, each a network namespace with half of the ranks: a mesh sends the predicted bytes
between them, and hardly more.
"""

import hosts
import pytest
import sampling

MOST = 1.01  # bytes on the wire for each byte of a message: headers of TCP and of Gloo
MESHES = {4: (1, 2), 8: (1, 2, 4)}  # columns, by the number of ranks


@pytest.mark.parametrize("ranks", MESHES if sampling.ALL else [4])
def test_a_mesh_sends_the_predicted_bytes_between_hosts(ranks):
    """A host receives (1 - columns / ranks) of K and V in either pass, and of dk and dv: no mesh
    changes the number of its tokens, but fewer rows pass fewer of them on.
    """
    if reason := hosts.refusal():
        pytest.skip(f"network namespaces are not allowed here: {reason}")
    for columns, received in zip(MESHES[ranks], hosts.counted(ranks, MESHES[ranks]), strict=True):
        elements = (1 - columns / ranks) * hosts.TOKENS * hosts.HEADS * 2 * hosts.WIDTH
        expected = elements * (2 + 2 + 4)  # K and V twice in bfloat16, dk and dv in float32
        assert hosts.predicted(ranks, columns) == expected
        assert all(expected < measured < MOST * expected for measured in received)


def test_without_namespaces_the_record_of_the_same_bytes_is_read(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    for ranks, columns in MESHES.items():
        for some, received in zip(columns, hosts.found(ranks, columns), strict=True):
            expected = hosts.predicted(ranks, some)
            assert all(expected < measured < MOST * expected for measured in received)
    assert (
        "recorded bytes, because this machine has no network namespaces: "
        in capsys.readouterr().out
    )

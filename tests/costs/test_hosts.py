"""Two hosts, each a network namespace with half of the ranks: a mesh sends the predicted bytes
between them, and hardly more.
"""

import hosts
import pytest
import sampling

MOST = 1.01  # bytes on the wire for each byte of a message: headers of TCP and of Gloo


def agrees(mesh, received):
    """Assert that a host receives the bytes of the model, which `test_bytes` has as a formula."""
    expected = hosts.predicted(*mesh)
    assert all(expected < measured < MOST * expected for measured in received), mesh


@pytest.mark.parametrize("ranks", hosts.MESHES if sampling.ALL else [4])
def test_a_mesh_sends_the_predicted_bytes_between_hosts(ranks):
    if reason := hosts.refusal():
        pytest.skip(f"network namespaces are not allowed here: {reason}")
    for mesh, received in hosts.counted(hosts.MESHES[ranks]).items():
        agrees(mesh, received)


def test_without_namespaces_the_record_of_the_same_bytes_is_read(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    for meshes in hosts.MESHES.values():
        for mesh, received in hosts.found(meshes).items():
            agrees(mesh, received)
    reason = "because this machine has no network namespaces: [Errno 2]"
    assert reason in capsys.readouterr().out

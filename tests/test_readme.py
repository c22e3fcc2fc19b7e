"""Claims about `README.md`: its code runs as printed, its commands and links exist, its figures are on `paper/measured.md`."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from programs import losses_of, under_torchrun

from canon import Layout, Mask, __main__, fast, reference
from canon.check import check_command
from canon.testing import process_groups

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
MEASURED = (ROOT / "paper" / "measured.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(README)
TRAIN, CHOOSE = (text for language, text in BLOCKS if language == "python")
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
CALLS = [line for line in CHOOSE.splitlines() if line.startswith("out = ")]
HALVES = {"reference": reference, "fast": fast}


def section(title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)[1]


def heading(title: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


# --- the training step


def losses(folder: Path, ranks: int, **environment: str) -> list[float]:
    """Run the training step under torchrun, and return the losses that it prints."""
    (folder / "train.py").write_text(TRAIN)
    return losses_of(under_torchrun("train.py", ranks, cwd=folder, **environment))


def test_the_training_step_runs_under_torchrun_and_gives_the_loss_of_one_rank(tmp_path):
    assert "`torchrun --nproc-per-node 4 train.py`" in section("Train")
    one, two = (losses(tmp_path, ranks, CUDA_VISIBLE_DEVICES="") for ranks in (1, 2))
    assert len(one) == len(two) == 20
    assert one[0] == pytest.approx(two[0], abs=1.5e-4)  # each is rounded to 1e-4; sums of 1021 float32 add 1e-6
    assert one == pytest.approx(two, rel=0.01)  # Adam may turn a rounding into a step of the learning rate, 2e-3
    first, last = map(float, re.findall(r"from about (\S+) to below (\S+) on", " ".join(section("Train").split()))[0])
    assert two[0] == pytest.approx(first, abs=0.1)
    assert two[-1] < last


@pytest.mark.gpus(2)
def test_the_training_step_runs_on_gpus_unchanged(tmp_path):
    found = losses(tmp_path, 2)
    assert len(found) == 20
    assert found[-1] < 0.5 * found[0]


# --- the other code


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_calls_of_choose_a_function_run_as_printed(half, ranks):
    """One rank runs all lines. Two ranks run the lines for several GPUs, each on its shard."""
    calls, masks = CALLS[ranks > 1 :], [Mask.documents([0, 5, 32])] * 2 + [Mask.causal(32)] * 2
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 32, heads, 16) for heads in (8, 4, 4))

    def program():
        for call, mask in zip(calls, masks[-len(calls) :], strict=True):
            magi = "magi" in call
            layout = HALVES[half].dispatch(mask, ranks) if magi else Layout.zigzag(32, ranks)
            names = {"attn": HALVES[half], "Layout": Layout, "mask": mask, "ranks": ranks, "tokens": 32}
            names |= {name: layout.shard(x, dist.get_rank()) for name, x in (("q", q), ("k", k), ("v", v))}
            exec(call, names)
            expected = layout.shard(reference.attention(q, k, v, mask), dist.get_rank())
            torch.testing.assert_close(names["out"], expected)

    assert [call.split("(")[0] for call in CALLS] == [
        f"out = attn.{name}" for name in ("attention", "magi_attention", "strided_attention", "zigzag_attention")
    ]
    process_groups.threads(program, ranks)


def test_all_code_of_the_readme_is_python_or_commands():
    assert [language for language, _ in BLOCKS].count("python") == 2
    assert {language for language, _ in BLOCKS} == {"python", "bash"}
    compile(CHOOSE, "README.md", "exec")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_the_readme_exists(command, monkeypatch):
    """The Makefile has the target, and canon accepts the options."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "Nothing to be done" not in done.stdout, "a file or folder, not a target"
    elif words[0] == "canon":
        accepted = []
        monkeypatch.setattr(check_command, "run", lambda arguments: accepted.append(arguments.module) or 0)
        assert __main__.main(words[1 : words.index(">") if ">" in words else None]) == 0
        assert len(accepted) == 1
    else:
        pytest.fail("no test runs this command")


# --- links and figures


PAGES = [ROOT / "README.md", ROOT / "STYLE.md", *(ROOT / "notebooks").glob("*.md"), *(ROOT / "paper").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", BLOCK.sub("", page.read_text()))
    assert [path for path, _ in links if not (page.parent / path).exists()] == []
    for path, anchor in links:
        if anchor and (not path or path.endswith(".md")):
            titles = re.findall(r"^#+ (.*)$", (page.parent / path if path else page).read_text(), re.MULTILINE)
            assert anchor in map(heading, titles), f"{path}#{anchor}"


def test_every_figure_of_speed_is_on_the_page_of_measurements():
    quoted = re.findall(r"\d+\.\d+ to \d+\.\d+", section("Speed"))
    assert len(quoted) == 3
    measured = " ".join(MEASURED.split())
    assert [number for number in quoted if number not in measured] == []

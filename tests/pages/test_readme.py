"""Claims about `README.md`: its code runs as printed, its commands and links exist, its numbers
follow from records.
"""

import re
import shlex
import subprocess

import pytest
import torch
import torch.distributed as dist
from folders import NOTEBOOKS, PAPER, ROOT
from programs import losses_of, on_forked_ranks, under_torchrun

from canon import Layout, Mask, __main__, reference
from canon.check import check_command
from canon.testing import process_groups

README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(README)
(START,) = (text for language, text in BLOCKS if language == "python")
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
TRAIN = NOTEBOOKS / "train.py"


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)[1]


WHICH = section("Which function\\?")
CALLS = re.findall(r"`(attn\.\w+\(.*?\))`", WHICH)
SPEED = " ".join(section("Is it faster\\?").split())


# --- the training program


def test_the_training_program_runs_under_torchrun_and_gives_the_loss_of_one_rank():
    assert any("torchrun --nproc-per-node 4 notebooks/train.py" in line for line in COMMANDS)
    one, two = (
        losses_of(output) for output in (on_forked_ranks(TRAIN, 1), under_torchrun(TRAIN, 2))
    )
    assert len(one) == len(two) == 20
    # each is rounded to 1e-4; sums of 1021 float32 add 1e-6
    assert one[0] == pytest.approx(two[0], abs=1.5e-4)
    # Adam may turn a rounding into a step of the learning rate, 2e-3
    assert one == pytest.approx(two, rel=0.01)
    told = re.search(r"from about (\S+)\s+to below (\S+)\.\n", TRAIN.read_text())
    first, last = map(float, told.groups())
    assert two[0] == pytest.approx(first, abs=0.1)
    assert two[-1] < last


# --- the other code


@pytest.mark.sweep(1)
@pytest.mark.parametrize("half", ["reference", "fast"])
def test_the_first_program_runs_as_pasted(half, tmp_path):
    assert "`torchrun --nproc-per-node 2 first.py`" in section("Quick start")
    program = tmp_path / "first.py"
    program.write_text(START.replace("fast as attn", f"{half} as attn"))
    assert "rank 0: equal to attention on one rank" in on_forked_ranks(program, 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_calls_of_which_function_run_as_printed(half, ranks):
    """One rank runs all calls. Two ranks run the calls for several GPUs, each on its shard."""
    documents, causal = Mask.documents([0, 5, 32]), Mask.causal(32)
    masks = {"attention": documents, "magi": documents, "strided": causal, "zigzag": causal}
    tensors = {name: torch.randn(1, 32, heads, 16) for name, heads in dict(q=8, k=4, v=4).items()}

    def program():
        rank = dist.get_rank()
        for call, (name, mask) in [*zip(CALLS, masks.items(), strict=True)][ranks > 1 :]:
            assert call.startswith(f"attn.{name}")
            layout = half.dispatch(mask, ranks) if name == "magi" else Layout.zigzag(32, ranks)
            shards = {x: layout.shard(tensor, rank) for x, tensor in tensors.items()}
            given = dict(attn=half, Layout=Layout, mask=mask, ranks=ranks, tokens=32)
            expected = layout.shard(reference.attention(**tensors, mask=mask), rank)
            torch.testing.assert_close(eval(call, given | shards), expected)

    process_groups.threads(program, ranks)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_the_readme_exists(command, monkeypatch):
    """The Makefile has the target, and canon accepts the options."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        dry_run = ["make", "--dry-run", "--directory", str(ROOT), *words[1:]]
        printed = subprocess.run(dry_run, capture_output=True, text=True, check=True).stdout
        assert "Nothing to be done" not in printed, "a file or folder, not a target"
    elif words[0] == "canon":
        accepted = []
        monkeypatch.setattr(
            check_command, "run", lambda arguments: accepted.append(arguments.module) or 0
        )
        assert __main__.main(words[1 : words.index(">") if ">" in words else None]) == 0
        assert len(accepted) == 1
    elif words[0] == ".venv/bin/torchrun":
        assert ROOT / words[-1] == TRAIN  # the test of the training program runs it
    else:
        pytest.fail("no test runs this command")


# --- links and figures


PAGES = [
    ROOT / "README.md",
    ROOT / "STYLE.md",
    *NOTEBOOKS.glob("*.md"),
    *PAPER.glob("*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", BLOCK.sub("", page.read_text()))
    assert [path for path, _ in links if not (page.parent / path).exists()] == []
    for path, anchor in links:
        if anchor and (not path or path.endswith(".md")):
            text = (page.parent / path if path else page).read_text()
            titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in titles]
            assert anchor in anchors, f"{path}#{anchor}"


def test_the_numbers_of_speed_follow_from_records(scripts):
    found = scripts("readme_figures").numbers()
    assert found["table"] in section("Is it faster\\?")
    assert len(found["table"].splitlines()) <= 9, "seven rows"
    sentences = (
        "take {others magi_over_packs} times Canon's wall time, and {magi memory} GB where Canon "
        "takes {our memory}. A new mask costs MagiAttention {others magi_new_mask} times as much",
        "(at 32,768 causal tokens, with older kernels, {others magi_over_causal})",
        "reach {share 131072} of one GPU's throughput per GPU at 131,072 tokens, and "
        "{share 32768} at 32,768.",
    )
    assert [text for text in sentences if text.format_map(found) not in SPEED] == []
    tables = scripts("schedule_tables")
    assert f"on two GPUs it is within {tables.two_gpus()['two_wall'].replace('%', ' %')}" in WHICH
    assert f"makes it {found['packs over strided']} times as fast as strided" in WHICH
    assert f"is {found['strided over zigzag']} times as fast as the zigzag ring" in WHICH


def test_the_first_sentence_of_speed_holds_in_the_table(scripts):
    """On several GPUs no row is below 1."""
    rows = scripts("readme_figures").numbers()["table"].splitlines()[2:]
    told = re.findall(r"([\d.]+ to [\d.]+) times as fast as", SPEED)
    assert told == [rows[place].split(" | ")[3] for place in (0, 1, 3)]
    assert not [row for row in rows if "1 H200" not in row and re.search(r"\| 0\.\d+", row)]


def test_the_sentences_of_one_gpu_hold_in_every_shape_of_its_record(scripts):
    """They name the shapes where Canon leads with both passes, and cuDNN in the forward."""
    figures = scripts("readme_figures")
    record, faster = figures.kernel_tables, []
    for shape in {row["shape"] for row in record.load(figures.ONE)["results"]}:
        tokens, width, mask = int(shape.split()[1][1:]), shape.split()[4], shape.split()[5]
        leads = mask in ("documents:256", "documents:1024") or width == "D256" or tokens <= 2048
        ratios = figures.other_libraries.fastest_over_canon(shape, figures.PEERS)
        assert min(ratios) > 1 if leads else 0.94 <= min(ratios) <= max(ratios) <= 1.06, shape
        speed = lambda name, kind, shape=shape: record.speed(figures.ONE, shape, name, kind)
        if (ratio := speed("SDPA cudnn", "forward") / speed("canon auto", "forward")) > 1:
            faster.append((ratio, tokens))
    assert all(tokens < 2048 for _, tokens in faster)
    assert f"alone is up to {max(faster)[0]:.2f} times as fast below 2,048 tokens" in SPEED
    memory = lambda name: record.row_of(figures.ONE, record.MEMORY[0], name)["peak_mb"]
    mb = map(memory, ("canon auto", "canon gluon split", "flash-attn-4", "SDPA cudnn"))
    told = '{:.0f} MB, or {:.0f} with `backward="split"`; flash-attn-4 takes {:.0f}, cuDNN {:.0f}'
    assert told.format(*mb) in SPEED


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120
    assert len(re.findall(r"\S*\w\S*", README)) <= 1000  # without the bars of tables

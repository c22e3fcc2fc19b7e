"""Claims about the course: each hole has one solution, that of the reference, and an empty hole
fails with its sentence.
"""

import ast
import inspect
import linecache
import re
import runpy
import textwrap
from pathlib import Path

import course
import hosts
import jupytext
import my_attention
import nbformat
import pytest
from my_attention import ROWS
from programs import printed

from canon import Layout
from canon.masks.band import Band
from canon.reference import backward, group_collectives, local, mesh, ring, strided

FOLDER = Path(course.__file__).parent
TWINS = {path.stem: jupytext.read(path) for path in sorted(FOLDER.glob("*.md"))}
CELLS = {
    re.search(r"^def (\w+)", cell, re.MULTILINE)[1]: (name, cell)
    for name, book in TWINS.items()
    for cell in course.holes(book)
}
CAST = group_collectives.GroupCast

# The function of the reference that each hole is an excerpt of, and its words that differ in the
# notebook.
EXCERPTS = {
    "merged": (local.merged, {}),
    "ring_forward": (
        ring.ring_forward,
        {
            "        k, v = read(mask, *held)\n": "",
            "tiled_forward(q, k, v, mask,": "tiled_forward(q, *held, mask,",
            "call.value_width": "v.shape[-1]",
            ", max_logits=max_logits": "",
        },
    ),
    "ring_backward": (
        ring.ring_backward,
        {"*read(mask, *held)": "*held", "returned(*part)": "part"},
    ),
    "pick": (Band.pick, {"self.": "band."}),
    "strided_forward": (
        strided.strided_forward,
        {"        highest = of_heads(max_logits, sharing)\n": "", ", max_logits=highest": ""},
    ),
    "start_cast": (CAST.__init__, {"self.": ""}),
    "to_column": (mesh.to_column, {}),
    "scores": (backward._Backward._scores, {"self.": "tile."}),
}
HOP = "        hop = Hop(held, owner - 1, call) if step + 1 < call.ranks else None\n"
PART = (
    "        mask = call.local_mask(owner)\n"
    "        part = tiled_forward(q, *held, mask, scale=call.scale, out_dtype=accumulate)\n"
)
# Wrong answers by function: words of the solution, other words, and the message of the cell below.
WRONG = {
    "merged": [
        (
            "part.to(lse.dtype).masked_fill(~visible, 0)",
            "part.to(lse.dtype)",
            "^out of queries 0 to 9: these see no key of the late piece.*: wrong at 10 of 10 "
            "tokens: 0, 1, .* there is nan, expected ",
        ),
        (
            "whole.masked_fill(~visible, 0)).masked_fill(~visible, 0)",
            "whole)",
            "^out if both lse are -inf: these queries see no key, so out must be 0: wrong at 24 ",
        ),
        (
            "weight * part",
            "part",
            "^out of queries 10 to 23, .* see keys of both pieces: wrong at 14 of 14 tokens: 10,",
        ),
        (
            "return (weighted(out, lse) +",
            "return (weighted(out.nan_to_num(0), lse) +",
            "^out of query 3, .* NaN must stay: found ",
        ),
        (
            ".to(out.dtype), whole",
            ", whole",
            "^bfloat16 parts, float32 lse: out must have the dtype of the first out, found torch.f",
        ),
    ],
    "ring_forward": [
        ("if step + 1 < call.ranks else None", "", "^rank 0: 4 hops of keys, expected 3"),
        (
            "(call.rank - step) % call.ranks  #",
            "(call.rank + step) % call.ranks  #",
            "^rank 0, step 1: the hop names owner 0, expected 2, ",
        ),
        (
            "Hop(held",
            "Hop([k.contiguous(), v.contiguous()]",
            "step 1: it sends the keys of 0, expected the keys of 3$",
        ),
        (
            "Hop(held, owner - 1",
            "Hop(held, owner",
            "^rank 0, step 0: the hop names owner 0, expected 3, the owner of the",
        ),
        (
            "Hop(held",
            "Hop(*held",
            r"a hop takes a list of tensors.* Hop\(held, owner - 1, call\): found Tensor, Tensor,",
        ),
        ("out_dtype=accumulate", "out_dtype=q.dtype", "merged gets parts in float32"),
        (
            "        mask = call.local_mask(owner)",
            "        hop and hop.wait()\n        mask = call.local_mask(owner)",
            "^rank 0, step 0: it waits for the hop before it computes, so the message overlaps",
        ),
        (
            HOP + PART,
            PART + HOP,
            "^rank 0, step 0: it starts the hop after it computes, so the message overlaps with",
        ),
        (
            "out, lse = merged(out, lse, *part)",
            "out, lse = (out, lse) if step == 1 else merged(out, lse, *part)",
            "^rank 1, out: wrong at 6 of 6 tokens: 6, 7, 8, 9, 10, 11. At the first",
        ),
    ],
    "ring_backward": [
        (
            "elif keys_need_grad",
            "if keys_need_grad",
            "^rank 0: 4 gradient hops, expected 3: the part of step 0 stays",
        ),
        (
            "            own_part = part\n        elif keys_need_grad:",
            "            own_part = part\n        if keys_need_grad and hop:",
            "^rank 0: gradient hop 1 of 3 starts in step 0, expected step 1: the part of step 0 s",
        ),
        (
            "            own_part = part\n",
            "            pass\n",
            r"own_part is \(None, None\): keep the part of step 0 there$",
        ),
        (
            "elif keys_need_grad",
            "else",
            r"^only q needs a gradient, so part is \[None, None\]: start no gradient hop$",
        ),
        (
            "Hop(\n                [x",
            "Hop(\n                *[x",
            "a hop takes a list of tensors, .*: found Tensor, Tensor, int, Call$",
        ),
        (
            "x.to(call.reduce_dtype)",
            "x",
            "hop has torch.float32, expected call.reduce_dtype, torch.bfloat16$",
        ),
        (
            "x.to(call.reduce_dtype)",
            "x.to(q.dtype)",
            "hop has torch.bfloat16, expected call.reduce_dtype, torch.float32$",
        ),
        ("reduce_dtype).contiguous()", "reduce_dtype)", "hop has tensors that are not contiguous$"),
        (
            "part], owner - 1",
            "part], owner",
            "^rank 0, step 1: the gradient hop names owner 3, expected 2",
        ),
        ("    part = _plus_received(part", "    _plus_received(part", "^rank 0, dk: "),
    ],
    "pick": [
        (
            "(band.hi - offset) // step",
            "-((offset - band.hi) // step)",
            "^example 2, every fourth token: expected Band",
        ),
        (
            "(queries.start - band.q_stop)",
            "(queries.start - band.q_stop + step - 1)",
            r"^example 2, every fourth token: expected Band\(q 1:3, .* found Band\(q 1:2, ",
        ),
        (
            "-((offset - band.lo) // step)",
            "(band.lo - offset) // step",
            r"^queries range\(0, 20, 2\), keys .*: the cell in row \d.* visible, expected hidden$",
        ),
    ],
    "zigzag": [
        (
            "pieces[2 * ranks - 1 - r]",
            "pieces[r + ranks]",
            r"^24 tokens, rank 0: expected tokens \[0, 1, 2, 21, 22, 23\], found \[0, 1, 2, 12, ",
        ),
        (
            "[[pieces[r], pieces[2 * ranks - 1 - r]] for",
            "[[*pieces[r], *pieces[2 * ranks - 1 - r]] for",
            "^24 tokens, rank 0: expected a list of two ranges, found a list of int$",
        ),
        (
            "[range(start, stop) for",
            "[torch.arange(start, stop) for",
            "^24 tokens, rank 0: expected a list of two ranges, found a list of Tensor$",
        ),
        (
            "i * size + min(i, larger)",
            "round(i * n / (2 * ranks))",
            r"^13 tokens, rank 0: expected tokens \[0, 1, 12\], found \[0, 1, 11, 12\]$",
        ),
    ],
    "start_cast": [
        (
            "send_rows(stage, rank)",
            "send_rows(stage, rank).flip(0)",
            "^rank .: .* received .* it needs",
        ),
    ],
    "to_column": [
        (
            "(call.columns, -1)).permute(2, 1, 0, 3, 4)",
            "(-1, call.columns)).permute(3, 1, 0, 2, 4)",
            r"^rank \d: .*, numbers: wrong at 1. of 1. .* there is [12]0., expected [14]0.$",
        ),
        (
            "permute(2, 1, 0, 3, 4)",
            "permute(2, 1, 0, 3, 4).flip(0)",
            r"^rank \d: .*, numbers: wrong at 1. of 1. .* there is (40.|\d), expected (\d|40.)$",
        ),
        ("[sizes[column]] * call.columns", "sizes", r"^rank \d: RuntimeError: split_with_sizes"),
    ],
    "bytes_of_nic": [
        ("(rows - 1)", "rows", "^4 x 1: expected 12582912 bytes on a NIC, found 16777216"),
        ("(g // columns)", "g", "^2 x 2: expected 4194304 bytes on a NIC, found 8388608"),
        ("(2 + 2 + 4)", "(2 + 4)", "^4 x 1: expected 12582912 bytes on a NIC, found 9437184"),
    ],
    "crossover": [
        ("F / L / columns", "F / L", "^32/8 heads, 8 columns, 6600 tokens: .*: t is too large$"),
        ("g / h", "h / g", "^32/8 heads, 1 columns, 105600 tokens: .*: t is too large$"),
    ],
}


KERNELS = {"forward_kernel": pytest.mark.interpreted}  # holes that are Triton kernels
HOLES = [pytest.param(name, marks=KERNELS.get(name, ())) for name in ROWS]


@pytest.fixture
def run(tmp_path):
    """Return ``run(cell, names)``, which runs the cell of a hole. The test ends with the functions
    that `my_attention` had.
    """
    kept = dict(vars(my_attention))

    def run(cell, names=None):
        path = tmp_path / "cell.py"
        path.write_text(f"from my_attention import mine, tl, triton\n\n\n{cell}\n")
        linecache.checkcache(str(path))
        return runpy.run_path(str(path), names)

    yield run
    vars(my_attention).update(kept)


def lines_of(code):
    """Return the code without comments and with one form for each statement."""
    return ast.unparse(ast.parse(textwrap.dedent(code))).splitlines()


def test_each_function_of_the_table_has_a_hole_in_its_notebook_and_rows_in_00():
    given = {name: notebook for name, (notebook, cell) in CELLS.items() if "@mine" in cell}
    assert given == {name: row.notebook for name, row in ROWS.items()}
    table = (FOLDER / "00_softmax_in_pieces.md").read_text()
    for name, row in ROWS.items():
        assert f"| `{name}` | `{row.options}` |" in table
        # so `make test`, which runs the notebooks, runs the rows with the solution
        cells = [cell.source for cell in TWINS[row.notebook].cells]
        checked = next(cell for cell in cells[cells.index(CELLS[name][1]) :] if row.options in cell)
        assert f'my_attention.check("{row.options}")' in checked


@pytest.mark.parametrize("name", EXCERPTS)
def test_a_solution_is_an_excerpt_of_the_reference(name):
    function, words = EXCERPTS[name]
    source = course.unprofiled(textwrap.dedent(inspect.getsource(function)))
    source = "\n".join(lines_of(source))
    for word, other in words.items():
        source = source.replace(word, other)
    expected = "\n".join(line.strip() for line in source.splitlines())
    found = "\n".join(line.strip() for line in lines_of(course.solution(CELLS[name][1])))
    assert found in expected


def test_zigzag_of_the_course_is_the_layout(run):
    zigzag = run(CELLS["zigzag"][1])["zigzag"]
    for n in range(30):
        for ranks in range(1, 6):
            assert Layout(zigzag(n, ranks), n) == Layout.zigzag(n, ranks)


@pytest.mark.parametrize("name", HOLES)
def test_an_empty_hole_fails_with_the_line_that_says_what_to_write(name, run, capsys):
    cell = course.with_hole(CELLS[name][1])
    sentence = re.search(r'NotImplementedError\(\s*"(.*)"', cell)[1]
    assert len(sentence.split()) >= 8
    (line,) = [line for line in cell.splitlines() if sentence in line]
    assert len(line) <= 112, "Jupyter would scroll it"
    run(cell)
    with pytest.raises(AssertionError, match="canon check my_attention"):
        my_attention.check(ROWS[name].options)
    out = capsys.readouterr().out
    assert sentence[:50] in out
    assert "By their names" not in out


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of matplotlib, for tensors
@pytest.mark.parametrize("name", sorted({CELLS[function][0] for function in WRONG}))
def test_a_wrong_answer_fails_the_cell_below_it_with_its_reason(name, run, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(my_attention, "check", lambda options: None)
    monkeypatch.setattr(hosts, "refusal", lambda: "a test has none")  # it reads the record
    cells = [cell.source for cell in TWINS[name].cells if cell.cell_type == "code"]
    answers = {cell: function for function, (notebook, cell) in CELLS.items() if notebook == name}
    names: dict = {}
    for cell, below in zip(cells, [*cells[1:], ""], strict=True):
        function = answers.pop(cell, None)
        for words, other, message in WRONG.get(function, []):
            assert cell.count(words) == 1, words
            with pytest.raises((AssertionError, RuntimeError), match=message):
                exec(below, run(cell.replace(words, other), names))
        if function and "@mine" not in cell:
            with pytest.raises(NotImplementedError, match="^Your turn: return "):
                exec(below, run(course.with_hole(cell), names))
        if function:
            names.update(run(cell, names))
        elif answers:
            exec(cell, names)


def test_the_course_has_holes_folded_solutions_and_keeps_written_functions(tmp_path):
    (tmp_path / "paper").mkdir()  # another project's, beside the folder of the course
    folder = course.write(tmp_path / "build")
    assert folder == tmp_path / "build" / "course"
    assert {path.name for path in tmp_path.iterdir()} == {"paper", "build"}
    assert course.SOLVED in TWINS["00_softmax_in_pieces"].cells[0].source
    for notebook in {notebook for notebook, _ in CELLS.values()}:
        text = (folder / f"{notebook}.ipynb").read_text()
        assert "This copy is solved" not in text
        assert "your turn" not in text
        assert "<summary>Hint</summary>" in text
        assert "<summary>Solution</summary>" in text
        assert (
            f"`.venv/bin/jupyter lab {folder.parent}` opens"
            in nbformat.reads(text, 4).cells[0].source
        )
    cells = [cell for path in folder.glob("*.ipynb") for cell in nbformat.read(path, 4).cells]
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    links = {link for text in texts for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text)}
    assert {"08_backward.ipynb", "../paper/records.md"} <= links
    assert not [link for link in links if not (folder / link).exists()]
    assert course.write(tmp_path / "build") == folder  # links that are there stay
    program = (
        "import runpy, my_attention; runpy.run_path('cell.py'); "
        "print(my_attention.merged.__code__.co_filename)"
    )
    kept = folder / "my_functions" / "merged.py"
    empty = course.with_hole(CELLS["zigzag"][1])
    (folder / "cell.py").write_text(f"from my_attention import mine\n{CELLS['merged'][1]}\n{empty}")
    inside = f"import os; os.chdir({str(folder)!r}); import sys; sys.path.insert(0, ''); "
    output = printed(inside + program)
    unwritten = "used in this notebook, but not kept: it raises NotImplementedError"
    assert f"merged: kept in {kept}, not checked yet\nzigzag: {unwritten}\n" in output
    assert [path.name for path in kept.parent.iterdir()] == ["merged.py"]
    assert lines_of(kept.read_text())[1:] == lines_of(CELLS["merged"][1])[2:]
    kept.write_text(kept.read_text().replace("logaddexp", "maximum"))
    program = "import my_attention; my_attention.check('--only merge/')"
    with pytest.raises(AssertionError, match="0 of 3 cases agree"):
        printed(inside + program)


def test_a_folder_that_has_the_name_of_a_link_is_named_before_anything_is_written(tmp_path):
    (tmp_path / "paper").mkdir()
    with pytest.raises(
        FileExistsError,
        match=f"{tmp_path}/paper is not a link to {FOLDER.parent}/paper: choose another",
    ):
        course.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["paper"]

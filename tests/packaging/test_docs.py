"""The site: its code prints what it says, its tables and pictures are those of the code, its links lead somewhere."""

from __future__ import annotations

import doctest
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import torch

import fastattn
from benchmarks import recipes
from docs import map as repository_map
from docs import measured, pages, pictures, render

ROOT = Path(__file__).parents[2]


def sources(*folders: str) -> str:
    """The text of all Python and C++ files in these folders."""
    return "\n".join(
        path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.*") if path.suffix in (".py", ".h")
    )


@pytest.mark.parametrize("path", pages.GUIDES, ids=attrgetter("name"))
def test_code_prints_and_draws_what_the_page_shows(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a Trainer makes the folder of its output
    torch.manual_seed(0)
    for block, printed, namespace in pages.run(path):
        same = doctest.OutputChecker().check_output(block.printed, printed, doctest.ELLIPSIS)
        assert same, f"{path.name}:{block.line} says it prints\n{block.printed}\nbut prints\n{printed}"
        for name in block.pictures:
            shown = (pages.FOLDER / "pictures" / name).read_text()
            assert shown == pictures.draw(name, namespace), f"{name} is another mask: python -m docs.render"


@pytest.mark.parametrize("path", pages.NOTEBOOKS, ids=attrgetter("name"))
def test_notebooks_show_what_their_code_prints_and_draws(path):
    shown = pages.run_notebook(path)
    torch.set_printoptions(profile="default")  # which notebooks change
    assert json.loads(path.read_text(encoding="utf-8")) == shown, "python -m docs.render"


@pytest.mark.parametrize("path", pages.GUIDES, ids=attrgetter("name"))
def test_no_block_is_overlooked(path):
    page = path.read_text()
    kinds = re.findall(r"^[ \t]*(?:`{3,}|~{3,})[ \t]*(\S*)", page, re.MULTILINE)[::2]
    assert set(kinds) <= {"python", "text", "console"}
    assert kinds.count("python") == len(pages.python_blocks(page))


def test_every_picture_is_on_a_page_and_charts_are_those_of_the_measured_figures():
    shown = {name for path in pages.GUIDES for name in re.findall(r"\]\((?:docs/)?pictures/(.+?)\)", path.read_text())}
    of_blocks = {name for path in pages.PAGES for x in pages.python_blocks(path.read_text()) for name in x.pictures}
    assert shown == of_blocks | measured.CHARTS.keys() == {path.name for path in (pages.FOLDER / "pictures").iterdir()}
    for name, draw in measured.CHARTS.items():
        assert (pages.FOLDER / "pictures" / name).read_text() == draw(), f"{name}: python -m docs.render"


def test_the_readme_shows_a_chart_first_and_says_soon_how_fast():
    lines = (ROOT / "README.md").read_text().splitlines()
    (picture,) = (i for i, line in enumerate(lines) if line.startswith("!["))
    assert picture < 10
    headings = [i for i, line in enumerate(lines) if line.startswith("## ")]
    assert headings[headings.index(lines.index("## How fast")) + 1] < 90


@pytest.mark.parametrize("path", pages.GUIDES, ids=attrgetter("name"))
def test_generated_parts_are_what_their_commands_print(path):
    page = path.read_text()
    assert page.count("<!-- run: ") == len(pages.generated_parts(page))
    for command, written in pages.generated_parts(page):
        assert written == render.output_of(command), f"{command}: python -m docs.render"


def test_a_speed_up_lies_between_its_quartiles():
    shown = [x for path in pages.GUIDES for x in re.findall(r"([\d.]+)[^|\d(]*\(([\d.]+)-([\d.]+)\)", path.read_text())]
    assert len(shown) > 20
    assert [x for x in shown if not float(x[1]) <= float(x[0]) <= float(x[2])] == []


def test_the_table_of_packed_models(tmp_path, monkeypatch):
    seconds = {"transformers": [0.3, 0.1, 0.2], "swapped": [0.2, 0.2, 0.2], "packed": [0.05, 0.05, 0.04]}
    about = {"cpu": "A CPU", "cores": 2, "torch_threads": 2}, {"fastattn": "1", "torch": "2", "python": "3"}
    document = {"machine": about[0], "versions": about[1], "rows": [{"what": "x", "fill": 0.25, "seconds": seconds}]}
    (tmp_path / "some-packed-transformers.json").write_text(json.dumps(document))
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    lines = measured.packed("some").splitlines()
    assert " Fill 0.250 = 1 / 4.00. Medians of 3 to 3 rounds;" in lines[0]
    assert lines[-1] == "| x | 200 | 200 | 50 | 1.00 (0.75-1.25) | 5.00 (3.50-5.50) |"
    drawn = measured.chart_of_times(document, "title", "what", "packed", "transformers")
    assert "5.00x, 50 ms</text>" in drawn
    assert "25% of the batches are tokens. A CPU, 2<" in drawn
    # The quartiles are as far from each other as 3.5 and 5.5 are, where the bar is as long as 5.
    (length,) = re.findall(r'class="ours" .*width="([\d.]+)"', drawn)
    ((low, high),) = re.findall(r'<path d="M([\d.]+) [\d.]+H([\d.]+)"', drawn)
    assert (float(high) - float(low)) / float(length) == pytest.approx(2 / 5, abs=0.01)


def test_every_recipe_has_its_naive_way_and_is_timed():
    page = (pages.FOLDER / "recipes.md").read_text()
    assert re.findall(r"measured recipes \S+ (\w+) -->", page) == list(recipes.RECIPES)
    for name in recipes.RECIPES:
        assert all(f"\ndef {function}(" in page for function in (name, f"{name}_naive"))


def test_a_recipe_is_timed_if_it_is_right(tmp_path, monkeypatch):
    monkeypatch.setitem(recipes.RECIPES, "t5", ("Three numbers", lambda: [torch.rand(3)]))
    page = {"t5": lambda x: x.square(), "t5_naive": lambda x: x * x}
    row = recipes.measured("t5", page, 0.01)
    row |= {
        "seconds": {"fastattn": [0.01, 0.02, 0.03], "naive": [0.4, 0.4, 0.3]},
        "peak_bytes": {"fastattn": 2**20, "naive": 0},
    }
    machine = {"cpu": "A CPU", "cores": 2, "torch_threads": 2}
    document = {"machine": machine, "versions": dict.fromkeys(("fastattn", "torch", "python"), "1"), "rows": [row]}
    (tmp_path / "some-recipes.json").write_text(json.dumps(document))
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    assert measured.recipes("some").startswith("A CPU, 2 threads")
    assert measured.recipes("some", "t5") == (
        "**20.0 ms, 1.0 MiB**, the naive way 400 ms, 0.0 MiB: 20.0 times as fast (15.0-30.0). Three numbers, fp32."
    )
    for wrong in (lambda x: x.square() + 1e-5, lambda x: x.square().detach() + x - x.detach()):  # the gradient of x
        with pytest.raises(SystemExit, match="t5 is wrong"):
            recipes.measured("t5", page | {"t5": wrong}, 0.01)


def make_repository(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", "-C", folder, *command], check=True)


def test_the_map_has_folders_and_modules_with_their_first_sentences(tmp_path):
    make_repository(tmp_path, {
        "LICENSE": "Some words.",
        "README.md": "# Title\n\nThe front door.\n",
        "csrc/README.md": "# Title\n\n> The [kernels](x.md).\n",
        "fastattn/__init__.py": '"""The package."""\n',
        "fastattn/api.py": '"""What `x * y` is called\nby < 3 * 4 names. More."""\n',
        "fastattn/nn/__init__.py": '"""Layers."""\n',
        "fastattn/nn/layer.py": '"""One layer"""\n',
        "fastattn/nn/data/x.json": "{}",
    })  # fmt: skip
    assert repository_map.draw(tmp_path) == (
        "- [`csrc/`](csrc): The kernels.\n- [`fastattn/`](fastattn): The package.\n"
        "    - [`api.py`](fastattn/api.py): What `x * y` is called by &lt; 3 \\* 4 names.\n"
        "    - [`nn/`](fastattn/nn): Layers."
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "# A comment is not a docstring.\nx = 1\n"),
        ("a.cu", '#include "a.h"\nint a;\n// too late\n'),
        ("a.md", "# A heading only\n"),
        ("a.ipynb", '{"cells": [{"source": ["# A heading only"]}]}'),
        ("Makefile", "all:\n# too late\n"),
    ],
)
def test_a_file_that_does_not_say_what_it_is_fails_the_map_by_its_name(tmp_path, name, text):
    make_repository(tmp_path, {"b.py": '"""One."""', f"deep/{name}": text})
    with pytest.raises(ValueError, match=rf"; deep/{re.escape(name)} does not$"):
        repository_map.draw(tmp_path)


def test_every_folder_of_the_repository_is_on_the_map():
    files = repository_map.tracked_files(ROOT)
    folders = {file.parts[0] for file in files if len(file.parts) > 1 and not file.parts[0].startswith(".")}
    drawn = re.findall(r"^- \[`(\w+)/`", render.output_of("python -m docs.map"), re.MULTILINE)
    assert set(drawn) == folders


COMMANDS = sorted({line for path in pages.GUIDES for line in pages.shell_lines(path.read_text())})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_and_their_options_exist(command):
    words = list(itertools.dropwhile(re.compile(r"[A-Z_]+=").match, shlex.split(command)))
    match words:
        case ["make", *rest]:
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert {word for word in rest if "=" not in word} <= set(targets)
        case ["pip", "install", *rest]:
            extras = {extra for word in rest for part in re.findall(r"\[(.+)\]", word) for extra in part.split(",")}
            project = (ROOT / "pyproject.toml").read_text()
            assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)
        case ["git" | "gh" | "torchrun", *_]:
            pass  # they are others'
        case ["fastattn" | "python", *rest]:
            begin = 1 if words[1] == "-m" else 0  # options of Python's own
            options = [word for word in rest[begin:] if word.startswith("-")]
            chosen = words[: words.index(options[0], begin + 1)] if options else words
            text = render.output_of(shlex.join([*chosen, "--help"]))
            assert [option for option in options if not re.search(rf"{option}\b", text)] == []
        case _:
            assert os.access(ROOT / command, os.X_OK), f"what is {command!r}?"


def first_column(page: str, heading: str) -> list[str]:
    """The code in the first column of the table under a heading."""
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)


def test_messages_that_are_explained_are_those_of_the_code():
    messages = first_column((pages.FOLDER / "build.md").read_text(), "Messages and what they mean")
    assert len(messages) > 5
    code = sources("fastattn")
    assert [message for message in messages if message not in code] == []


def test_environment_variables_are_those_that_kernels_and_backends_read():
    read = set(re.findall(r"(?:environ\.get\(|kCapabilityVariable = )\"(\w+)\"", sources("fastattn/backends", "csrc")))
    listed = first_column((pages.FOLDER / "build.md").read_text(), "Environment variables")
    names = {variable.partition("=")[0] for variable in listed}
    assert names - {"OMP_NUM_THREADS"} == read - {"PATH"}  # the one is torch's, the other everybody's


def test_the_site_is_built_without_a_warning_and_whole(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr  # a broken link is a warning, which --strict counts (not so with --quiet)
    built = {path.stem: path.read_text() for path in tmp_path.glob("*.html")}
    assert {path.stem for path in pages.PAGES} <= built.keys()
    for module in (fastattn, fastattn.nn, fastattn.flash_attn):
        headings = {name: f'<h3 id="{module.__name__}.{name}">' for name in module.__all__}
        assert [name for name, heading in headings.items() if heading not in built["reference"]] == []
    cards = re.findall(r"<li>.*?</li>", built["index"].partition('class="grid cards"')[2].partition("</div>")[0], re.S)
    assert len(cards) > 4
    assert all(re.search(r'<a href="[\w-]+\.html"><strong>', card) for card in cards)  # a dead link fails the build
    assert (tmp_path / "search" / "search_index.js").read_text().startswith("var __index = {")  # without a server
    project = (ROOT / "pyproject.toml").read_text()
    repository = re.search(r'^Source = "(.+)"$', project, re.MULTILINE)[1]
    for page in built.values():
        assert f'<a href="{repository}"' in page
        assert 'data-md-component="source"' not in page  # by which the theme asks GitHub for stars
        assert 'assets/favicon.svg">' in page
        assert 'assets/iframe-worker.js"' in page
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?([^\" >]+)", page)
        assert loaded
        assert [address for address in loaded if "//" in address] == []  # nothing comes from the network

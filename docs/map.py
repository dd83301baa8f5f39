"""Prints the map of the repository, its folders and the package's files with their first sentences: python -m docs.map.

The first sentence of a Python file is that of its docstring, of a Markdown page or a notebook that of its text, of any
other file that of the comment it begins with, and every file must have one. A folder has the sentence of its
`__init__.py` or else of its `README.md`. Files are those that git tracks, or that the source distribution was made of.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
PACKAGE = PurePosixPath("fastattn")
_SPEAKS_FOR_FOLDER = ("__init__.py", "README.md")
_DATA = (".json", ".jsonl", ".neg", ".png", ".pos", ".svg", ".txt")  # most of these formats have no comments
_END_OF_SENTENCE = re.compile(r"[.?!](?=\s+[A-Z*`]|$)")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_CODE = re.compile(r"(`[^`]*`)")


def draw(root: Path) -> str:
    """The map of the repository at `root`, as Markdown: a list of folders in folders, and the package's own files.

    Raises:
        ValueError: a file does not begin with a sentence.
    """
    files = tracked_files(root)
    sentences = {file: first_sentence(root / file) for file in files}
    needing = [file for file in files if file.suffix not in _DATA and file.name != "LICENSE"]
    if silent := [str(file) for file in needing if not sentences[file]]:
        raise ValueError(
            f"a file must begin with a docstring or comment that says what it is; {', '.join(silent)} does not"
        )
    folders: dict[PurePosixPath, str] = {}
    for name in _SPEAKS_FOR_FOLDER:
        for file in files:
            if file.name == name:
                folders.setdefault(file.parent, sentences[file])
    entries = {folder: f"{folder.name}/" for folder in folders if folder.parts}
    entries |= {f: f.name for f in sentences if f.parent == PACKAGE and f.name not in _SPEAKS_FOR_FOLDER}
    lines = []
    for path in sorted(entries):
        depth = sum(parent in folders and bool(parent.parts) for parent in path.parents)
        lines.append(4 * depth * " " + f"- [`{entries[path]}`]({path}): {folders.get(path) or sentences[path]}")
    return "\n".join(lines)


def first_sentence(path: Path) -> str:
    """The sentence with which a file says what it is, as Markdown; "" where there is none."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    elif path.suffix in (".md", ".ipynb"):
        if path.suffix == ".ipynb":
            text = "".join(json.loads(text)["cells"][0]["source"])
        blocks = (block.strip() for block in re.sub("<!--.*?-->", "", text).split("\n\n"))
        said = next((block for block in blocks if block and not block.startswith(("#", "|", "```"))), "")
        said = re.sub(r"^> ", "", said, flags=re.MULTILINE)
    elif path.suffix in (".css", ".html"):
        said = "".join(re.findall(r"\A(?:/\*|\{#-)(.*?)(?:\*/|-#\})", text, re.DOTALL))
    elif path.suffix in (".h", ".cpp", ".cuh", ".cu", ".js"):
        said = _comment(text, "//", before="#")
    else:
        said = _comment(text, "#", before="#!")
    paragraph = _LINK.sub(r"\1", " ".join(said.strip().partition("\n\n")[0].split()))
    end = _END_OF_SENTENCE.search(paragraph)
    sentence = paragraph[: end.end()] if end else paragraph
    return sentence if path.suffix in (".md", ".ipynb") else "".join(map(_escaped, _CODE.split(sentence)))


def _escaped(part: str) -> str:
    """A part of a sentence that is code, or else as Markdown that shows it."""
    return part if part.startswith("`") else part.replace("*", r"\*").replace("<", "&lt;")


def _comment(text: str, mark: str, before: str) -> str:
    """The first paragraph of the comment that a text begins with; lines that begin with `before` may precede it."""
    comment: list[str] = []
    for line in text.splitlines():
        if not comment and (not line.strip() or line.startswith(before)):
            continue
        if not line.startswith(mark) or not line.removeprefix(mark).strip():
            break
        comment.append(line.removeprefix(mark).strip())
    return "\n".join(comment)


def tracked_files(root: Path) -> list[PurePosixPath]:
    """The files of the repository at `root`, or of the source distribution that is unpacked there."""
    if (root / ".git").exists():
        command = ["git", "-C", root, "ls-files", "-z"]
        names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    else:
        listed = (root / "fastattn.egg-info" / "SOURCES.txt").read_text().splitlines()
        names = sorted(name for name in listed if not name.startswith("fastattn.egg-info/"))
    return [PurePosixPath(name) for name in names if name and (root / name).is_file()]


if __name__ == "__main__":
    print(draw(ROOT))

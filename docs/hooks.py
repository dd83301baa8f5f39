"""The hooks of mkdocs: they include files, put docstrings into the reference, and make links out of the site text."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

_LOG = logging.getLogger("mkdocs.hooks.fastattn")  # a warning here fails a strict build
_INCLUDED = re.compile(r"^<!-- include: (\S+) -->\n(?:.+\n)*", re.MULTILINE)
_TARGET = re.compile(r"(?<=\]\()(?!https?:|#)[^)\s]+")
_MODULE = re.compile(r"^::: (\S+)$", re.MULTILINE)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]*)[^)]*\)")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Sources|Example):$", re.MULTILINE)
_ITEM = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)((?: \([^)]*\))?): ")
_BROKEN_NAMES = re.compile(r",\n(?=[\w*, ]+: )")


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """The page as the site shows it.

    A paragraph after `<!-- include: FILE -->` is replaced by that file without its title, `::: module` by what the
    module documents.
    Links that leave docs/, to files that only the repository has, become text.
    """
    folder = Path(page.file.abs_src_path).parent

    def text_of_file(include: re.Match) -> str:
        path = folder / include[1]
        text = re.sub(r"\A# .*\n", "", path.read_text())
        return _TARGET.sub(lambda target: os.path.relpath(path.parent / target[0], folder), text)

    def text_of(link: re.Match) -> str:
        if not (folder / link[2]).exists():
            _LOG.warning("%s links to %s, which is not there", page.file.src_path, link[2])
        return link[1]

    documented: dict[object, str] = {}
    markdown = _OUTSIDE.sub(text_of, _INCLUDED.sub(text_of_file, markdown))
    return _MODULE.sub(lambda line: _documented(line[1], documented), markdown)


def _documented(module: str, before: dict[object, str]) -> str:
    """Markdown for every public name of a module: its signature, its docstring, and those of its public methods.

    before: the names of the objects that are documented already; those of this module are added.
    """
    documented = importlib.import_module(module)
    parts = []
    for name in sorted(documented.__all__, key=str.lower):
        thing = getattr(documented, name)
        if thing in before:
            parts += [f"### {name} {{ #{module}.{name} }}", f"See [`{before[thing]}`](#{before[thing]})."]
            continue
        before[thing] = f"{module}.{name}"
        parts += [f"### {name} {{ #{module}.{name} }}", _signature(name, thing), _as_markdown(inspect.getdoc(thing))]
        for method_name, method in vars(thing).items() if inspect.isclass(thing) else ():
            function = method.__func__ if isinstance(method, (classmethod, staticmethod)) else method
            if not method_name.startswith("_") and inspect.isfunction(function) and function.__doc__:
                parts += [_signature(f"{name}.{method_name}", function), _as_markdown(inspect.getdoc(function))]
    return "\n\n".join(parts)


def _signature(name: str, function: object) -> str:
    try:
        signature = inspect.signature(function)
    except ValueError:  # an exception without a constructor of its own
        return f"```python\nclass {name}({function.__base__.__name__})\n```"
    shown, keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only and "*" not in "".join(shown):
            shown.append("*")
        keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        shown.append(_parameter(parameter))
    returned = signature.return_annotation
    end = "" if returned in (signature.empty, None, "None") else f" -> {_type(returned)}"
    text = f"{name}({', '.join(shown)}){end}"
    if len(text) > 88:
        text = f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in shown) + f"){end}"
    return f"```python\n{text}\n```"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_type(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return text
    default = getattr(parameter.default, "__name__", repr(parameter.default))
    default = "..." if default.startswith("<") else default  # what a dataclass makes anew
    return f"{text} = {default}" if ":" in text else f"{text}={default}"


def _type(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _as_markdown(docstring: str) -> str:
    """A docstring of this library: text, then sections of items, sentences or one example."""
    before, *sections = _SECTION.split(docstring)
    parts = [_items(before, of_section=False)]
    for heading, body in zip(sections[::2], sections[1::2], strict=True):
        body = inspect.cleandoc(body)
        is_code = heading == "Example"
        parts += [f"```pycon\n{body}\n```"] if is_code else [f"**{heading}**", _items(body, of_section=True)]
    return "\n\n".join(parts)


def _items(text: str, *, of_section: bool) -> str:
    """`name: what it is`, with its further lines indented, as the item of a list; other text as it is."""
    lines, may_begin = [], True
    for line in _BROKEN_NAMES.sub(", ", text.strip()).splitlines():
        item = _ITEM.match(line) if may_begin else None
        if item and (of_section or item[1].islower()):  # outside a section, only fields have descriptions
            line = f"- `{item[1]}`{item[2]}: {line[item.end() :]}"
        may_begin = not line or line.startswith(("- ", "    "))  # not in the middle of a sentence
        lines.append(line)
    return "\n".join(lines)

"""The workflows in .github: what they name is in this repository, and they may do no more than they must."""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTION = re.compile(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)")
"""One of somebody else's, at a version."""


def steps(workflow: dict) -> Iterator[dict]:
    for job in workflow["jobs"].values():
        yield from job.get("steps", [job])  # which may be a whole workflow that it calls


def commands(path: Path) -> list[str]:
    return [step["run"] for step in steps(yaml.safe_load(path.read_text())) if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=attrgetter("name"))
def test_actions_have_a_version_or_are_here(path):
    used = [step["uses"] for step in steps(yaml.safe_load(path.read_text())) if "uses" in step]
    assert used
    assert [action for action in used if not (ACTION.fullmatch(action) or (ROOT / action).exists())] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=attrgetter("name"))
def test_what_commands_name_exists(path):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    folders = {entry.name for entry in ROOT.iterdir() if entry.is_dir()} - {"dist", "build"}
    for command in commands(path):
        words = command.replace("'", "").split()
        if words[0] == "make":
            assert set(words[1:]) <= set(targets)
        named = [word for word in words if word.partition("/")[0] in folders or word.endswith((".txt", ".py"))]
        assert [word for word in named if not (ROOT / word).exists()] == []
        asked = [extra for word in words for found in re.findall(r"\.\[(.+)\]", word) for extra in found.split(",")]
        assert set(asked) <= set(extras)


@pytest.mark.parametrize("path", WORKFLOWS, ids=attrgetter("name"))
def test_permissions_are_to_read_unless_a_job_without_foreign_code_says_otherwise(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for job in workflow["jobs"].values():
        if set(job.get("permissions", {}).values()) - {"read"}:
            assert not any("checkout" in step.get("uses", "") for step in job["steps"])


def test_only_a_tag_publishes_and_only_after_all_tests():
    publishing = {path for path in WORKFLOWS if "gh-action-pypi-publish" in path.read_text()}
    assert {path.name for path in publishing} == {"release.yml"}
    release = yaml.safe_load(publishing.pop().read_text())
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML's name for `on`
    assert set(release["jobs"]["pypi"]["needs"]) == {"tests", "wheels"}
    assert release["jobs"]["pypi"]["environment"]["name"] == "pypi"


def test_what_cibuildwheel_runs_exists_and_what_it_builds_is_compiled():
    project = (ROOT / "pyproject.toml").read_text()
    settings = project.partition("\n[tool.cibuildwheel]\n")[2].partition("\n[tool.ruff]\n")[0]
    assert 'FASTATTN_REQUIRE_COMPILED = "1"' in settings
    files = re.findall(r"\{project\}/([\w./]+)", settings)
    assert len(files) == 2
    assert [name for name in files if not (ROOT / name).is_file()] == []

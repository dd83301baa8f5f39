"""What is published: the source distribution is whole, and package indexes can show what the package says of itself."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import wheel_on_torches

from docs.map import tracked_files

ROOT = Path(__file__).parents[2]
MADE_BY_SETUPTOOLS = re.compile(r"PKG-INFO|setup\.cfg|fastattn\.egg-info/.+")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of what git tracks."""
    if not (ROOT / ".git").exists():
        pytest.skip("git says which files there are, and this is no checkout")
    tree = tmp_path_factory.mktemp("release") / "tree"
    for name in tracked_files(ROOT):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    hidden = tree.parent / "hidden" / "torch"  # nothing here needs it
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text('raise ImportError("no torch here")')
    command, environment = [sys.executable, "setup.py", "-q", "sdist"], {**os.environ, "PYTHONPATH": str(hidden.parent)}
    subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)
    (archive,) = (tree / "dist").iterdir()
    return archive


@pytest.fixture(scope="module")
def metadata(sdist: Path) -> email.message.Message:
    with tarfile.open(sdist) as archive:
        (name,) = (name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO"))
        return email.message_from_binary_file(archive.extractfile(name))


def test_the_sdist_has_what_git_tracks_and_nothing_else(sdist):
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert {name for name in packed if not MADE_BY_SETUPTOOLS.fullmatch(name)} == set(map(str, tracked_files(ROOT)))


def test_twine_takes_the_sdist(sdist):
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", sdist], check=True)


def test_links_of_the_long_description_lead_to_files_of_this_version(metadata):
    addresses = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    place = re.compile(rf"{re.escape(addresses['Source'])}/(blob|raw)/v{re.escape(metadata['Version'])}/([^#]+)")
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", metadata.get_payload())
    assert len(links) > 10
    for picture, link in links:
        kind, file = place.match(link).groups()
        assert kind == ("raw" if picture else "blob")
        assert (ROOT / file).is_file()
    assert {address.startswith(addresses["Source"]) for address in addresses.values()} == {True}


def test_the_wheel_was_tested_with_the_oldest_and_the_newest_torch():
    runs = json.loads((Path(__file__).with_name("wheel_tested.json")).read_text())["runs"]
    assert {run["torch"] for run in runs} >= {"2.10.0", wheel_on_torches.TORCHS["3.13"]}
    assert all(run["passed"] > 2000 and run.keys() <= {"python", "torch", "passed", "skipped"} for run in runs)

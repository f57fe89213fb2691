"""The gallery shows what its records say."""

import re

from benchmarks.gallery import GALLERY, page


def test_the_page_of_the_gallery_is_that_of_its_records():
    assert (GALLERY / "README.md").read_text() == page(GALLERY), "run python -m benchmarks.gallery"


def test_every_page_is_there():
    text = (GALLERY / "README.md").read_text()
    folders = [path.parent for path in GALLERY.glob("*/auto.json")]
    assert folders
    for folder in folders:
        assert f"]({folder.name}/index.html)" in text
        assert 'href="report/report.html"' in (folder / "index.html").read_text()
        assert (folder / "report/report.html").is_file()


def test_no_page_names_a_folder_of_the_machine_that_made_it():
    for file in GALLERY.rglob("*.*"):
        assert not re.findall(
            r"(?<![\w.:/])/(?:home|root|tmp|work|Users|mnt)/\S*", file.read_text()
        ), file

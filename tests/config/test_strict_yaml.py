"""YAML files as plain data. Duplicate keys, merge keys and other ambiguous files are tested with
the readers that use this one, `test_hyperyaml.py` and `test_settings.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.models.tiny_model import one_line
from token2wav import ConfigError
from token2wav.config.strict_yaml import MAX_FILE_BYTES, parse_yaml, read_bounded, read_yaml


def test_numbers_are_those_of_yaml_1_2() -> None:
    assert parse_yaml(b"[1e-06, 1e6, 1.5, 7]") == [1e-06, 1e6, 1.5, 7]


def test_an_unknown_tag_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"line 2: the tag '!new:os\.system' is unknown"):
        parse_yaml(b"a: 1\nb: !new:os.system [ls]\n")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    for content in (b"\xff\xfe\x00", b"x: \x80\n", b"\x00\x01\x02" * 100, bytes(range(256))):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"^{path}: cannot be read as YAML") as caught:
            read_yaml(path)
        one_line(caught.value)
    for missing in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(ConfigError, match=f"^{missing}: cannot be read: "):
            read_yaml(missing)


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(b"#" * MAX_FILE_BYTES)
    assert read_yaml(path) is None
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    for large in (path, Path("/dev/zero")):  # the second one has no end
        with pytest.raises(ConfigError, match=f"larger than {MAX_FILE_BYTES} bytes"):
            read_yaml(large)
    assert len(read_bounded(path, MAX_FILE_BYTES + 1)) == MAX_FILE_BYTES + 1

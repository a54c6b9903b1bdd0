"""Reader of YAML files that rejects ambiguous files, and files made to exhaust memory or time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

import yaml

from token2wav.config.values import prefixed, shown
from token2wav.errors import ConfigError, one_line

MAX_FILE_BYTES = 1 << 20  # a public model file has 7 kB
_MAX_SCALAR_CHARS = 4000  # PyYAML needs quadratic time for long sexagesimal numbers (1:59:59)
# Beginnings of files that stand where another file should be.
_STAND_INS = {
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself; run 'git lfs pull' in "
    "the clone, or pull the model by its name",
    b"<!doctype html": "a page of HTML, not the file itself; download it again",
    b"<html": "a page of HTML, not the file itself; download it again",
}
_INVALID = (
    yaml.YAMLError,
    RecursionError,
    # PyYAML raises the following for text that does not fit its tag, such as `!!int ""`.
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


class StrictLoader(yaml.SafeLoader):
    """Loader that rejects duplicate keys and merge keys.

    Other YAML readers silently use the last of two equal keys. Merge keys (`<<`) are rejected
    because a few lines that merge each other can fill any memory.
    """

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if len(value) > _MAX_SCALAR_CHARS:
            _refuse(
                f"a value has {len(value)} characters; at most {_MAX_SCALAR_CHARS} are allowed",
                node,
            )
        return value

    def construct_undefined(self, node: yaml.Node) -> NoReturn:
        _refuse(f"the tag {shown(node.tag)} is unknown; nothing was executed", node)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                _refuse("merge keys (<<) are not allowed; write the keys out", key)
        super().flatten_mapping(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            lines: dict[Any, int] = {}
            for key_node, _ in node.value:
                key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
                if key in lines:
                    _refuse(
                        f"key {shown(key)} appears more than once, first in line {lines[key]}",
                        key_node,
                    )
                lines[key] = line
        return mapping


StrictLoader.add_constructor(None, StrictLoader.construct_undefined)
# Public files are written for YAML 1.2, which reads 1e-06 as a number. PyYAML implements YAML 1.1,
# which requires a dot in such a number.
StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path, loader: type[StrictLoader] = StrictLoader) -> Any:
    """Reads a YAML file as plain data.

    Raises:
        ConfigError: the file cannot be read, is too large, is not YAML, has a duplicate key or a
            merge key, or has a tag for a Python object.
    """
    with prefixed(f"{path}: "):
        return parse_yaml(read_bounded(path), loader)


def parse_yaml(content: bytes, loader: type[StrictLoader] = StrictLoader) -> Any:
    """Reads YAML as plain data; raises ConfigError as `read_yaml`."""
    try:
        return yaml.load(content.decode("utf-8"), Loader=loader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot be read as YAML: {error}") from error
    except _INVALID as error:
        raise ConfigError(f"cannot be read as YAML: {_reason(error)}") from error


def read_bounded(path: Path, most_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Reads a configuration file of any format. Raises ConfigError if the file cannot be read, is
    larger than `most_bytes`, or is a pointer of Git LFS or a page of HTML.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if len(content) > most_bytes:
        raise ConfigError(
            f"{path}: larger than {most_bytes} bytes, the limit of a configuration file"
        )
    if problem := stand_in(content):
        raise ConfigError(f"{path}: {problem}")
    return content


def stand_in(content: bytes) -> str:
    """Names a pointer of Git LFS or a page of HTML, by the beginning of a file; empty for others.

    A clone without Git LFS has the one, and a download without access the other.
    """
    start = content[:64].lstrip().lower()
    return next((text for sign, text in _STAND_INS.items() if start.startswith(sign)), "")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, yaml.constructor.ConstructorError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return one_line(error) or type(error).__name__


def _refuse(problem: str, node: yaml.Node) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

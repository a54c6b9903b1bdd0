"""Reader of HyperPyYAML files (`cosyvoice3.yaml`) as plain data. It imports and calls nothing.

The public loader builds Python objects from such files: `!new:package.Class` calls the class, and
`!apply:f` calls the function. Here a tag is only a label of a node.

`!ref <a> * <b>` is a reference with arithmetic on numbers. It is resolved only when a caller asks
for its key. So keys that serving does not need may have any content.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from token2wav.config.strict_yaml import StrictLoader, read_yaml
from token2wav.config.values import convert, kinds, shown
from token2wav.errors import ConfigError

MAX_EXPRESSION_CHARS = 200  # a long expression can make Python's parser recurse without end
# Values under one key after references and aliases are resolved; a public model has 100.
MAX_VALUES = 10_000

_REFERENCE = re.compile(r"<([A-Za-z_]\w*)((?:\[\w+\])*)>")
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Tagged:
    """YAML node with a tag, as data.

    `!new:pkg.Class {a: 1}` is `Tagged("new", "pkg.Class", {"a": 1})`.
    """

    tag: str
    target: str
    value: Any


class _Loader(StrictLoader):
    """Loader that keeps local tags (one `!`) as data; `!!python/...` stays an error."""


def _construct_tagged(loader: _Loader, suffix: str, node: yaml.Node) -> Tagged:
    value: Any
    if isinstance(node, yaml.MappingNode):
        value = loader.construct_mapping(node, deep=True)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        assert isinstance(node, yaml.ScalarNode)
        value = loader.construct_scalar(node)
    tag, _, target = suffix.partition(":")
    return Tagged(tag, target, value)


_Loader.add_multi_constructor("!", _construct_tagged)


class HyperYaml:
    """Document of one HyperPyYAML file. It resolves the references in the file.

    Args:
        path: file, for messages.
        data: mapping at the top level of the file.
    """

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self._path = path
        self._data = data
        self._values_left = MAX_VALUES

    @classmethod
    def read(cls, path: Path) -> HyperYaml:
        """Reads a file.

        Raises:
            ConfigError: the file cannot be read as YAML (see `read_yaml`), or is not a mapping.
        """
        data = read_yaml(path, _Loader)
        if not isinstance(data, dict):
            raise ConfigError(
                f"{path}: expected a mapping at the top level, got {type(data).__name__}"
            )
        return cls(path, data)

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def resolve(self, key: str) -> Any:
        """Returns the value of a top-level key, with every `!ref` in it replaced.

        Raises:
            ConfigError: the key or a key that it refers to is missing; a reference is circular or
                is not arithmetic on numbers; or the value is too large or nested too deep.
        """
        self._values_left = MAX_VALUES
        try:
            return self._resolve(self._top(key), (key,))
        except RecursionError as error:
            raise ConfigError(f"{self._path}: '{key}' is nested too deep, or in itself") from error

    def _top(self, key: str) -> Any:
        if key not in self._data:
            raise ConfigError(f"{self._path}: key '{key}' is missing")
        return self._data[key]

    def _resolve(self, node: Any, trail: tuple[str, ...]) -> Any:
        self._values_left -= 1
        if self._values_left < 0:
            raise ConfigError(f"{self._path}: '{trail[0]}' holds more than {MAX_VALUES} values")
        if isinstance(node, Tagged):
            if node.tag == "ref":
                return self._reference(str(node.value), trail)
            return Tagged(node.tag, node.target, self._resolve(node.value, trail))
        if isinstance(node, dict):
            return {key: self._resolve(value, trail) for key, value in node.items()}
        if isinstance(node, list):
            return [self._resolve(value, trail) for value in node]
        return node

    def _reference(self, text: str, trail: tuple[str, ...]) -> Any:
        matches = list(_REFERENCE.finditer(text))
        if len(matches) == 1 and matches[0].group(0) == text.strip():
            return self._look_up(matches[0], trail)
        names = {f"ref{index}": self._look_up(match, trail) for index, match in enumerate(matches)}
        numbered: Iterator[str] = iter(names)
        expression = _REFERENCE.sub(lambda _: next(numbered), text).strip()
        try:
            if len(expression) > MAX_EXPRESSION_CHARS:
                raise ValueError(f"longer than {MAX_EXPRESSION_CHARS} characters")
            return _evaluate(ast.parse(expression, mode="eval").body, names)
        except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise ConfigError(
                f"{self._path}: '!ref {' '.join(text[:MAX_EXPRESSION_CHARS].split())}' under "
                f"'{trail[0]}' is not "
                f"arithmetic on numbers: {error}"
            ) from error

    def _look_up(self, match: re.Match[str], trail: tuple[str, ...]) -> Any:
        key, path = match.group(1), re.findall(r"\[(\w+)\]", match.group(2))
        if key in trail:
            raise ConfigError(f"{self._path}: circular reference {' -> '.join((*trail, key))}")
        node = self._resolve(self._top(key), (*trail, key))
        for step in path:
            inner = node.value if isinstance(node, Tagged) else node
            if not isinstance(inner, dict) or step not in inner:
                raise ConfigError(
                    f"{self._path}: reference {match.group(0)} names no key of this file"
                )
            node = inner[step]
        return node


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> float:
    """Evaluates arithmetic on numbers. Powers (`**`) and long integers are refused, because their
    computation may take forever.
    """
    number = _number(node, names)
    if isinstance(number, int) and number.bit_length() > 64:
        raise ValueError("an integer of more than 64 bits")
    return number


def _number(node: ast.expr, names: Mapping[str, Any]) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.Name) and type(names.get(node.id)) in (int, float):
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, names)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_evaluate(node.left, names), _evaluate(node.right, names))
    raise ValueError(
        f"only numbers, references and + - * / // % are allowed, got {ast.dump(node)[:60]}"
    )


@dataclass(frozen=True)
class ModelNode:
    """Mapping in the model file, which returns its values with checked types."""

    name: str  # path of keys that leads to the mapping, for messages
    data: dict[str, Any]  # content of the mapping
    used: set[str] = field(default_factory=set)  # keys of the values that were read

    @classmethod
    def of(cls, value: Any, name: str, target: str | None = None) -> ModelNode:
        if target is not None:
            label = (
                f"!{value.tag}:{value.target}"
                if isinstance(value, Tagged)
                else type(value).__name__
            )
            if (
                not isinstance(value, Tagged)
                or value.tag != "new"
                or value.target.rpartition(".")[2] != target
            ):
                raise ConfigError(f"{name}: expected '!new:...{target}', got '{label}'")
            value = value.value
        if not isinstance(value, dict):
            raise ConfigError(f"{name}: expected a mapping, got {type(value).__name__}")
        return cls(name, value)

    def child(self, key: str, target: str | None = None) -> ModelNode:
        return ModelNode.of(self._value(key), f"{self.name}.{key}", target)

    def get(self, key: str, kind: Any) -> Any:
        return convert(self._value(key), kind, f"{self.name}.{key}")

    def get_or(self, key: str, kind: Any, default: Any) -> Any:
        return self.get(key, kind) if key in self.data else default

    def fields(self, config: type, *keys: str, but: Collection[str] = ()) -> dict[str, Any]:
        """Returns values for fields of a dataclass, converted to the types of the fields.

        Args:
            keys: names of the fields; none for all fields.
            but: names of fields to leave out.
        """
        types = kinds(config)
        return {key: self.get(key, types[key]) for key in keys or types if key not in but}

    def only(self, known: Mapping[str, Any], *, omitted: bool = True) -> None:
        """Raises ConfigError if a key has another value than the only supported one.

        Args:
            known: supported values by key.
            omitted: whether a key may be missing.
        """
        for key, value in known.items():
            setting = (
                self.get_or(key, type(value), value) if omitted else self.get(key, type(value))
            )
            if setting != value:
                raise ConfigError(
                    f"{self.name}.{key}: {shown(setting)}, but only {shown(value)} is supported"
                )

    def check_used(self, *without_effect: str) -> None:
        """Raises ConfigError if the mapping has a key that was not read.

        Args:
            without_effect: keys that do not change the audio of the model, such as the keys of its
                training.
        """
        for key in self.data:
            if key not in self.used and key not in without_effect:
                raise ConfigError(f"{self.name}.{key}: unknown key; its effect is not supported")

    def _value(self, key: str) -> Any:
        if key not in self.data:
            raise ConfigError(f"{self.name}.{key}: missing")
        self.used.add(key)
        return self.data[key]

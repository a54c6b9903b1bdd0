"""Node of a model file: it knows the path of its keys, so that messages can say which value is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from token2wav.config.hyperyaml import Tagged
from token2wav.config.values import convert
from token2wav.errors import ConfigError


@dataclass(frozen=True)
class ModelNode:
    """Mapping in the model file, with the path of keys that leads to it; it hands out typed values."""

    name: str
    data: dict[str, Any]

    @classmethod
    def of(cls, value: Any, name: str, target: str | None = None) -> ModelNode:
        if target is not None:
            found = f"!{value.tag}:{value.target}" if isinstance(value, Tagged) else type(value).__name__
            if not isinstance(value, Tagged) or value.tag != "new" or value.target.rpartition(".")[2] != target:
                raise ConfigError(f"{name}: expected '!new:...{target}', got '{found}'")
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

    def fields(self, *keys: str, kind: Any) -> dict[str, Any]:
        return {key: self.get(key, kind) for key in keys}

    def _value(self, key: str) -> Any:
        if key not in self.data:
            raise ConfigError(f"{self.name}.{key}: missing")
        return self.data[key]

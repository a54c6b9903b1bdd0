"""Cuts the schemas of KServe's resources down to the fields that `deploy/kserve` uses, for tests.

A field that a manifest uses keeps its schema. Of the fields beside it only the names remain. So the
tests find a misspelt field. The schemas come from the repository of KServe, `config/crd/full`:

    .venv/bin/python -m scripts.kserve_schemas serving.kserve.io_servingruntimes.yaml \\
        serving.kserve.io_inferenceservices.yaml
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
MANIFESTS = ROOT / "deploy" / "kserve"
SCHEMAS = ROOT / "tests" / "data" / "kserve_schemas.json"
_KEPT = ("type", "enum", "required", "x-kubernetes-int-or-string", "additionalProperties")


def cut(schema: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    """Returns a schema with the parts that some values use."""
    subset = {key: schema[key] for key in _KEPT if key in schema}
    if "properties" in schema:
        subset["additionalProperties"] = False
        subset["properties"] = {
            name: cut(inner, below)
            if (below := [value[name] for value in values if name in value])
            else {}
            for name, inner in schema["properties"].items()
        }
    if "items" in schema:
        subset["items"] = cut(schema["items"], [item for value in values for item in value])
    return subset


def main() -> None:
    parser = argparse.ArgumentParser(description="Cut KServe's schemas down for tests.")
    parser.add_argument("crds", nargs="+", type=Path, help="custom resource definitions of KServe")
    options = parser.parse_args()
    manifests = [yaml.safe_load(path.read_text()) for path in sorted(MANIFESTS.glob("*.yaml"))]
    schemas: dict[str, Any] = {}
    for path in options.crds:
        definition = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]
        kind = definition["names"]["kind"]
        used = [manifest for manifest in manifests if manifest["kind"] == kind]
        for version in definition["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            schemas[f"{definition['group']}/{version['name']} {kind}"] = cut(schema, used)
    SCHEMAS.write_text(json.dumps(schemas, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

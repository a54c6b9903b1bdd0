"""The manifests for KServe, against KServe's schemas and against those for Kubernetes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from scripts.kserve_schemas import MANIFESTS, SCHEMAS
from testkit.models.golden import ROOT

RUNTIME = yaml.safe_load((MANIFESTS / "serving_runtime.yaml").read_text())
SERVICE = yaml.safe_load((MANIFESTS / "inference_service.yaml").read_text())


def checked(manifest: dict[str, Any]) -> None:
    # Imported here, because it takes a second, and every pytest process imports every test file.
    from jsonschema import validate

    schemas = json.loads(SCHEMAS.read_text())
    validate(manifest, schemas[f"{manifest['apiVersion']} {manifest['kind']}"])


@pytest.mark.parametrize("manifest", [RUNTIME, SERVICE], ids=["runtime", "service"])
def test_schemas(manifest: dict[str, Any]) -> None:
    checked(manifest)


def test_the_service_asks_for_the_runtime() -> None:
    model = SERVICE["spec"]["predictor"]["model"]
    formats = RUNTIME["spec"]["supportedModelFormats"]
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert model["modelFormat"]["name"] in {one["name"] for one in formats}
    assert model["protocolVersion"] in RUNTIME["spec"]["protocolVersions"]


def test_the_container_is_that_of_kubernetes() -> None:
    """Probes and arguments are the same, so that the tests of those manifests hold here."""
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/base/server.yaml").read_text())
    [deployment] = [one for one in documents if one["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    [kubernetes], [container] = pod["containers"], RUNTIME["spec"]["containers"]
    assert container["args"] == kubernetes["args"]
    assert container["livenessProbe"] == kubernetes["livenessProbe"]
    for probe in ("startupProbe", "readinessProbe"):
        by_name = {port["name"]: port["containerPort"] for port in kubernetes["ports"]}
        expected = json.loads(json.dumps(kubernetes[probe]))
        expected["httpGet"]["port"] = by_name[expected["httpGet"]["port"]]
        assert container[probe] == expected
    assert container["securityContext"].items() >= kubernetes["securityContext"].items()
    grace = SERVICE["spec"]["predictor"]["terminationGracePeriodSeconds"]
    assert grace == pod["terminationGracePeriodSeconds"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert all(volumes[one["name"]] == one for one in RUNTIME["spec"]["volumes"])

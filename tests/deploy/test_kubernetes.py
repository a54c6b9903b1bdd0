"""The manifests, built by kubectl, against Kubernetes' schemas and against the project's files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.balancer import needs_haproxy
from testkit.rigs.certificates import self_signed
from testkit.rigs.forked_command import run
from testkit.rigs.processes import finished
from token2wav_gateway.server import DRAIN_S
from token2wav_gateway.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu")
RELEASES = ("1.30", "1.35")
VOLUMES = ("folder", "model")  # settings of the voices that name folders
Manifests = dict[tuple[str, str], dict[str, Any]]


ALL_COMPONENTS = """
resources: [../gpu, ../../gateway]
components: [../../components/mps, ../../components/hub, ../../components/monitoring]
patches:
  - patch: |
      {apiVersion: v1, kind: ConfigMap, metadata: {name: token2wav-hub},
      data: {TOKEN2WAV_MODEL_FOLDER: acme/model}}
"""


@pytest.fixture(scope="module", params=OVERLAYS)
def manifests(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Manifests:
    needs_kubectl()
    resources = f"[../{request.param}, ../../gateway]"
    return kustomize(overlay_in(tmp_path_factory.mktemp("deploy"), f"resources: {resources}\n"))


def needs_kubectl() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: https://kubernetes.io/docs/tasks/tools")


def overlay_in(folder: Path, kustomization: str) -> Path:
    """Copies the manifests into a folder, adds an overlay of one's own, and returns it."""
    shutil.copytree(
        ROOT / "docker", folder / "docker", ignore=shutil.ignore_patterns("tokens", "files")
    )
    shutil.copytree(MANIFESTS, folder / "deploy" / "kubernetes")
    overlay = folder / "deploy" / "kubernetes" / "overlays" / "mine"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(kustomization)
    return overlay


def kustomize(overlay: Path) -> Manifests:
    """Builds an overlay, and returns its manifests by kind and name."""
    command = ["kubectl", "kustomize", str(overlay)]
    built = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert built.returncode == 0, built.stderr
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(built.stdout)}


def check_schemas(manifests: Iterable[dict[str, Any]]) -> None:
    # Imported here, because it takes a second, and every pytest process imports every test file.
    import kubernetes_validate

    for release in RELEASES:
        for manifest in manifests:
            kubernetes_validate.validate(manifest, release, strict=True)


def test_schemas(manifests: Manifests) -> None:
    check_schemas(manifests.values())


def test_schemas_of_all_components(tmp_path: Path) -> None:
    needs_kubectl()
    [patch] = re.findall(
        r"```yaml\npatches:\n(.*?)```", (ROOT / "docs/scaling.md").read_text(), re.DOTALL
    )
    built = kustomize(overlay_in(tmp_path, ALL_COMPONENTS + patch))
    [container] = built["Job", "token2wav-pull"]["spec"]["template"]["spec"]["containers"]
    assert "--front-end" in container["args"][-1]
    # The schemas of the Prometheus operator are not among those of Kubernetes.
    check_schemas([one for (kind, _), one in built.items() if kind != "PodMonitor"])


def test_every_container_is_without_privileges(manifests: Manifests) -> None:
    for pod in _pods(manifests):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"], container["name"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
            assert not [
                variable
                for variable in container.get("env", [])
                if re.search("SECRET|PASSWORD", variable["name"])
            ]


def test_a_server_that_stops_has_the_time_it_needs(manifests: Manifests) -> None:
    pod = _pod(manifests, "token2wav-server")
    options = _options(pod["containers"][0]["args"])
    stopping = float(options["--notice-seconds"]) + float(options["--grace-seconds"])
    assert pod["terminationGracePeriodSeconds"] >= stopping + 10
    live, ready = (pod["containers"][0][f"{kind}Probe"] for kind in ("liveness", "readiness"))
    assert live["periodSeconds"] * (live["failureThreshold"] - 1) > stopping
    # The balancer asks every second. The readiness probe serves clients that only use Kubernetes'
    # answer.
    assert ready["periodSeconds"] * ready["failureThreshold"] < float(options["--notice-seconds"])


def test_commands_and_options_exist(manifests: Manifests) -> None:
    container = _pod(manifests, "token2wav-server")["containers"][0]
    assert container["args"][0] == "serve"
    assert "serve) serve" in (ROOT / "docker" / "entrypoint.sh").read_text()
    known = _help("serve")
    for option in _options(container["args"]):
        assert option in known, option
    program, command, *arguments = container["livenessProbe"]["exec"]["command"]
    assert program == "token2wav"
    for option in (argument for argument in arguments if argument.startswith("--")):
        assert option in _help(command), option


def test_servers_and_gateways_find_a_pulled_model(manifests: Manifests) -> None:
    server, gateway = (
        _pod(manifests, f"token2wav-{name}")["containers"][0] for name in ("server", "gateway")
    )
    assert gateway.get("envFrom") == server["envFrom"]
    mount = {"name": "model", "mountPath": "/model", "readOnly": True}
    assert mount in server["volumeMounts"]
    assert mount in gateway["volumeMounts"]


def test_ports_names_and_labels_meet(manifests: Manifests) -> None:
    for name, server, service in (
        ("token2wav-server", "grpc", "token2wav-replicas"),
        ("token2wav-balancer", "grpcs", "token2wav"),
        ("token2wav-gateway", "http", "token2wav-gateway"),
    ):
        template = manifests["Deployment", name]["spec"]["template"]
        labels = template["metadata"]["labels"]
        ports = {
            port["name"]: port["containerPort"]
            for port in template["spec"]["containers"][0]["ports"]
        }
        spec = manifests["Service", service]["spec"]
        assert spec["selector"].items() <= labels.items()
        assert spec["ports"][0]["targetPort"] == server
        assert server in ports
        assert (
            manifests["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"].items()
            <= labels.items()
        )
        policy = manifests["NetworkPolicy", name]["spec"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        for rule in policy["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= ports.keys()
    assert manifests["Service", "token2wav-replicas"]["spec"]["clusterIP"] == "None"
    target = manifests["HorizontalPodAutoscaler", "token2wav-server"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) in manifests


def test_the_balancer_has_places_for_departing_and_new_servers(manifests: Manifests) -> None:
    """A departed server keeps its place while it may still have streams.

    Several rollouts may happen in this time.
    """
    configuration = _configuration(manifests)
    [places] = re.findall(r"server-template replica- (\d+)", configuration)
    [hold_minutes] = re.findall(r"hold obsolete (\d+)m", configuration)
    server = _pod(manifests, "token2wav-server")
    most = manifests["HorizontalPodAutoscaler", "token2wav-server"]["spec"]["maxReplicas"]
    assert 60 * int(hold_minutes) >= server["terminationGracePeriodSeconds"]
    rollouts = int(hold_minutes) / 2  # rollouts of all servers, each of at least two minutes
    assert most * (1 + rollouts) <= int(places)


def test_the_gateway_accepts_its_settings(manifests: Manifests, tmp_path: Path) -> None:
    """The files that its settings name are those that its pod mounts."""
    pod = _pod(manifests, "token2wav-gateway")
    [container] = pod["containers"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    name = _config_map(manifests, "token2wav-gateway")
    document = yaml.safe_load(manifests["ConfigMap", name]["data"]["gateway.yaml"])
    speech = document["speech_server"]
    paths = [speech["token_file"], speech["tls"]["ca"], *map(document["voices"].get, VOLUMES)]
    assert all(any(path.startswith(mount) for mount in mounts) for path in paths)
    host, _, port = speech["url"].partition(":")
    assert manifests["Service", host]["spec"]["ports"][0]["port"] == int(port)

    certificate, _ = self_signed(tmp_path)
    (tmp_path / "token").write_text("secret\n")
    speech["token_file"], speech["tls"]["ca"] = str(tmp_path / "token"), str(certificate)
    assert Settings.model_validate(document).speech_server.access_token() == "secret"

    grace = pod["terminationGracePeriodSeconds"]
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert grace >= pause + DRAIN_S + 5
    for option in _options(container["args"]):
        assert option in _help("gateway"), option


def test_the_operator_gets_the_alerts_of_docker() -> None:
    printed = subprocess.run(
        [MANIFESTS / "prometheus_rule.sh"], capture_output=True, text=True, check=True
    ).stdout
    rule = yaml.safe_load(printed)
    assert rule["kind"] == "PrometheusRule"
    assert rule["spec"] == yaml.safe_load(
        (ROOT / "docker" / "prometheus" / "alerts.yml").read_text()
    )


@pytest.mark.parametrize("manifests", ["gpu"], indirect=True)
def test_a_server_has_a_gpu_of_its_own(manifests: Manifests) -> None:
    pod = _pod(manifests, "token2wav-server")
    for container in [*pod["containers"], *pod["initContainers"]]:
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    strategy = manifests["Deployment", "token2wav-server"]["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}, (
        "a rollout must not need a spare GPU"
    )


def test_haproxy_accepts_the_configuration_of_the_manifest(
    manifests: Manifests, tmp_path: Path
) -> None:
    haproxy = needs_haproxy()
    container = _pod(manifests, "token2wav-balancer")["containers"][0]
    certificate, key = self_signed(tmp_path)
    tls = tmp_path / "tls.pem"
    tls.write_bytes(certificate.read_bytes() + key.read_bytes())
    (tmp_path / "tokens").write_text("")
    environment = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    environment |= {"TOKEN2WAV_CERTIFICATE": str(tls), "TOKEN2WAV_TOKENS": str(tmp_path / "tokens")}
    files = manifests["ConfigMap", _config_map(manifests, "token2wav-balancer")]["data"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    configuration = tmp_path / "haproxy.cfg"
    checked = finished(haproxy, "-c", "-f", configuration, env=os.environ | environment)
    assert checked.returncode == 0, checked.stderr
    assert "[WARNING]" not in checked.stderr


def _pods(manifests: Manifests) -> Iterator[dict[str, Any]]:
    for kind, name in manifests:
        if kind == "Deployment":
            yield _pod(manifests, name)


def _pod(manifests: Manifests, name: str) -> dict[str, Any]:
    return manifests["Deployment", name]["spec"]["template"]["spec"]


def _options(arguments: list[str]) -> dict[str, str]:
    pairs = [argument.partition("=") for argument in arguments if argument.startswith("--")]
    return {name: value for name, _, value in pairs}


@cache
def _help(command: str) -> str:
    return run({}, command, "--help").stdout


def _config_map(manifests: Manifests, deployment: str) -> str:
    """Returns the name of the config map that the pods of a deployment mount."""
    [name] = [
        volume["configMap"]["name"]
        for volume in _pod(manifests, deployment)["volumes"]
        if "configMap" in volume
    ]
    return str(name)


def _configuration(manifests: Manifests) -> str:
    return manifests["ConfigMap", _config_map(manifests, "token2wav-balancer")]["data"][
        "haproxy.cfg"
    ]

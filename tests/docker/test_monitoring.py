"""Prometheus' and Grafana's files; that a real server exports what they ask for is seen in
tests/served/test_entrypoint.py.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.container import DOCKER
from tests.support.queries import ALERTS, DASHBOARD, panels, queries
from token2wav.config import ServerConfig
from token2wav_server.launcher.ports import Ports

PROMETHEUS = DOCKER / "prometheus"
PROVISIONING = DOCKER / "grafana" / "provisioning"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DOCKER / "docker-compose.yml").read_text())
    return document


def promtool(*arguments: str) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    done = subprocess.run(
        [program, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_its_configuration() -> None:
    promtool("check", "config", "prometheus.yml")


def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", "alerts_test.yml")


def test_prometheus_accepts_what_the_dashboard_asks(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": re.sub(r"\$__rate_interval", "5m", query.expression)}
        for number, query in enumerate(queries())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_prometheus_asks_the_server(compose: dict[str, Any]) -> None:
    document = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    job, _ = document["scrape_configs"]
    [discovery] = job["dns_sd_configs"]
    assert discovery["port"] == Ports.metrics
    assert discovery["names"] == ["server"]
    assert "server" in compose["services"]
    assert "server" in compose["services"]["server-cpu"]["networks"]["inside"]["aliases"]
    assert all((PROMETHEUS / name).is_file() for name in document["rule_files"])
    assert {
        name for query in queries() for name in re.findall(r'job="(\w+)"', query.expression)
    } == {job["job_name"]}


def test_prometheus_asks_the_balancer() -> None:
    _, job = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    [discovery] = job["dns_sd_configs"]
    balancer = DOCKER / "balancer"
    assert discovery["names"] == ["balancer"]
    assert re.search(r"(?m)^  balancer:$", (balancer / "docker-compose.yml").read_text())
    assert (
        f"presetenv TOKEN2WAV_STATUS_BIND :{discovery['port']}\n"
        in (balancer / "haproxy.cfg").read_text()
    )


def test_every_alert_says_what_to_do() -> None:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]:
        assert set(rule["annotations"]) == {"summary", "action"}
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_alerts_name_settings_that_exist() -> None:
    found = re.findall(r"\b(stream|runtime|limits)\.(\w+)", ALERTS.read_text())
    assert found
    for section, key in found:
        assert hasattr(getattr(ServerConfig(), section), key), f"{section}.{key}"


def test_grafana_finds_prometheus_and_the_dashboard(compose: dict[str, Any]) -> None:
    [source] = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert f":{port}" in compose["services"][host]["ports"][0]
    assert {target["datasource"]["uid"] for panel in panels() for target in panel["targets"]} == {
        source["uid"]
    }
    [provider] = yaml.safe_load((PROVISIONING / "dashboards" / "token2wav.yml").read_text())[
        "providers"
    ]
    grafana = compose["services"]["grafana"]
    mounts = dict(volume.split(":")[1::-1] for volume in grafana["volumes"])
    folder = DOCKER / mounts[provider["options"]["path"]]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert folder / home.name == DASHBOARD
    assert str(home.parent) == provider["options"]["path"]
    assert "/etc/grafana/provisioning" in mounts


def test_panels_have_names_and_places_of_their_own() -> None:
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found)
    covered = [
        (x, y)
        for place in (panel["gridPos"] for panel in found)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(covered) == len(set(covered)), "panels overlap"
    assert all(panel["description"].endswith(".") for panel in found)

"""Configuration files of Prometheus and Grafana. tests/served/test_entrypoint.py checks that a real
server exports every metric that these files query.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest

from testkit.rigs.container import COMPOSE, DOCKER, read_compose
from testkit.rigs.processes import finished
from testkit.rigs.queries import ALERTS, DASHBOARD, Query, panels, queries, unknown
from token2wav.config import ServerConfig
from token2wav_gateway.metrics import Metrics

PROMETHEUS = DOCKER / "prometheus"
PROVISIONING = DOCKER / "grafana" / "provisioning"


def promtool(*arguments: str) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    done = finished(program, *arguments, cwd=PROMETHEUS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_its_configuration() -> None:
    promtool("check", "config", "prometheus.yml")


def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", "alerts_test.yml")


def test_prometheus_accepts_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": re.sub(r"\$__rate_interval", "5m", query.expression)}
        for number, query in enumerate((*queries(gateway=False), *queries(gateway=True)))
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(file))


@pytest.mark.parametrize("query", queries(gateway=True), ids=str)
def test_queries_name_metrics_of_the_gateway(query: Query) -> None:
    metrics = Metrics()
    for outcome in ("done", "failed", "cancelled"):
        metrics.texts.labels(outcome)
    metrics.refused.labels("429")
    assert not unknown(query, generate_latest(metrics.registry).decode())


def test_alerts_name_settings_that_exist() -> None:
    settings = re.findall(r"\b(stream|runtime|limits)\.(\w+)", ALERTS.read_text())
    assert settings
    for section, key in settings:
        assert hasattr(getattr(ServerConfig(), section), key), f"{section}.{key}"


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    compose = read_compose(COMPOSE)
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

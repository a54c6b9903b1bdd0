"""PromQL of the monitoring files: the dashboard and the alert rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from testkit.rigs.container import DOCKER

DASHBOARD = DOCKER / "grafana" / "dashboards" / "token2wav.json"
ALERTS = DOCKER / "prometheus" / "alerts.yml"
_OURS = re.compile(r"\b(token2wav_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_GATEWAY = "token2wav_gateway_"
_ADDED = {"instance", "job"}  # by Prometheus
_RARE = {"reason", "what"}  # labels that get a value only after a failure


@dataclass(frozen=True)
class Selector:
    """Metric of ours with its labels.

    A label has the value that it must have, or None if several values are possible.
    """

    metric: str
    labels: dict[str, str | None]


@dataclass(frozen=True)
class Query:
    """Expression, and its location in the monitoring files."""

    location: str
    expression: str

    def __str__(self) -> str:
        return self.location

    @property
    def selectors(self) -> list[Selector]:
        return [
            Selector(
                metric,
                {
                    label: value if operator == "=" and label not in _RARE else None
                    for label, operator, value in _MATCHER.findall(matchers)
                    if label not in _ADDED
                },
            )
            for metric, matchers in _OURS.findall(self.expression)
        ]


def queries(*, gateway: bool) -> list[Query]:
    """Returns the queries of the gateway's metrics, or of the server's."""
    return [
        query
        for query in (*_of_dashboard(), *_of_alerts())
        if gateway == any(selector.metric.startswith(_GATEWAY) for selector in query.selectors)
    ]


def unknown(query: Query, metrics: str) -> list[str]:
    """Returns the metrics and labels of a query that are missing in the text of a metrics page."""
    missing = []
    for selector in query.selectors:
        series = re.findall(rf"^{selector.metric}(?:{{(.*)}})? ", metrics, re.MULTILINE)
        all_labels = [dict(re.findall(r'(\w+)="([^"]*)"', text)) for text in series]
        if not series:
            missing.append(selector.metric)
        for label, value in selector.labels.items():
            values = [labels[label] for labels in all_labels if label in labels]
            if not values or (value is not None and value not in values):
                missing.append(f"{selector.metric}: {label} {value or ''}")
    return missing


def panels() -> list[dict[str, Any]]:
    """Returns the panels of the dashboard."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return list(dashboard["panels"])


def _of_dashboard() -> Iterator[Query]:
    for panel in panels():
        for target in panel["targets"]:
            yield Query(f"panel {panel['id']} {target['refId']}", target["expr"])


def _of_alerts() -> Iterator[Query]:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield Query(rule["alert"], rule["expr"])

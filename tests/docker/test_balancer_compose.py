"""The balancer's docker-compose.yml against the other one, and against what the balancer and the
servers know.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.support.balancer import CONFIGURATION
from tests.support.patience import PATIENCE_SECONDS

DOCKER = CONFIGURATION.parents[1]


class Loader(yaml.SafeLoader):
    """Knows the tags of docker compose."""


Loader.add_constructor("!reset", lambda loader, node: None)


def read(file: Path) -> dict[str, Any]:
    return yaml.load(file.read_text(), Loader)


def test_it_fits_what_it_adds_to() -> None:
    main, added = (
        read(DOCKER / "docker-compose.yml"),
        read(CONFIGURATION.with_name("docker-compose.yml")),
    )
    servers = added["services"].keys() - {"balancer"}
    assert servers <= main["services"].keys()
    balancer = added["services"]["balancer"]
    assert set(balancer["networks"]) <= main["networks"].keys()
    known = set(re.findall(r"TOKEN2WAV_\w+", CONFIGURATION.read_text()))
    assert balancer["environment"].keys() <= known
    assert set(balancer["secrets"]) == added["secrets"].keys()
    for value in (
        balancer["environment"]["TOKEN2WAV_CERTIFICATE"],
        balancer["environment"]["TOKEN2WAV_TOKENS"],
    ):
        assert Path(value).name in added["secrets"]
    assert (DOCKER / balancer["volumes"][0].partition(":")[0] / CONFIGURATION.name).is_file()


def test_servers_take_their_options() -> None:
    program = Path(sys.executable).with_name("token2wav-serve")
    known = subprocess.run(
        [program, "--help"], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    ).stdout
    for name, service in read(CONFIGURATION.with_name("docker-compose.yml"))["services"].items():
        if name == "balancer":
            continue
        task, *options = service["command"]
        assert task == "serve"
        for option in options:
            assert option.partition("=")[0] in known
        given = dict(option.split("=") for option in options)
        stopping = float(given["--notice-seconds"]) + float(given["--grace-seconds"])
        assert float(service["stop_grace_period"].rstrip("s")) >= stopping + 10
        assert given["--status-port"] == "8003"

"""Rehearsal of the services in docker/ with servers that are drained, added, killed or cut off.

Every server has its own host, which is a network namespace. Balancer, Prometheus and listeners
share one host. Commands, ports, settings and confinement come from the compose files. The balancer
finds servers by a DNS name. A server is removed from the name as soon as it is told to stop, as in
Kubernetes. Each listener plays one utterance after the other, and compares each with the library's
audio. Needs root, haproxy and prometheus. Prints all problems and exits with 1 if there are any.

    .venv/bin/python -m lab.rehearsal
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.environment import ROOT, describe, program_parser, save
from benchmarks.soak.lines import Line
from lab.rehearsal.dashboard import ask, draw
from lab.rehearsal.listeners import HeardUtterance, Listener, Retries, long_lines
from scripts.image import call
from testkit.models.golden import TINY
from testkit.rigs.balancer import NameServer, needs_haproxy
from testkit.rigs.certificates import Authority
from testkit.rigs.container import (
    COMPOSE,
    DOCKER,
    ENTRYPOINT,
    WITH_BALANCER,
    confined,
    image_environment,
    ngc_installation,
    read_compose,
)
from testkit.rigs.metrics import scrape
from testkit.rigs.processes import Program
from testkit.rigs.serve_command import WHOLE_BLOCKS
from token2wav_client import Client, ClientError, Tls

KUBERNETES = ROOT / "deploy" / "kubernetes"
PICTURE = ROOT / "docs" / "images" / "dashboard.png"
HERE, NETWORK = "10.77.0.1", "10.77.0.1"  # a server appends its number to `NETWORK`
PROMETHEUS = "http://127.0.0.1:9090"
INSIDE = "TOKEN2WAV_REHEARSAL"
TOKEN = "a-token-for-the-rehearsal"
RETRIES = 5
LOOK_SECONDS = 0.25
LEVEL_STREAMS = 3  # largest difference in open streams between level servers
LEVEL_SECONDS = 10.0  # time to become level after a server came or left
PATIENCE_SECONDS = 60.0


@dataclass
class Server:
    """Server on its own host: name, address, container, and the latest values of its metrics.

    Attributes:
        held: open utterances.
        in_service: whether the server is expected to accept streams.
    """

    name: str
    address: str
    container: Program
    held: int = 0
    in_service: bool = False

    def look(self) -> None:
        metrics = scrape(f"{self.address}:8002")
        self.held = int(metrics['token2wav_open_streams{owner="scheduler"}'])

    def kill(self) -> None:
        """Kills all processes of the host at once."""
        self.in_service = False
        for process in call("ip", "netns", "pids", self.name).split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)

    def cut_off(self) -> None:
        """Takes the host off the network without a notice, as when a machine loses power."""
        self.in_service = False
        call("ip", "link", "set", self.name, "down")


class Rehearsal:
    """All services, on hosts that the rehearsal creates.

    Args:
        folder: folder for files, readable by everybody.
        stack: stops all services and hosts when it is closed.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.servers: dict[int, Server] = {}
        self.listeners: list[Listener] = []
        self.retries = Retries()
        self.events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self._folder, self._stack = folder, stack
        self._services = read_compose(COMPOSE)["services"]
        for name, more in read_compose(WITH_BALANCER)["services"].items():
            self._services.setdefault(name, {}).update(more)
        self._installation = ngc_installation(folder / "tritonserver")
        # `ip netns` keeps its files in /run; the mount hides them from other processes
        call("mount", "-t", "tmpfs", "tmpfs", "/run")
        call("ip", "link", "set", "lo", "up")
        call("ip", "link", "add", "lan", "type", "bridge")
        call("ip", "address", "add", f"{HERE}/24", "dev", "lan")
        call("ip", "link", "set", "lan", "up")
        self._named: list[str] = []
        NameServer(self._named, (HERE, 53))
        (folder / "resolv.conf").write_text(f"nameserver {HERE}\n")
        call("mount", "--bind", folder / "resolv.conf", "/etc/resolv.conf")

    @property
    def in_service(self) -> list[Server]:
        return [server for server in self.servers.values() if server.in_service]

    def start_server(self, number: int) -> Server:
        """Starts a server, and creates its host if it does not exist yet.

        The DNS name includes the server at once. The server accepts streams when it is ready.
        """
        name, address = f"server-{number}", f"{NETWORK}{number}"
        if number not in self.servers:
            call("ip", "netns", "add", name)
            call("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            call("ip", "link", "set", name, "master", "lan", "up")
            call("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                call("ip", "-n", name, "link", "set", device, "up")
        environment = image_environment(self._installation) | {
            "TOKEN2WAV_MODEL_FOLDER": str(TINY),
            "TOKEN2WAV_SETTINGS_FILE": str(WHOLE_BLOCKS),
            "OMP_NUM_THREADS": "1",  # the servers share the cores here
        }
        command = ["ip", "netns", "exec", name, *confined(self._folder), str(ENTRYPOINT)]
        command += self._services["server-cpu"]["command"]
        container = self._stack.enter_context(Program.run(command, environment=environment))
        self.servers[number] = Server(name, address, container)
        if address not in self._named:
            self._named.append(address)
        return self.servers[number]

    def forget(self, server: Server) -> None:
        """Removes a server from the DNS name, as Kubernetes does when it tells a pod to stop."""
        self._named.remove(server.address)

    def start_balancer(self) -> None:
        service, authority = (
            self._services["balancer"],
            Authority.make(self._folder / "tls", "balancer"),
        )
        tokens = self._folder / "tokens"
        # One client may hold at most half of the streams of a server, so there are several clients.
        tokens.write_text(
            "".join(
                f"{hashlib.sha256(f'{TOKEN}-{n}'.encode()).hexdigest()} client-{n}\n"
                for n in range(4)
            )
        )
        call("chmod", "-R", "a+rX", self._folder)
        secrets = {"balancer_certificate": authority.both("balancer"), "tokens": tokens}
        environment = {
            name: str(secrets[Path(value).name]) if value.startswith("/run/secrets/") else value
            for name, value in service["environment"].items()
        }
        options = [
            word.replace("/etc/token2wav", str(DOCKER / "balancer"))
            for word in service["command"][1:]
        ]
        command = [*confined(self._folder), needs_haproxy(), *options]
        self._stack.enter_context(Program.run(command, environment=os.environ | environment))
        self._tls = Tls(ca=authority.ca, server_name="balancer")

    def start_prometheus(self) -> None:
        """Starts Prometheus with the labels that its discovery adds in Kubernetes."""
        settings = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
        settings["rule_files"] = [
            str(DOCKER / "prometheus" / name) for name in settings["rule_files"]
        ]
        pod = {
            "source_labels": ["__address__"],
            "regex": rf"{NETWORK}(\d):\d+",
            "replacement": "server-$1",
        }
        settings["scrape_configs"][0]["relabel_configs"] = [
            {"target_label": "namespace", "replacement": "default"},
            {"target_label": "pod", **pod},
        ]
        file = self._folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(settings))
        command = [
            *confined(self._folder),
            "prometheus",
            f"--config.file={file}",
            "--storage.tsdb.path=/tmp/metrics",
        ]
        self._stack.enter_context(Program.run(command))

    def start_listeners(self, count: int, lines: list[Line], over: threading.Event) -> None:
        logging.getLogger("token2wav_client").addHandler(self.retries)
        for number in range(count):
            client = self._stack.enter_context(self.client(number, RETRIES))
            self.listeners.append(Listener(client, lines, over, number))
            self.listeners[-1].start()

    def client(self, number: int, retries: int) -> Client:
        return Client(f"{HERE}:8443", tls=self._tls, token=f"{TOKEN}-{number % 4}", retries=retries)

    def misspeak(self, line: Line, over: threading.Event) -> None:
        """Repeats a request that every server has to reject."""
        with self.client(0, 0) as client:
            while not over.wait(2.0):
                with suppress(ClientError):
                    list(client.synthesize([[9999]], line.voice))

    def wait_ready(self, server: Server) -> None:
        server.container.wait_for_line("token2wav: ready, ")
        server.in_service = True

    def wait_level(self, began: float) -> float | None:
        """Waits until the servers in service hold about as many streams each.

        Returns:
            Seconds since `began`, or None if the patience of the test ends first.
        """
        while time.monotonic() < began + PATIENCE_SECONDS:
            for server in self.in_service:
                server.look()
            held = [server.held for server in self.in_service]
            if sum(held) >= 0.8 * len(self.listeners) and max(held) - min(held) <= LEVEL_STREAMS:
                return round(time.monotonic() - began, 1)
            time.sleep(LOOK_SECONDS)
        return None

    def heard(self) -> list[HeardUtterance]:
        """Returns the utterances of all listeners so far."""
        return [utterance for listener in self.listeners for utterance in listener.heard]

    @contextmanager
    def event(
        self, title: str, victim: Server | None, *, loses: bool, seconds: float
    ) -> Iterator[dict[str, Any]]:
        """Records the effect of an event on the streams during the `seconds` after the event."""
        for server in self.in_service:
            server.look()
        began = time.monotonic()
        open_before = {server.name: server.held for server in self.in_service}
        noted: dict[str, Any] = {"event": title, "open_streams": open_before}
        yield noted
        noted["level_after_s"] = level = self.wait_level(noted.pop("from", began))
        time.sleep(max(began + seconds - time.monotonic(), 0))
        tried = {utterance_id for when, utterance_id in self.retries.attempts if when >= began}
        retried = [utterance for utterance in self.heard() if utterance.id in tried]
        noted["retried"] = len(retried)
        if retried:
            silences = sorted(utterance.silence_s for utterance in retried)
            noted["silence_s"] = {
                "median": round(median(silences), 1),
                "worst": round(silences[-1], 1),
            }
        expected = open_before[victim.name] if victim and loses else 0
        # One or two utterances may begin or end between the look at the metrics and the event.
        if abs(len(retried) - expected) > (2 if loses else 0):
            self.problems.append(
                f"{title}: {len(retried)} utterances were tried again, not {expected}"
            )
        if level is None or level > LEVEL_SECONDS:
            self.problems.append(f"{title}: streams are level after {level} s")
        print(f"rehearsal: {noted}", flush=True)
        self.events.append(noted)


def rehearse(rehearsal: Rehearsal, listeners: int) -> dict[str, Any]:
    """Starts all services, runs through the events of a server's life, and returns the effects."""
    lines = long_lines()
    rehearsal.start_balancer()
    rehearsal.start_prometheus()
    for server in [rehearsal.start_server(number) for number in (1, 2, 3)]:
        rehearsal.wait_ready(server)
    time.sleep(3.0)  # time for the balancer to find the servers
    began, over = time.time(), threading.Event()
    rehearsal.start_listeners(listeners, lines, over)
    threading.Thread(target=rehearsal.misspeak, args=(lines[0], over), daemon=True).start()
    time.sleep(25.0)

    with rehearsal.event("drain", leaving := rehearsal.servers[1], loses=False, seconds=0) as noted:
        leaving.in_service = False
        signal_time = time.monotonic()
        leaving.container.process.send_signal(signal.SIGTERM)
        rehearsal.forget(leaving)
        noted["exit_code"] = leaving.container.wait()
        noted["ended_after_s"] = round(time.monotonic() - signal_time, 1)
        noted["from"] = time.monotonic()
    with rehearsal.event("add", None, loses=False, seconds=0) as noted:
        added = rehearsal.start_server(4)
        rehearsal.wait_ready(added)
        noted["from"] = time.monotonic()
    with rehearsal.event("kill", victim := rehearsal.servers[2], loses=True, seconds=25) as noted:
        victim.kill()
    with rehearsal.event("start again", None, loses=False, seconds=0) as noted:
        rehearsal.wait_ready(rehearsal.start_server(2))
        noted["from"] = time.monotonic()
    with rehearsal.event("cut off", victim := rehearsal.servers[3], loses=True, seconds=50):
        victim.cut_off()

    ended = time.time()
    over.set()
    for listener in rehearsal.listeners:
        listener.join(PATIENCE_SECONDS)
    heard = rehearsal.heard()
    lost = [
        f"utterance of {utterance.tokens} tokens: {utterance.fault}"
        for utterance in heard
        if utterance.fault
    ]
    tried = {utterance_id for _, utterance_id in rehearsal.retries.attempts}
    panels = draw(PROMETHEUS, began, ended, PICTURE)
    rehearsal.problems += lost + [
        f"panel {name} shows nothing" for name, count in panels.items() if not count
    ]
    for server in rehearsal.in_service:
        server.container.process.send_signal(signal.SIGTERM)
        server.container.wait()
    return {
        "listeners": listeners,
        "seconds": round(ended - began),
        "utterances": len(heard),
        "audio_seconds": round(
            sum(seconds for utterance in heard for _, seconds in utterance.chunks)
        ),
        "silence_s_of_the_others": round(
            max(utterance.silence_s for utterance in heard if utterance.id not in tried), 1
        ),
        "retried": len(tried),
        "lost": len(lost),
        "events": rehearsal.events,
        "autoscaling": autoscaling(began, ended),
        "alerts": sorted(
            {
                labels["alertname"]
                for labels, _ in ask(PROMETHEUS, 'ALERTS{alertstate="firing"}', began, ended)
            }
        ),
        "panels": panels,
        "problems": rehearsal.problems,
    }


def autoscaling(began: float, ended: float) -> dict[str, Any]:
    """Evaluates the rule for prometheus-adapter, and the resulting wish of the autoscaler.

    The autoscaler is Kubernetes' HorizontalPodAutoscaler.
    """
    [rule] = yaml.safe_load((KUBERNETES / "prometheus-adapter-rule.yaml").read_text())["rules"][
        "custom"
    ]
    autoscaler = next(yaml.safe_load_all((KUBERNETES / "base" / "autoscaling.yaml").read_text()))[
        "spec"
    ]
    target = float(autoscaler["metrics"][0]["pods"]["target"]["averageValue"])
    query = (
        rule["metricsQuery"]
        .replace("<<.Series>>", rule["name"]["as"])
        .replace("<<.GroupBy>>", "pod")
    )
    query = query.replace("<<.LabelMatchers>>", 'namespace="default",pod=~"server-.*"')
    totals: dict[float, float] = {}
    for _, values in ask(PROMETHEUS, query, began, ended):
        for when, value in values:
            totals[when] = totals.get(when, 0.0) + value
    replicas = [
        min(max(math.ceil(total / target), autoscaler["minReplicas"]), autoscaler["maxReplicas"])
        for total in totals.values()
    ]
    return {
        "query": query,
        "open_streams": {"median": median(totals.values()), "most": max(totals.values())},
        "replicas": {"fewest": min(replicas), "most": max(replicas)},
    }


def main() -> None:
    parser = program_parser()
    parser.add_argument("--listeners", type=int, default=32)
    parser.add_argument("--name", default="replicas", help="name of the result file")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("rehearsal: needs root, for network namespaces")
    if INSIDE not in os.environ:
        python = [sys.executable, "-m", "lab.rehearsal"]
        again = ["unshare", "--net", "--mount", *python, *sys.argv[1:]]
        plain = {
            name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
        }
        os.execvpe(again[0], again, plain | {INSIDE: "1"})
    facts = describe()
    with tempfile.TemporaryDirectory(prefix="token2wav-rehearsal-") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        result = rehearse(Rehearsal(folder, stack), options.listeners)
    save(options.name, {**facts, **result})
    if result["problems"]:
        sys.exit("\n".join([f"{len(result['problems'])} problems", *result["problems"]]))


if __name__ == "__main__":
    main()

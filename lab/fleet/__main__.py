"""Fleet by simulation: servers for many listeners, and the share at which a server may be held.

The library's scheduler and chunker run on simulated time, with the chunk costs of an H200 in place
of networks, behind the balancing rule of HAProxy. Nothing depends on the speed of this machine.
docs/scaling.md explains the figures and their assumptions. Prints rows; writes JSON and a picture.

    .venv/bin/python -m lab.fleet                              # everything, in many minutes
    .venv/bin/python -m lab.fleet --sections sizes scaling      # keeps other results
    .venv/bin/python -m lab.fleet --plot                       # only the picture
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks.environment import RESULTS, describe, program_parser, save
from benchmarks.gpu.settings import SETTINGS
from benchmarks.gpu.streams import BUFFER_S
from lab.fleet.costs import expected, fit, measured
from lab.fleet.fleet import COLD_START_S, GRACE_S, LJ_SPEECH, VANISHED_S, Outcome, bursts
from lab.fleet.models import FullModel, LightModel
from lab.fleet.plot import plot
from lab.fleet.scenarios import (
    GAPS,
    MEAN_S,
    Row,
    capacity,
    crash_row,
    gpu_rows,
    growth_row,
    light_model,
    open_loop,
    share_rows,
    steady,
)
from testkit.models.published_codecs import codec_configs
from testkit.models.sized import public_configs
from testkit.simulation.server import Costs, ServerKind
from token2wav.config import LimitConfig

NAME = "fleet"
LISTENERS = (1_000, 100_000, 1_000_000)
_LIMITS = LimitConfig(streams=2000, batch_streams=64, player_buffer_seconds=BUFFER_S)
_LEAN = SETTINGS["lean"][0]
_MOST_SERVERS = 1000  # of a simulated fleet
_MOST_SHARE = 0.8  # of its streams at which a server is held, so that listeners may become more
_TAIL_S = 0.7  # first guess of the time for which a stream is open beyond its audio


class Study:
    """All sections, and the results so far."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result

    def kind(self, costs: Costs | None = None) -> ServerKind:
        """Returns a server with CosyVoice3 on an H200, in the setting `lean` of the GPU report."""
        config = public_configs()["CosyVoice3"]
        return ServerKind(config, costs or self._with_host(fit(measured()).costs), _LEAN, _LIMITS)

    def gpu(self) -> None:
        """Compares simulated with measured runs of one H200."""
        fitted = fit(measured())
        host_s, rows = gpu_rows(self.kind(fitted.costs))
        self.result["gpu"] = {
            "costs": asdict(fitted.costs),
            "batches": fitted.batches,
            "error": round(fitted.error, 3),
            "host_s": host_s,
            "rows": rows,
        }
        _show(rows)

    def capacity(self) -> None:
        """Finds the streams that a server holds if their number is constant."""
        flow = public_configs()["CosyVoice3"]
        capacities = dict[str, Any]()
        streams, rows = capacity(FullModel(self.kind()), 220, 320, 55)
        capacities["CosyVoice3, measured costs"] = {"streams": streams, "rows": rows}
        costs = fit(expected("CosyVoice3", flow.token_frame_rate))
        streams, rows = capacity(FullModel(self.kind(self._with_host(costs.costs))), 280, 440, 45)
        capacities["CosyVoice3, expected costs"] = {
            "streams": streams,
            "rows": rows,
            "costs": asdict(costs.costs),
            "error": round(costs.error, 3),
        }
        self.result["capacity"] = capacities
        for values in capacities.values():
            _show(values["rows"])

    def codec(self) -> None:
        """Finds the streams of Mimi that a server holds, with the GPU's expected costs."""
        config = codec_configs()["Mimi"]
        costs = fit(expected("Mimi", config.token_frame_rate))
        kind = ServerKind(config, self._with_host(costs.costs), limits=_LIMITS)
        streams, rows = capacity(FullModel(kind), 300, 1500, 14, warm_s=7)
        self.result["capacity"]["Mimi, expected costs"] = {
            "streams": streams,
            "rows": rows,
            "costs": asdict(costs.costs),
            "error": round(costs.error, 3),
        }
        _show(rows)

    def shares(self) -> None:
        """Finds the share at which a server may be held, by the number of servers."""
        full, streams, outcomes = FullModel(self.kind()), self.streams, list[Outcome]()
        rows = []
        # The last run is overloaded. It fills the table of the light model.
        for share, seconds in ((0.9, 90), (0.95, 90), (1.0, 90), (1.06, 90), (1.2, 60)):
            row, _ = open_loop(full, 1, self._rate(1, share), seconds, keep=outcomes)
            rows.append(row | {"share": round(row["open"] / streams, 3)})
        held = [row["share"] for row in rows if row["gaps"] <= GAPS]
        shares = {"1 full": (max(held, default=0.0), rows)}
        light = light_model(outcomes, streams, _LIMITS.streams)
        self.result["light"] = {
            "tail_s": light.tail_s,
            "loads": [round(load, 2) for load in light.loads],
            "shares": [round(share, 5) for share in light.shares],
        }
        for name, times, low in (("light", steady, 0.9), ("light, bursts", _bursts, 0.5)):
            for servers in (1, 2, 4, 16, 64, 256):
                duration, tries = 240 / servers + 35, 5 if servers < 256 else 3
                shares[f"{servers} {name}"] = share_rows(
                    light, servers, streams, duration, (low, 1.1), times, tries
                )
                # A larger fleet never has to be held at less; its search begins a little below.
                low = max(low, shares[f"{servers} {name}"][0] - 0.1)
        self._save_shares(shares)

    def large(self) -> None:
        """Simulates 1,000 servers for a short time."""
        share = self.result["shares"]["256 light"]["share"]
        row, _ = open_loop(self.light, 1000, self._rate(1000, share), 26)
        row["share"] = round(row["open"] / self.streams, 3)
        self._save_shares({"1000 light": (row["share"] if row["gaps"] <= GAPS else 0.0, [row])})

    def checks(self) -> None:
        """Runs the full model beside the light one: more servers, and bursts."""
        full, streams = FullModel(self.kind()), self.streams
        shares = dict[str, tuple[float, list[Row]]]()
        for servers, name, times, factors in (
            (4, "light", steady, (1.0, 1.05)),
            (4, "light, bursts", _bursts, (1.0,)),
        ):
            share = self.result["shares"][f"{servers} {name}"]["share"]
            rows = shares.setdefault(f"{servers} {name}, check", (0.0, []))[1]
            for factor in factors:
                rate = self._rate(servers, factor * share)
                for model, kind in ((full, "full"), (self.light, "light")):
                    row, _ = open_loop(model, servers, rate, 42, times)
                    row["share"] = round(row["open"] / streams, 3)
                    rows.append({"model": kind, **row})
        self._save_shares(shares)

    def _save_shares(self, shares: dict[str, tuple[float, list[Row]]]) -> None:
        for name, (share, rows) in shares.items():
            self.result.setdefault("shares", {})[name] = {"share": share, "rows": rows}
            print(name, share)
            _show(rows)

    def crash(self) -> None:
        """Measures the cost of a crash."""
        light = self.light
        self.result["crash"] = {
            "light": [
                {"share": share, **crash_row(light, servers, self._rate(servers, share), 50)}
                for servers in (2, 4, 16)
                for share in (0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
            ]
        }
        _show(self.result["crash"]["light"])

    def crash_full(self) -> None:
        """Runs crashes with the full model."""
        full = FullModel(self.kind())
        self.result["crash_full"] = [
            {"share": 0.6, **crash_row(full, 4, self._rate(4, 0.6), 45)},
            {"share": 0.6, **crash_row(full, 4, self._rate(4, 0.6), 45, VANISHED_S)},
        ]
        _show(self.result["crash_full"])

    def _rate(self, servers: int, share: float) -> float:
        """Returns the utterances a second with which servers are held at a share."""
        tail_s = self.light.tail_s if "light" in self.result else _TAIL_S
        return servers * share * self.streams / (MEAN_S + tail_s)

    def scaling(self) -> None:
        """Finds how fast listeners may become more, by the target of the autoscaler."""
        self.result["scaling"] = [
            growth_row(self.light, self.streams, share, growth)
            for share in (0.5, 0.6, 0.7, 0.8)
            for growth in (0.1, 0.2, 0.3, 0.5, 0.8)
        ]
        _show(self.result["scaling"])

    def sizes(self) -> None:
        """Computes servers for many listeners, and simulates each fleet with a crash."""
        rows = []
        for listeners in LISTENERS:
            for name, figures in self.result["capacity"].items():
                servers = self._servers(listeners, figures["streams"])
                rows.append(
                    {
                        "listeners": listeners,
                        "model": name,
                        "servers": servers,
                        "share": round(listeners / servers / figures["streams"], 3),
                        "gpu_hours": round(1000 * servers / listeners, 2),
                    }
                )
                if name == next(iter(self.result["capacity"])) and servers <= _MOST_SERVERS:
                    rate = listeners / (MEAN_S + self.light.tail_s)
                    rows[-1]["simulated"] = crash_row(self.light, servers, rate, 45)
        self.result["sizes"] = rows
        _show(rows)

    @property
    def streams(self) -> int:
        """Streams that a server holds if their number is constant."""
        return int(self.result["capacity"]["CosyVoice3, measured costs"]["streams"])

    @property
    def light(self) -> LightModel:
        table = self.result["light"]
        return LightModel(
            table["tail_s"],
            tuple(table["loads"]),
            tuple(table["shares"]),
            _LIMITS.streams,
            np.random.default_rng(0),
        )

    def _servers(self, listeners: int, streams: int) -> int:
        """Returns the servers that hold some listeners.

        No server is held at more than `_MOST_SHARE`, and the others still hold all listeners after
        one server has crashed.
        """
        held = {
            int(name.split()[0]): row["share"]
            for name, row in self.result["shares"].items()
            if name.endswith(" light") and row["share"]
        }
        servers = max(2, math.ceil(listeners / (_MOST_SHARE * streams)))
        while True:
            share = held[max(number for number in held if number < servers)]
            if (servers - 1) * share * streams >= listeners:
                return servers
            servers += 1

    def _with_host(self, costs: Costs) -> Costs:
        host_s = self.result.get("gpu", {}).get("host_s", 0.0)
        return replace(costs, stream_s=costs.stream_s + host_s)


SECTIONS: dict[str, Callable[[Study], None]] = {
    "gpu": Study.gpu,
    "capacity": Study.capacity,
    "shares": Study.shares,
    "crash": Study.crash,
    "scaling": Study.scaling,
    "sizes": Study.sizes,
    "checks": Study.checks,
    "crash_full": Study.crash_full,
    "large": Study.large,
    "codec": Study.codec,
}


def _bursts(random: np.random.Generator, rate: float) -> Any:
    return bursts(random, rate)


def _show(rows: Sequence[Row]) -> None:
    for row in rows:
        print(" ", row, flush=True)


def main() -> None:
    parser = program_parser()
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--plot", action="store_true", help="only draw the saved results")
    options = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if not options.plot:
        study = Study(result)
        for section in options.sections:
            print(section, flush=True)
            SECTIONS[section](study)
            result |= describe() | {
                "assumed": {
                    "lengths_s": LJ_SPEECH,
                    "cold_start_s": COLD_START_S,
                    "grace_s": GRACE_S,
                    "player_buffer_s": BUFFER_S,
                    "gaps": GAPS,
                }
            }
            save(NAME, result)
    plot(result, RESULTS / f"{NAME}.png")


if __name__ == "__main__":
    main()

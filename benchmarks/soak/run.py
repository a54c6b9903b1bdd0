"""Soak of a server, or of a gateway, among misbehaving clients.

Saves the observations in benchmarks/results, and prints a summary of well-behaved clients, outages
and the server. If there are problems, prints them with the seed and exits with 1.

    .venv/bin/python -m benchmarks.soak.run server --minutes 10
    .venv/bin/python -m benchmarks.soak.run gateway --minutes 20
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from benchmarks.environment import describe, program_parser, save
from benchmarks.soak import gateway, server
from benchmarks.soak.crowd import Plan
from benchmarks.soak.lines import MODELS
from testkit.rigs.settings import FRONT

_SOAKS = {"server": server, "gateway": gateway}


def main() -> None:
    parser = program_parser()
    parser.add_argument("target", choices=_SOAKS)
    parser.add_argument("--minutes", type=float, help="10 for a server, 20 for a gateway")
    parser.add_argument("--clients", type=int, help="14 for a server, 10 for a gateway")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(2**32), help="random by default"
    )
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="of a server")
    parser.add_argument("--name", help="name of the result file")
    options = parser.parse_args()
    chosen = _SOAKS[options.target]
    plan = Plan(
        options.minutes or chosen.MINUTES,
        options.clients or chosen.CLIENTS,
        options.seed,
        options.model,
    )
    print(f"seed {plan.seed}", flush=True)
    facts = describe()
    operations = server.run_operations(plan) if chosen is server else {"problems": []}
    with tempfile.TemporaryDirectory(prefix="token2wav-soak-") as folder:
        result = chosen.soak(plan, Path(folder)) | {"operations": operations}
    result["problems"] += [f"operations: {problem}" for problem in operations["problems"]]
    for name in ("behaved", "outages", "server", "gateway"):
        if name in result:
            print(f"{name}: {result[name]}")
    print(f"growth in MiB, middle to last third: {result['resources']['growth_mib']}")
    of_model = "" if plan.model == MODELS[0] else f"_{plan.model}"
    of_front = "" if FRONT == "auto" else f"_{FRONT}"
    default = "soak_gateway" if chosen is gateway else f"soak{of_model}{of_front}"
    save(options.name or default, {**facts, **result})
    if problems := result["problems"]:
        sys.exit("\n".join([f"seed {plan.seed}: {len(problems)} problems", *problems]))


if __name__ == "__main__":
    main()

from __future__ import annotations

import io

import pytest

from testkit.patience import PATIENCE_SECONDS
from token2wav_server.launcher.log import LogPump, failure_reason, is_relevant

NOISE = [
    "W1121 03:55:22.845286 3026 pinned_memory_manager.cc:273] "
    '"Unable to allocate pinned system memory"',
    'E1121 03:55:22.845560 3026 server.cc:241] "CudaDriverHelper has not been initialized."',
    "Error: Failed to initialize NVML",
    'W1121 03:55:23.147520 3026 metrics.cc:798] "DCGM unable to start: DCGM initialization error"',
    "Signal (11) received.",
    " 0# 0x000055F35EBEA52D in /wheel/bin/tritonserver",
]
CHATTER = [
    'I1121 03:55:22.847288 3026 model_lifecycle.cc:472] "loading: good:1"',
    "+-------+---------+--------+",
    "| good  | 1       | READY  |",
    "",
]
UNKNOWN_OPTION = "/wheel/bin/tritonserver: unrecognized option '--wrong'"
USAGE = [
    "Usage: tritonserver [options]",
    "  --help",
    "\tPrint usage",
    "Memory/Device Management:",
    "DEPRECATED:",
]
MODELS_OWN = [
    'I1121 03:55:23.143276 3026 model.py:5] "hello"',
    'W1121 03:55:23.143410 3026 model.py:6] "hello"',
    "printed by a model",
]
WRONG_CONFIG = (
    "E1121 03:55:31.5 3106 model_repository_manager.cc:1] "
    "\"Poll failed for model directory 'x': bad\""
)
LOAD_FAILURE = (
    "E1121 03:55:31.534569 3106 model_lifecycle.cc:642] \"failed to load 'bad' version 1: "
    "Internal: "
    'ValueError: flow: not found\\n\\nAt:\\n  /models/bad/1/model.py(3): initialize\\n"'
)
SUMMARY = 'I1121 03:55:24.143276 3026 service.py:170] "token2wav: backend  torch, float32"'
DETAILS = (
    "I1121 03:55:24.143276 3026 service.py:170] "
    '"configuration 0123456789ab of /models/a: ModelConfig(...)"'
)
LAST = "error: creating server: Internal - failed to load all models"


def test_noise_is_hidden_and_relevant_lines_are_shown() -> None:
    hidden = [*NOISE, *CHATTER, *USAGE, DETAILS]
    shown = [*MODELS_OWN, SUMMARY, WRONG_CONFIG, UNKNOWN_OPTION, LAST]
    assert [line for line in [*hidden, *shown] if is_relevant(line)] == shown


@pytest.mark.parametrize("show_all", [True, False])
def test_a_summary_is_shown_without_the_head_of_its_log(show_all: bool) -> None:
    sink = io.StringIO()
    source = io.BytesIO("\n".join([CHATTER[0], SUMMARY, DETAILS, MODELS_OWN[0]]).encode())
    pump = LogPump(source, sink, (lambda _: True) if show_all else is_relevant)
    pump.start()
    pump.join(PATIENCE_SECONDS)
    shown = sink.getvalue().splitlines()
    if show_all:
        assert shown == [CHATTER[0], "token2wav: backend  torch, float32", DETAILS, MODELS_OWN[0]]
    else:
        assert shown == ["token2wav: backend  torch, float32", MODELS_OWN[0]]


@pytest.mark.parametrize(
    ("lines", "status", "reason"),
    [
        (
            [*NOISE, LOAD_FAILURE, *CHATTER, LAST],
            None,
            "model 'bad' failed to load: ValueError: flow: not found",
        ),
        (
            [*NOISE, WRONG_CONFIG, WRONG_CONFIG, *CHATTER, LAST],
            None,
            f"Poll failed for model directory 'x': bad; {LAST}",
        ),
        ([UNKNOWN_OPTION, *USAGE], None, UNKNOWN_OPTION),
        ([*NOISE, WRONG_CONFIG], 139, "tritonserver was killed by SIGSEGV"),
        (
            ["reaper: the model process ended with status 1"],
            134,
            "the model process ended with status 1",
        ),
        # The status of the reaper is negative, as of any child that a signal ended. Triton's tables
        # explain nothing then.
        (
            [*NOISE, *CHATTER],
            -9,
            "the reaper, which is the parent of tritonserver, was killed by SIGKILL",
        ),
        (["cannot open shared object file"], None, "cannot open shared object file"),
        ([], None, "it printed nothing"),
    ],
)
def test_reason_of_a_failure(lines: list[str], status: int | None, reason: str) -> None:
    assert failure_reason(lines, status=status) == reason

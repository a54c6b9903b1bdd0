"""Programs that speak tokens, run as a user runs them, with a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from examples.llm_stream import frames_of, tokens_in
from testkit.models.golden import DATA, ROOT
from testkit.rigs.door_server import DoorServer
from testkit.rigs.gateway_rig import serving
from testkit.rigs.processes import run

VOICE = str(DATA / "demo" / "voice.safetensors")
TOKENS = np.load(DATA / "demo" / "tokens.npy")[:60]


def test_text_of_a_language_model() -> None:
    text = (
        "Hello <b> 1 < 2 <|endofprompt|><|speech_12|>,<|s_3|> and "
        "<|speech_x|><|speech_456|><|s_1234567890|> bye"
    )
    text += "<tts_start>so<audio_7><tts_pad><audio_6561><audio_patch>"
    for size in range(1, len(text) + 1):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        batches = list(tokens_in(pieces))
        assert [token for tokens in batches for token in tokens] == [12, 3, 456, 7], size
        assert [] not in batches


def test_numbers_of_a_language_model() -> None:
    text = "[6561, 12, 3,\n1234567890 456] 6562 78"
    for size in range(1, len(text) + 1):
        batches = list(
            tokens_in((text[at : at + size] for at in range(0, len(text), size)), "chatterbox")
        )
        assert [token for tokens in batches for token in tokens] == [12, 3, 456, 78], size


def test_speaking_the_output_of_a_language_model(rig: DoorServer, tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    text = "Sure!\n" + "".join(f"<|speech_{token}|>" for token in TOKENS) + "<|eos|>"
    done = run(
        sys.executable,
        ROOT / "examples" / "llm_stream.py",
        f"--voice={VOICE}",
        f"--out={out}",
        f"--url={rig.server.grpc_url}",
        text=text.encode(),
    )
    assert done.returncode == 0, done.stderr
    assert soundfile.info(out).frames == 960 * len(TOKENS)


def test_codes_are_grouped_into_frames() -> None:
    batches = [[1, 2], [3], [4, 5, 6, 6561, 8], [9]]
    assert [frames.tolist() for frames in frames_of(batches, 3)] == [
        [[1, 2, 3]],
        [[4, 5, 6]],
        [[6561, 8, 9]],
    ]


def sent_events(pieces: list[str]) -> FastAPI:
    """Returns a language model server that sends pieces of text."""
    app = FastAPI()

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        if body != {"prompt": "hello", "stream": True}:
            return Response(status_code=400)
        choices: list[dict[str, Any]] = [{"text": piece} for piece in pieces[:2]]
        choices += [{"delta": {"content": piece}} for piece in pieces[2:]]
        events = [json.dumps({"choices": [choice]}) for choice in choices]
        return StreamingResponse(
            (f"data: {event}\n\n" for event in [*events, "[DONE]"]),
            media_type="text/event-stream",
        )

    return app


def test_speaking_the_events_of_a_language_model_server(rig: DoorServer, tmp_path: Path) -> None:
    out, body = tmp_path / "out.wav", tmp_path / "body.json"
    script = ROOT / "examples" / "llm_stream.py"
    command = [sys.executable, script, f"--voice={VOICE}", f"--out={out}", f"--body={body}"]
    command += [f"--url={rig.server.grpc_url}"]
    pieces = [f"<|speech_{token}|>" for token in TOKENS]
    with serving(sent_events(pieces)) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"
        body.write_text('{"prompt": "hello"}')
        done = run(*command, f"--events={url}")
        assert done.returncode == 0, done.stderr
        assert soundfile.info(out).frames == 960 * len(TOKENS)
        body.write_text('{"prompt": "other"}')
        done = run(*command, f"--events={url}")
    assert done.returncode == 1
    assert b"llm_stream: " in done.stderr
    assert b"400 Bad Request" in done.stderr
    assert b"Traceback" not in done.stderr


def test_speaking_a_folder(rig: DoorServer, tmp_path: Path) -> None:
    tokens, wavs = tmp_path / "tokens", tmp_path / "wavs"
    tokens.mkdir()
    np.save(tokens / "a.npy", TOKENS)
    (tokens / "b.json").write_text("[1, 2, 3]")
    (tokens / "c.txt").write_text("<|s_1|><|s_2|>")
    (tokens / "wrong.txt").write_text("9999")
    (tokens / "README.md").write_text("no tokens")
    script = ROOT / "examples" / "synthesize_folder.py"
    command = [sys.executable, script, tokens, wavs, f"--voice={VOICE}"]
    done = run(*command, f"--url={rig.server.grpc_url}")
    assert done.returncode == 1
    assert (
        b"synthesize_folder: wrong.txt: tokens: 9999 at index 0 is outside the vocabulary"
        in done.stderr
    )
    lengths = {path.name: soundfile.info(path).frames for path in wavs.iterdir()}
    assert lengths == {"a.wav": 960 * len(TOKENS), "b.wav": 960 * 3, "c.wav": 960 * 2}
    (wavs / "b.wav").unlink()
    (tokens / "wrong.txt").unlink()
    written = (wavs / "a.wav").stat().st_mtime_ns
    assert run(*command, f"--url={rig.server.grpc_url}").returncode == 0
    assert (wavs / "b.wav").is_file()
    assert (wavs / "a.wav").stat().st_mtime_ns == written

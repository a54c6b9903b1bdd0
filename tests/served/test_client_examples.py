"""Programs around the client, run as a user runs them, on a real server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from examples.llm_stream import frames_of, tokens_in
from testkit.models.golden import DATA, ROOT
from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.gateway_rig import serving
from testkit.rigs.serve_command import synth
from testkit.rigs.server_rig import Rig
from token2wav_client import ClientVoice
from token2wav_client.writer import FILE_FORMATS

VOICE = str(DATA / "demo" / "voice.safetensors")
TOKENS = np.load(DATA / "demo" / "tokens.npy")[:60]


def run(*command: object, text: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        list(map(str, command)),
        input=text,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_samples_on_standard_output(rig: Rig, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, TOKENS)
    spoken = synth(rig.server.grpc_url, f"--tokens={tokens}", f"--voice={VOICE}", "--out=-")
    floats = run(*spoken, "--audio-format=float32")
    assert floats.returncode == 0, floats.stderr
    assert len(floats.stdout) == 4 * 960 * len(TOKENS)
    assert b"time to first audio" in floats.stderr
    integers = run(*spoken, "--quiet")
    assert integers.returncode == 0
    assert integers.stderr == b""
    difference = np.frombuffer(floats.stdout, "<f4") - np.frombuffer(
        integers.stdout, "<i2"
    ) / np.float32(32767)
    assert np.abs(difference).max() < 1e-3


def test_nobody_reads_standard_output(rig: Rig, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, TOKENS)
    arguments = [f"--tokens={tokens}", f"--voice={VOICE}", "--quiet", "--out=-"]
    command = f"{' '.join(synth(rig.server.grpc_url, *arguments))} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == "token2wav synth: error: out: cannot write to standard output (Broken pipe)\n"
    )


def test_a_terminated_command_reports_the_written_audio(rig: Rig, tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    arguments = ["--tokens=-", f"--voice={VOICE}", f"--out={out}", "--quiet"]
    with subprocess.Popen(
        synth(rig.server.grpc_url, *arguments),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        process.stdin.write("".join(f"<|s_{token}|>" for token in TOKENS).encode())
        process.stdin.flush()  # and the utterance stays open
        until(lambda: out.exists() and out.stat().st_size > 2 * 960)
        process.terminate()
        assert process.stderr is not None
        errors = process.stderr.read().decode()
        assert process.wait(PATIENCE_SECONDS) == 143
    seconds = soundfile.info(out).duration
    assert (
        errors == f"{out}: incomplete, {seconds:.2f} s of audio kept\ntoken2wav synth: terminated\n"
    )


@pytest.mark.parametrize("kind", FILE_FORMATS)
def test_a_full_disk_is_reported_with_the_written_audio(
    rig: Rig, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / f"out.{kind}"
    arguments = [f"--tokens={DATA}/demo/tokens.npy", f"--voice={VOICE}", "--quiet", f"--out={out}"]
    command = f"ulimit -f 20; {' '.join(synth(rig.server.grpc_url, *arguments))}"
    shell = ["bash", "-c", command]
    done = subprocess.run(
        shell, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 2
    match = re.fullmatch(
        rf"{out}: incomplete, (\d+\.\d\d) s of audio kept\ntoken2wav synth: error: {out}: cannot "
        rf"write "
        r"\(File too large\)\n",
        done.stderr,
    )
    assert match is not None, done.stderr
    assert out.stat().st_size <= 20 * 1024
    assert float(match[1]) > 0.1


@pytest.mark.parametrize(
    ("tokens", "name", "message"),
    [
        ([6561, 1], "tokens.npy", "tokens: 6561 at index 0 is outside the vocabulary 0 to 6560"),
        (
            [[1, 2]] * 60,  # in requests of 5 tokens
            "tokens.npy",
            "tokens: shape (60, 2), expected 1 dimension for this model",
        ),
        ("6561", "-", "tokens: 6561 at index 0 is outside the vocabulary 0 to 6560"),
        ("", "tokens.txt", "tokens: 0 sent; an utterance needs at least 1"),
        (
            "1 x",
            "tokens.txt",
            "tokens: 'x' at byte 2 is neither <|s_NUMBER|> nor an integer from 0 to 2147483647",
        ),
    ],
)
def test_an_error_in_tokens_names_their_file(
    rig: Rig, tmp_path: Path, tokens: list[int] | list[list[int]] | str, name: str, message: str
) -> None:
    source, text = name if name == "-" else str(tmp_path / name), b""
    if not isinstance(tokens, str):
        np.save(source, np.array(tokens, np.int32))
    elif name == "-":
        text = tokens.encode()
    else:
        Path(source).write_text(tokens)
    out = tmp_path / "out.wav"
    arguments = [f"--tokens={source}", f"--voice={VOICE}", f"--out={out}", "--rate=500"]
    done = run(*synth(rig.server.grpc_url, *arguments), text=text)
    named = "standard input" if name == "-" else source
    assert done.stderr.decode() == f"token2wav synth: error: {named}: {message}\n"
    assert done.returncode in (2, 4)
    assert not out.exists()


def test_the_audio_before_a_refused_token_is_kept(rig: Rig, tmp_path: Path) -> None:
    source, out = tmp_path / "tokens.npy", tmp_path / "out.wav"
    np.save(source, np.array([1, 2, 6561], np.int32))
    done = run(
        *synth(rig.server.grpc_url, f"--tokens={source}", f"--voice={VOICE}", f"--out={out}")
    )
    assert done.stderr.decode() == (
        f"{out}: incomplete, 0.08 s of audio kept\ntoken2wav synth: error: {source}: "
        "tokens: 6561 at index 2 is outside the vocabulary 0 to 6560\n"
    )
    assert soundfile.info(out).frames == 2 * 960


def test_an_error_in_a_voice_names_its_file(rig: Rig, tmp_path: Path, voice: ClientVoice) -> None:
    path, tokens = tmp_path / "narrow.npz", tmp_path / "tokens.npy"
    embedding = voice.speaker_embedding[:9]
    np.savez(
        path,
        prompt_tokens=voice.prompt_tokens,
        prompt_mel=voice.prompt_mel,
        speaker_embedding=embedding,
    )
    np.save(tokens, TOKENS)
    arguments = [f"--tokens={tokens}", f"--voice={path}", f"--out={tmp_path / 'o.wav'}"]
    done = run(*synth(rig.server.grpc_url, *arguments))
    message = f"{path}: speaker_embedding: shape (9,), expected (192,) for this model"
    assert (done.returncode, done.stderr.decode()) == (4, f"token2wav synth: error: {message}\n")


def test_a_missing_voice_is_named_with_its_option(rig: Rig, tmp_path: Path) -> None:
    arguments = [f"--tokens={DATA}/demo/tokens.npy", f"--out={tmp_path / 'o.wav'}"]
    done = run(*synth(rig.server.grpc_url, *arguments))
    message = (
        "voice: missing, but this model needs one; add --voice FILE, --voice-name NAME or "
        "--voice-id ID"
    )
    assert (done.returncode, done.stderr.decode()) == (4, f"token2wav synth: error: {message}\n")


def test_latents_for_a_model_of_tokens_are_named(rig: Rig, tmp_path: Path) -> None:
    np.save(tmp_path / "latents.npy", np.zeros((4, 2), np.float32))
    arguments = [
        f"--tokens={tmp_path}/latents.npy",
        f"--voice={VOICE}",
        f"--out={tmp_path / 'o.wav'}",
    ]
    done = run(*synth(rig.server.grpc_url, *arguments))
    message = "latents: sent, but this model takes no latents"
    assert done.stderr.decode() == f"token2wav synth: error: {tmp_path}/latents.npy: {message}\n"


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


def test_speaking_the_output_of_a_language_model(rig: Rig, tmp_path: Path) -> None:
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


def test_speaking_the_events_of_a_language_model_server(rig: Rig, tmp_path: Path) -> None:
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


def test_speaking_a_folder(rig: Rig, tmp_path: Path) -> None:
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

"""Both commands on real files, and the way of a voice to the client and through the library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from testkit.models.golden import TINY
from testkit.patience import PATIENCE_SECONDS
from testkit.tables import table
from tests.voices import graphs, reference
from tests.voices.material import WriteWav, speechlike
from token2wav import Voice
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav_client import ClientVoice
from token2wav_client.tokens import TokenParser
from token2wav_voice import OutputError
from token2wav_voice.cli import main, tokenize
from token2wav_voice.front_end import write


def error_of(capsys: pytest.CaptureFixture[str], program: str) -> str:
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith(f"{program}: error: ")
    return line


@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (24_000, 1), (44_100, 2), (48_000, 3)])
def test_a_voice_is_created(
    rate: int,
    channels: int,
    folder: Path,
    write_wav: WriteWav,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    signal = speechlike(1.4, rate)
    wav = write_wav(np.stack([signal] * channels, axis=1), rate, subtype="PCM_24")
    out = tmp_path / "voice.safetensors"
    assert main(["create", "--model", str(folder), "--wav", str(wav), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert (
        shown.out
        == f"{out}: 1.40 s, 35 tokens, level -23.1 dBFS, peak -{shown.out.partition('peak -')[2]}"
    )
    assert ("channels were mixed to one" in shown.err) == (channels > 1)
    assert ("so the voice has nothing above 8000 Hz" in shown.err) == (rate == 16_000)
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    loaded = ClientVoice.load(out)
    assert loaded.prompt_tokens.shape == (35,)
    if rate == 24_000:
        # of 24 bits
        np.testing.assert_allclose(loaded.prompt_mel, reference.prompt_mel(signal), atol=1e-3)
    Voice(loaded.prompt_tokens, loaded.prompt_mel, loaded.speaker_embedding).check(
        CosyVoice3Config.read(TINY)
    )


def test_a_part_and_the_report(
    folder: Path, write_wav: WriteWav, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wav = write_wav(np.tile(speechlike(1, 22_050), 40), 22_050, subtype="PCM_16")
    out = tmp_path / "voice.safetensors"
    out.write_bytes(b"an older one")
    arguments = ["--model", str(folder), "--wav", str(wav), "--out", str(out)]
    assert main(["create", *arguments, "--start", "3.5", "--end", "5.5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (note,) = report.pop("notes")
    assert note.startswith(f"{wav}: 22050 Hz, so the voice has nothing above 11025 Hz")
    assert -24 < report.pop("rms_dbfs") < -22
    assert -15 < report.pop("peak_dbfs") < 0
    assert report == {
        "wav": str(wav),
        "out": str(out),
        "seconds": 2.0,
        "rate_hz": 22_050,
        "channels": 1,
        "tokens": 50,
        "full_scale_share": 0.0,
    }
    assert len(ClientVoice.load(out).prompt_tokens) == 50


def test_tokens_as_text(
    folder: Path, write_wav: WriteWav, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wav = write_wav(speechlike(0.5, 16_000), 16_000)
    out = tmp_path / "tokens.npy"
    arguments = ["--model", str(folder), "--wav", str(wav), "--json"]
    assert tokenize([*arguments, "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 13
    assert tokenize(arguments) == 0
    shown = capsys.readouterr()
    parser = TokenParser()
    np.testing.assert_array_equal(parser.feed(shown.out.encode()) + parser.close(), np.load(out))
    note, report = shown.err.split("\n", 1)
    assert note.startswith("token2wav tokenize: note: ")
    assert json.loads(report)["out"] is None


REFUSED = table(
    r"""
create | --model={folder} --wav={short} --out={new} | {short}: too short: 0.99 s; at least 1 s is
create | --model=none --wav=none --out=v.npz | v.npz: the name must end in .safetensors
create | --model=none --wav=none --out=none/v.safetensors | the folder none does not exist
create | --model=none --wav=none --out={folder}.safetensors | exists and is not a regular file
tokenize | --model=none --wav={short} | none: no such folder
tokenize | --model={folder} --wav={short} | speech_tokenizer_v3.onnx: no such file
"""
)


@pytest.mark.parametrize(("program", "options", "message"), REFUSED)
def test_arguments_that_are_refused(
    program: str,
    options: str,
    message: str,
    folder: Path,
    write_wav: WriteWav,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The name of the voice is checked first."""
    short, new = write_wav(speechlike(0.99, 24_000), 24_000), folder / "v.safetensors"
    folder.with_suffix(".safetensors").mkdir()
    (folder / graphs.TOKENIZER).unlink()
    arguments = options.format(folder=folder, short=short, new=new).split()
    status = tokenize(arguments) if program == "tokenize" else main([program, *arguments])
    assert status == 2
    name = "tokenize" if program == "tokenize" else "voice"
    assert message.format(short=short) in error_of(capsys, f"token2wav {name}")
    assert not new.exists()


def test_command_needs_neither_torch_nor_the_client(
    folder: Path, write_wav: WriteWav, tmp_path: Path
) -> None:
    wav = write_wav(speechlike(1, 24_000), 24_000)
    code = (
        "import sys\n"
        "for name in ('torch', 'tritonclient', 'onnx', 'token2wav_client'): sys.modules[name] = "
        "None\n"
        "from token2wav_voice.cli import main\n"
        "sys.exit(main())"
    )
    out = tmp_path / "v.safetensors"
    arguments = ["create", f"--model={folder}", f"--wav={wav}", f"--out={out}"]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=PATIENCE_SECONDS)
    assert len(ClientVoice.load(out).prompt_tokens) == 25


def test_a_reader_that_goes_away(folder: Path, write_wav: WriteWav) -> None:
    wav = write_wav(speechlike(1, 24_000), 24_000)
    code = "import sys; from token2wav_voice.cli import tokenize; sys.exit(tokenize())"
    command = [sys.executable, "-c", code, "--model", str(folder), "--wav", str(wav)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_a_file_system_that_refuses(tmp_path: Path) -> None:
    out = tmp_path / "tokens.npy"
    out.write_bytes(b"before")
    long = out.with_name("x" * 300 + ".npy")
    with pytest.raises(OutputError, match=r"cannot be written \(File name too long\)"):
        write(long, b"after")
    write(out, b"after")
    assert out.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [out]

"""Reports of the commands on a recording, for people and for programs."""

from __future__ import annotations

import json

from token2wav_voice.recording import Recording


def as_line(recording: Recording, tokens: int, out: str | None) -> str:
    report = (
        f"{recording.seconds:.2f} s, {tokens} tokens, level {recording.rms_dbfs:.1f} dBFS, "
        f"peak {recording.peak_dbfs:.1f} dBFS"
    )
    return report if out is None else f"{out}: {report}"


def as_json(recording: Recording, tokens: int, out: str | None) -> str:
    report = {
        "wav": str(recording.path),
        "out": out,
        "seconds": round(recording.seconds, 6),
        "rate_hz": recording.rate_hz,
        "channels": recording.channels,
        "tokens": tokens,
        "rms_dbfs": round(recording.rms_dbfs, 2),
        "peak_dbfs": round(recording.peak_dbfs, 2),
        "full_scale_share": recording.full_scale_share,
        "notes": recording.notes,
    }
    return json.dumps(report, indent=2)

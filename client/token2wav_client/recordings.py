"""File of recordings: when each chunk of each utterance of a benchmark arrived, and its samples.

Anybody can compute further figures from it. It is a compressed `.npz` file with these arrays. There
are U utterances, in the order of their rows, and C chunks of all utterances together:

    row              (U,) name of the row, such as the number of streams
    began_us         (U,) time zero, since the start of the row
    ended_us         (U,) end of the response, since time zero
    complete         (U,) whether the whole audio arrived
    sample_rate      (U,) samples per second
    onset            (U,) samples before the first audible one; -1 without one
    error            (U,) position in `errors`; -1 without an error
    errors           (E,) messages
    chunks           (U,) number of chunks of each utterance
    intervals_us     (C,) time since the previous chunk; for a first chunk, since time zero
    samples          (C,) samples of one channel
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from token2wav_client.errors import InputError, OutputError
from token2wav_client.input_file import UNREADABLE, arrays_in_npz, content_of, reason
from token2wav_client.listening import Recording

_MICROSECONDS = 1e6
_NAMES = (
    *("row", "began_us", "ended_us", "complete", "sample_rate", "onset", "error", "errors"),
    *("chunks", "intervals_us", "samples"),
)


def save_recordings(path: Path, rows: Mapping[str, Sequence[Recording]]) -> None:
    """Writes the recordings of each row, by its name. Raises OutputError if the file cannot be
    written.
    """
    utterances = [recording for recordings in rows.values() for recording in recordings]
    errors = sorted({recording.error for recording in utterances if recording.error})
    nothing = np.zeros(0, np.int64)
    arrays: dict[str, Any] = {
        "row": np.array([row for row, some in rows.items() for _ in some], np.str_),
        "began_us": _microseconds([recording.began_s for recording in utterances]),
        "ended_us": _microseconds([recording.ended_s for recording in utterances]),
        "complete": np.array([recording.complete for recording in utterances], bool),
        "sample_rate": np.array([recording.sample_rate for recording in utterances], np.int32),
        "onset": np.array(
            [-1 if recording.onset is None else recording.onset for recording in utterances],
            np.int64,
        ),
        "error": np.array(
            [errors.index(recording.error) if recording.error else -1 for recording in utterances],
            np.int32,
        ),
        "errors": np.array(errors, np.str_),
        "chunks": np.array([len(recording.samples) for recording in utterances], np.int32),
        "intervals_us": np.concatenate(
            [
                nothing,
                *(
                    np.diff(_microseconds(recording.arrivals_s), prepend=0)
                    for recording in utterances
                ),
            ]
        ),
        "samples": np.concatenate([nothing, *(recording.samples for recording in utterances)]),
    }
    try:
        np.savez_compressed(path, **arrays)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({reason(error)})") from None


def load_recordings(path: Path) -> dict[str, list[Recording]]:
    """Reads the recordings of each row, by its name. Raises InputError if the file cannot be read,
    or is no file of recordings.
    """
    try:
        arrays = arrays_in_npz(content_of(path), _NAMES)
        ends = np.cumsum(arrays["chunks"])
        rows: dict[str, list[Recording]] = {}
        for number, end in enumerate(ends.tolist()):
            of_chunks = slice(end - int(arrays["chunks"][number]), end)
            onset, error = int(arrays["onset"][number]), int(arrays["error"][number])
            arrivals_us = np.cumsum(arrays["intervals_us"][of_chunks])
            recording = Recording(
                arrivals_us / _MICROSECONDS,
                arrays["samples"][of_chunks],
                int(arrays["sample_rate"][number]),
                float(arrays["ended_us"][number] / _MICROSECONDS),
                complete=bool(arrays["complete"][number]),
                onset=None if onset < 0 else onset,
                began_s=float(arrays["began_us"][number] / _MICROSECONDS),
                error="" if error < 0 else str(arrays["errors"][error]),
            )
            rows.setdefault(str(arrays["row"][number]), []).append(recording)
    except (*UNREADABLE, IndexError) as error:
        raise InputError(f"{path}: cannot read recordings ({reason(error)})") from None
    return rows


def _microseconds(seconds: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.rint(np.asarray(seconds, np.float64) * _MICROSECONDS).astype(np.int64)

"""Decoders of `codec.cpp`, a public C++ library for codecs on ggml, without a state for streams.

The library is called by its C interface, so its audio stays float32. Build it from its source, and
name the folder of the source in CODEC_CPP. The conversion needs the packages `gguf` and `scipy`:

    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
        -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DCODEC_BUILD_TTS_CLI=OFF -DCODEC_TTS_BACKBONE=OFF
    cmake --build build --target codec_shared
"""

from __future__ import annotations

import ctypes
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from lab.golden.golden_dac import by_codebook

VARIABLE = "CODEC_CPP"
_SEED = -1  # the library's default


class _ModelParams(ctypes.Structure):
    _fields_ = (("use_gpu", ctypes.c_bool), ("n_threads", ctypes.c_int32))


class _DecodeParams(ctypes.Structure):
    _fields_ = (("n_threads", ctypes.c_int32), ("n_q", ctypes.c_int32))


class _Tokens(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("n_tokens", "n_frames", "n_q"),
                *("codebook_size", "sample_rate", "hop_size"),
            )
        ),
    )


class _Audio(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(ctypes.c_float)),
        *((name, ctypes.c_int32) for name in ("n_samples", "sample_rate", "n_channels")),
    )


def source() -> Path:
    """Returns the folder of the source and of the library that was built from it."""
    folder = Path(os.environ.get(VARIABLE, ""))
    if not (folder / "build" / "libcodec.so").is_file():
        raise SystemExit(f"{VARIABLE}: name the folder of codec.cpp, with build/libcodec.so in it")
    return folder


def decoder(kind: str, model: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Loads a model folder, with weights in float16, the default of the library's converter.

    Args:
        kind: name of the codec in the converter.

    Returns:
        Function from codes (streams, codebooks, frames) to audio (streams, samples). It computes
        one stream after the other, as the library's own function for a batch does.
    """
    library = _library()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        script = source() / "scripts" / "convert-to-gguf.py"
        command = [sys.executable, str(script), "--model-type", kind, "--output", str(file)]
        subprocess.run(
            [*command, "--checkpoint-path", str(_ADAPTED.get(kind, Path)(model))],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        threads = torch.get_num_threads()
        loaded = library.codec_model_load_from_file(
            str(file).encode(), _ModelParams(False, threads)
        )
    context = library.codec_init_from_model(loaded, ctypes.c_int32(_SEED))
    facts = [
        getattr(library, f"codec_model_{name}")(loaded)
        for name in ("codebook_size", "sample_rate", "hop_size")
    ]

    def decode(codes: torch.Tensor) -> torch.Tensor:
        # (frames, codebooks)
        rows = _packed(codes).numpy() if kind == "snac" else codes.numpy().transpose(0, 2, 1)
        return torch.from_numpy(
            np.stack([one(np.ascontiguousarray(row, np.int32)) for row in rows])
        )

    def one(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        frames, codebooks = codes.shape
        tokens = _Tokens(codes.ctypes.data, codes.size, frames, codebooks, *facts)
        audio = _Audio()
        params = _DecodeParams(threads, codebooks)
        if library.codec_decode(context, ctypes.byref(tokens), ctypes.byref(audio), params):
            raise RuntimeError(library.codec_get_last_error(context).decode())
        samples = np.ctypeslib.as_array(audio.data, (audio.n_samples,)).copy()
        library.codec_pcm_buffer_free(ctypes.byref(audio))
        return samples

    return decode


def _library() -> Any:
    library = ctypes.CDLL(str(source() / "build" / "libcodec.so"))
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    library.codec_model_load_from_file.argtypes = (text, _ModelParams)
    library.codec_model_load_from_file.restype = pointer
    library.codec_init_from_model.argtypes = (pointer, ctypes.c_int32)
    library.codec_init_from_model.restype = pointer
    library.codec_decode.argtypes = (pointer, pointer, pointer, _DecodeParams)
    library.codec_get_last_error.argtypes = (pointer,)
    library.codec_get_last_error.restype = text
    for name in ("codebook_size", "sample_rate", "hop_size"):
        getattr(library, f"codec_model_{name}").argtypes = (pointer,)
    return library


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Returns SNAC's codes (streams, 7, frames) as (streams, 4 * frames, 3), in which slower
    codebooks repeat their codes.
    """
    levels = by_codebook(codes, [4, 2, 1])
    steps = levels[-1].shape[-1]
    return torch.stack(
        [level.repeat_interleave(steps // level.shape[-1], -1) for level in levels], -1
    )


def _nemo(model: Path) -> Path:
    """Gives the weights of a .nemo file the names of an older torch, which the converter knows."""
    path = model / "renamed.nemo"
    with tarfile.open(model / "codec.nemo") as published, tarfile.open(path, "w") as renamed:
        for member in published.getmembers():
            content = published.extractfile(member)
            if content is None:
                continue
            data = content.read()
            if member.name.endswith(".ckpt"):
                weights = torch.load(io.BytesIO(data), weights_only=True)
                file = io.BytesIO()
                torch.save({_older(name): value for name, value in weights.items()}, file)
                data = file.getvalue()
            entry = tarfile.TarInfo(member.name)
            entry.size = len(data)
            renamed.addfile(entry, io.BytesIO(data))
    return path


def _older(name: str) -> str:
    name = name.replace(".parametrizations.weight.original0", ".weight_g")
    return name.replace(".parametrizations.weight.original1", ".weight_v")


def _snac(model: Path) -> Path:
    """Adds an encoder, which the converter asks for and decoding does not use."""
    file = model / "pytorch_model.bin"
    weights = torch.load(file, weights_only=True)
    weights |= dict.fromkeys(_encoder_of_snac(), torch.ones(1, 1, 1))
    for name in [name for name in weights if name.endswith("out_proj.bias")]:
        start = name.removesuffix("out_proj.bias")
        for part in ("original0", "original1"):
            weights.setdefault(
                f"{start}in_proj.parametrizations.weight.{part}", torch.ones(1, 1, 1)
            )
    torch.save(weights, file)
    return model


def _encoder_of_snac() -> Iterator[str]:
    convolutions, alphas = ["encoder.block.0", "encoder.block.5"], list[str]()
    for block in range(1, 5):
        start = f"encoder.block.{block}.block"
        convolutions.append(f"{start}.4")
        alphas.append(f"{start}.3")
        for unit in range(3):
            convolutions += [f"{start}.{unit}.block.{layer}" for layer in (1, 3)]
            alphas += [f"{start}.{unit}.block.{layer}" for layer in (0, 2)]
    for name in convolutions:
        yield from (f"{name}.parametrizations.weight.original{part}" for part in (0, 1))
    yield from (f"{name}.alpha" for name in alphas)


_ADAPTED: dict[str, Callable[[Path], Path]] = {"nemo_nano_codec": _nemo, "snac": _snac}

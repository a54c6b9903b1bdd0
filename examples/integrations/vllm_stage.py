"""Codes through the code2wav stage of vLLM-Omni that decodes on a token2wav server.

python vllm_stage.py 127.0.0.1:8001 codes.npy speech.wav

The function that carries codes from the talker to the stage, its payloads and the type of the
output are those of the package `vllm-omni`. vLLM itself, which needs gigabytes of CUDA libraries,
is not installed: three of its modules have stand-ins here.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import soundfile
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "stages"))
REFERENCE = 20  # frames of the reference recording
DEPLOYMENT = {
    "codec_chunk_frames": 1,
    "initial_codec_chunk_frames": 1,
    "ref_code_context_frames": 72,
}


def stand_in(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


def import_without_vllm() -> None:
    """Makes modules of vllm_omni importable, without the start of the package, which needs vLLM."""
    stand_in("vllm")
    stand_in("vllm.logger", init_logger=logging.getLogger)
    stand_in("vllm.sequence", IntermediateTensors=dict)
    spec = importlib.util.find_spec("vllm_omni")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    for name in ("vllm_omni", "vllm_omni.model_executor", "vllm_omni.model_executor.models"):
        path = root.joinpath(*name.split(".")[1:])
        stand_in(name, __path__=[str(path)])


def main(url: str, codes_file: str, out: str) -> None:
    os.environ["TOKEN2WAV_URL"] = url
    import_without_vllm()
    import vllm_code2wav
    from vllm_omni.data_entry_keys import to_dict
    from vllm_omni.model_executor.stage_input_processors import qwen3_tts

    codes = torch.from_numpy(np.load(codes_file)).long()
    vllm_code2wav.CODEBOOKS = codes.shape[1]  # the demo codec has fewer than Qwen3-TTS
    stage = vllm_code2wav.Token2WavCode2Wav(vllm_config=None)
    # Two requests in each step. The codes of a reference recording precede those of the second.
    requests = {"whole": (codes, None), "cloned": (codes[REFERENCE:], codes[:REFERENCE])}
    audio: dict[str, list[torch.Tensor]] = {name: [] for name in requests}
    talker = SimpleNamespace(
        connector=SimpleNamespace(config={"extra": DEPLOYMENT}),
        code_prompt_token_ids=defaultdict(list),
        put_req_chunk=defaultdict(int),
    )
    for step in range(len(codes)):
        infos, names = [], []
        for name, (frames, reference) in requests.items():
            if step >= len(frames):
                continue
            output = {"codes": {"audio": frames[step : step + 1]}}
            if reference is not None and not step:
                output["codes"]["ref"] = reference
            request = SimpleNamespace(
                external_req_id=name, is_finished=lambda: False, additional_information=None
            )
            last = step == len(frames) - 1
            payload = qwen3_tts.talker2code2wav_async_chunk(talker, output, request, last)
            talker.put_req_chunk[name] += 1
            infos.append(to_dict(payload))
            names.append(name)
        output = stage(runtime_additional_information=infos, request_ids=names).multimodal_outputs
        for name, part in zip(names, output["model_outputs"], strict=True):
            audio[name].append(part)
    whole, cloned = (torch.cat(parts).numpy() for parts in audio.values())
    heard = whole[-len(cloned) :]
    samples_per_frame = len(whole) // len(codes)
    assert len(whole) - len(cloned) == REFERENCE * samples_per_frame, (len(whole), len(cloned))
    difference = np.abs(heard - cloned).max()
    print(f"{len(codes)} frames, {len(whole)} samples; after a reference: {difference:g}")
    assert difference < 1e-4, difference
    soundfile.write(out, whole, vllm_code2wav.SAMPLE_RATE)


if __name__ == "__main__":
    main(*sys.argv[1:])

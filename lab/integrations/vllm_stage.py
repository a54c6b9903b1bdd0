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

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "stages"))
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
    for version in (1, 2):
        stage = vllm_code2wav.Token2WavCode2Wav(vllm_config=None)
        assert len(stage(runtime_additional_information=[{}]).multimodal_outputs["sr"]) == 1
        speech = Speech(stage, qwen3_tts.talker2code2wav_async_chunk, to_dict, version)
        # The codes of a reference recording precede those of the second request.
        whole, cloned = speech.of(codes, None), speech.of(codes[REFERENCE:], codes[:REFERENCE])
        samples = len(whole) // len(codes)
        assert len(whole) - len(cloned) == REFERENCE * samples, (len(whole), len(cloned))
        difference = np.abs(whole[-len(cloned) :] - cloned).max()
        assert difference < 1e-4, difference
        speech.leave(codes)
        print(f"runner {version}: {len(codes)} frames, {len(whole)} samples; {difference:g}")
    soundfile.write(out, whole, vllm_code2wav.SAMPLE_RATE)


class Speech:
    """Talker and runner: sends a frame of codes in each step, as vLLM-Omni's do.

    Args:
        chunk: function of vLLM-Omni that makes the payload of a step.
        version: version of vLLM-Omni's runner; each has its own place for the name of a request.
    """

    def __init__(self, stage: Any, chunk: Any, to_dict: Any, version: int) -> None:
        self._stage, self._chunk, self._to_dict, self._version = stage, chunk, to_dict, version
        self._talker = SimpleNamespace(
            connector=SimpleNamespace(config={"extra": DEPLOYMENT}),
            code_prompt_token_ids=defaultdict(list),
            put_req_chunk=defaultdict(int),
        )
        self._requests = 0

    def of(self, frames: torch.Tensor, reference: torch.Tensor | None) -> np.ndarray:
        """Returns the audio of a request."""
        self._requests += 1
        name = f"request-{self._requests}"
        steps = range(len(frames))
        audio = [self._step(name, frames, reference, step) for step in steps]
        return torch.cat(audio).numpy()

    def leave(self, frames: torch.Tensor) -> None:
        """Aborts a request after its first step."""
        self._step("left", frames, None, 0)
        self._stage.on_requests_finished({"left"})

    def _step(
        self, name: str, frames: torch.Tensor, reference: torch.Tensor | None, step: int
    ) -> torch.Tensor:
        output = {"codes": {"audio": frames[step : step + 1]}}
        if reference is not None and not step:
            output["codes"]["ref"] = reference
        request = SimpleNamespace(
            external_req_id=f"external-{name}",
            is_finished=lambda: False,
            additional_information=None,
        )
        payload = self._chunk(self._talker, output, request, step == len(frames) - 1)
        self._talker.put_req_chunk[request.external_req_id] += 1
        info = self._to_dict(payload)
        if self._version == 1:
            outputs = self._stage(runtime_additional_information=[info], request_ids=[name])
        else:
            outputs = self._stage(model_intermediate_buffer=[info | {"req_id": name}])
        [audio] = outputs.multimodal_outputs["model_outputs"]
        return audio


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Entry point of the third stage of the ensemble, which computes audio for batches of chunks."""

from token2wav_server.ensemble.stages import load_vocoder
from token2wav_server.ensemble.wire import StageModel, vocoder_part
from token2wav_server.triton_model import entry_point

TritonPythonModel = entry_point(
    lambda args: StageModel(args["model_name"], load_vocoder, vocoder_part)
)

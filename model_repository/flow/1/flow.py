"""Entry point of a stage of the ensemble, which computes mel for batches of chunks."""

from token2wav_server.ensemble.stage_model import StageModel
from token2wav_server.triton_model import entry_point

TritonPythonModel = entry_point(lambda args: StageModel("flow"))

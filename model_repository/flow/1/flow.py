"""Entry point of the second stage of the ensemble, which computes mel for batches of chunks."""

from token2wav_server.ensemble.stages import load_flow
from token2wav_server.ensemble.wire import StageModel, flow_part
from token2wav_server.triton_model import entry_point

TritonPythonModel = entry_point(lambda args: StageModel(args["model_name"], load_flow, flow_part))

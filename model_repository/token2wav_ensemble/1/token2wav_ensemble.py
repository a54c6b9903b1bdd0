"""Entry point of the ensemble, which schedules streams and calls its stages."""

from token2wav_server.ensemble.ensemble import Ensemble, stage_models
from token2wav_server.model_process import read_environment
from token2wav_server.triton_model import entry_point

TritonPythonModel = entry_point(
    lambda args: Ensemble(*read_environment(), stage_models(args["model_config"]))
)

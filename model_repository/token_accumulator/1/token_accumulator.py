"""Entry point of the first stage of the ensemble, which cuts tokens into chunks."""

from token2wav_server.ensemble.accumulator import Accumulator
from token2wav_server.model_process import read_environment
from token2wav_server.triton_model import entry_point

TritonPythonModel = entry_point(lambda args: Accumulator(args["model_name"], *read_environment()))

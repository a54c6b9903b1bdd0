"""Entry point of the model `token2wav`, which Triton calls with requests.

It passes the requests to the engine, a process of its own with the model, and returns at once.
"""

from token2wav_server.front.python_front import PythonFront
from token2wav_server.triton_model import entry_point

TritonPythonModel = entry_point(lambda args: PythonFront(args["model_instance_name"]))

"""Entry point of text to speech with the interface of CosyVoice's Triton recipe, which Triton calls
with requests.
"""

import triton_python_backend_utils  # noqa: F401 - before NumPy, because it selects the version

from token2wav_gateway.doors.recipe import RecipeService
from token2wav_server.triton_model import entry_point

TritonPythonModel = entry_point(lambda args: RecipeService.start(args["model_config"]))

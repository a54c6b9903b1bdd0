"""Gateway: text in, speech out, with the interfaces of OpenAI.

The gateway asks a language model server for speech tokens, pushes the tokens into a stream of the
Triton model `token2wav` as they arrive, and sends the audio on as it arrives.
"""

import os

# The library gRPC writes a line to the standard error stream for each wrong call of a client, which
# could fill the disk. It reads this variable when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

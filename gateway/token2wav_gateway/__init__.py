"""Gateway: text in, speech out, with the interfaces of OpenAI.

The gateway asks a language model server for speech tokens, pushes the tokens into a stream of the
Triton model `token2wav` as they arrive, and sends the audio on as it arrives.
"""

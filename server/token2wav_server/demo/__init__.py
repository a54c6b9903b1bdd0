"""Demo: the voice and the stand-in for a language model of `token2wav up`.

The folders `model` and `recordings` are links to those of `examples/demo_voice`. The wheel has
copies, and the images have neither, because they lack the packages of the stand-in.
"""

from pathlib import Path

MODEL = Path(__file__).with_name("model")
PROMPT = Path(__file__).parent / "recordings" / "prompt.wav"
PROMPT_TEXT = (
    "The harbor was quiet in the early morning, and the first boats were coming home with their "
    "nets."
)
VOICE = "joe"
TEMPLATE = "demo"  # of the gateway

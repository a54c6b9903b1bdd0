"""StreamFlow: its folder, and a flow under block-wise guided attention."""

from token2wav.families.streamflow.config import StreamFlowConfig

FILES = (StreamFlowConfig.FILE,)
read = StreamFlowConfig.read
DOWNLOADS = (*FILES, "flow.safetensors|flow.pt", "bigvgan/*")

"""StreamFlow: its folder, and the flow under block-wise guided attention."""

"""The stages as Triton models of their own, for those who scale them apart. docs/ensemble.md says when that pays."""

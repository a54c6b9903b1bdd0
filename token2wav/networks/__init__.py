"""Networks as plain modules that several families share, and the sizes that configure them."""

"""How long tests wait for what must come: a busy machine stalls for a minute, and no test is about
speed.
"""

PATIENCE_SECONDS = 300.0

"""Command `token2wav gateway` under observation: at SIGUSR1 it prints the number of its tasks."""

from __future__ import annotations

import asyncio
import signal
import sys

from token2wav_gateway import cli


def main() -> int:
    # Python calls the function in the main thread, which runs the event loop.
    signal.signal(signal.SIGUSR1, lambda *_: print(len(asyncio.all_tasks()), flush=True))
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())

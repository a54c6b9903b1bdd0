"""Load of nari's `tts_bench` on the gateway, as the tool is.

python nari_bench.py http://127.0.0.1:8080/v1 "Hello." speech.wav

The gateway takes the requests of vLLM-Omni, one of the tool's targets. Two utterances say the text,
and the speech of the first one is written to `speech.wav`. Results of an earlier call are deleted.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path


def main(base_url: str, text: str, out: Path) -> None:
    results, prompts = out.with_suffix(".results"), out.with_suffix(".jsonl")
    shutil.rmtree(results, ignore_errors=True)  # the tool uses no folder twice
    prompts.write_text(json.dumps({"id": "text", "text": text}) + "\n")
    command = [str(Path(sys.executable).with_name("bench")), "run", "--target", "vllm-omni"]
    command += ["--base-url", base_url.removesuffix("/v1"), "--health-path", "/health/ready"]
    command += ["--model", "tts-1", "--voice", "alloy", "--dataset", str(prompts)]
    command += ["--arrival", "constant", "--rps", "0.5", "--warmup", "0", "--duration", "4s"]
    report = subprocess.run([*command, "--output", str(results)], stdout=subprocess.PIPE, text=True)
    if report.returncode:
        sys.exit(report.returncode)
    shown = ("  successful", "  underrun requests", "  Audible TTFA", "  Per-request RTF")
    for line in report.stdout.splitlines():
        if line.startswith(shown):
            print(line.strip())
    shutil.copy(min((results / "audio" / "wav" / "measurement").iterdir()), out)


if __name__ == "__main__":
    base_url, text, out = sys.argv[1:]
    main(base_url, text, Path(out))

#!/usr/bin/env bash
# What the server's containers run. The first argument says what:
#
#   serve [OPTION...]   the server, with further options of token2wav-serve
#   engines             builds what this GPU can run and is not there yet, and ends
#   anything else       that command
set -euo pipefail

# In the images /opt/token2wav, which is laid out like the checkout.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root
readonly model=${TOKEN2WAV_MODEL_FOLDER:-/model}
readonly settings=${TOKEN2WAV_SETTINGS_FILE:-$root/docker/server.yaml}
readonly engines=${TOKEN2WAV_ENGINES_FOLDER:-/engines}
readonly link=${TOKEN2WAV_ENGINES_LINK:-/run/token2wav/engines}

main() {
    local task=${1:-serve}
    case "$task" in
        serve) serve "${@:2}" ;;
        engines) exec python3 "$root/docker/engines.py" build "$engines" --model "$model" --config "$settings" ;;
        *) exec "$@" ;;
    esac
}

serve() {
    link_engines
    exec token2wav-serve --model "$model" --config "$settings" --model-repository "$root/model_repository" \
        --host "${TOKEN2WAV_HOST:-0.0.0.0}" "$@"
}

# The settings name one place for engines. Which folder of the volume that is depends on the GPU of this container.
link_engines() {
    local folder
    if [[ -z "$(ls -A "$engines" 2>/dev/null)" ]]; then
        return # nothing was built: no reason to look for a GPU
    fi
    folder=$(python3 "$root/docker/engines.py" folder "$engines")
    mkdir -p "$(dirname "$link")"
    ln -sfn "$folder" "$link"
    echo "entrypoint: engines of this machine: $folder"
}

main "$@"

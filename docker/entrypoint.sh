#!/usr/bin/env bash
# Entry point of the server's containers. The first argument selects the task:
#
#   serve [OPTION...]   the server, with further options of token2wav serve
#   engines             builds the missing engines for this GPU, and ends
#   anything else       runs the arguments as a command
set -euo pipefail

# In the images, this is /opt/token2wav, which has the same layout as the checkout.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root
readonly model=${TOKEN2WAV_MODEL_FOLDER:-/model} # or a name, for `token2wav pull`
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
    exec token2wav serve "$model" --config "$settings" --host "${TOKEN2WAV_HOST:-0.0.0.0}" "$@"
}

# The settings have a fixed path for engines. It is a link to the folder of this GPU in the volume.
link_engines() {
    local folder
    if [[ -z "$(ls -A "$engines" 2>/dev/null)" ]]; then
        return # no engine was built, so the GPU need not be found
    fi
    folder=$(python3 "$root/docker/engines.py" folder "$engines" --config "$settings")
    mkdir -p "$(dirname "$link")"
    ln -sfn "$folder" "$link"
    echo "entrypoint: engines of this machine: $folder"
}

main "$@"

#!/usr/bin/env bash
# Builds the images of server, client and gateway with docker, podman or buildah, the first of these that works.
#
#     scripts/images.sh [IMAGE...] [OPTION...]
#
# IMAGE is cpu, gpu, client or gateway; all four by default. Each OPTION is passed to the builder, such as
# --build-arg=NAME=VALUE. The arguments PYTHON_IMAGE and TRITON_IMAGE set the base images. The variables TOKEN2WAV_TAG,
# TOKEN2WAV_TENSORRT, TOKEN2WAV_CUDA and TOKEN2WAV_EXTRAS have the same meaning as in docker/.env.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly tag=${TOKEN2WAV_TAG:-0.1.0}

main() {
    local images=() options=() word builder
    for word in "$@"; do
        case "$word" in
            -*) options+=("$word") ;;
            cpu | gpu | client | gateway) images+=("$word") ;;
            *) fail "$word is not one of cpu, gpu, client, gateway, nor an option" ;;
        esac
    done
    builder=$(chosen_builder)
    ((${#images[@]})) || images=(cpu gpu client gateway)
    for word in "${images[@]}"; do
        build "$builder" "$word" "${options[@]}"
    done
}

build() {
    local builder=$1 image=$2 name what
    case "$image" in
        cpu) name=token2wav-server:$tag-cpu what=(--file docker/server.Dockerfile --target cpu) ;;
        gpu)
            name=token2wav-server:$tag
            what=(--file docker/server.Dockerfile --target gpu --build-arg "TENSORRT=${TOKEN2WAV_TENSORRT:-rtx}"
                --build-arg "CUDA=${TOKEN2WAV_CUDA:-13}" --build-arg "EXTRAS=${TOKEN2WAV_EXTRAS:-client,server,export}")
            ;;
        client | gateway) name=token2wav-$image:$tag what=(--file docker/client.Dockerfile --target "$image") ;;
    esac
    echo "images: $builder builds $name"
    "$builder" build --tag "$name" "${what[@]}" "${@:3}" .
}

# A builder counts only if it works: docker without its daemon does not.
chosen_builder() {
    local builder
    for builder in docker podman buildah; do
        if "$builder" info >/dev/null 2>&1; then
            echo "$builder"
            return
        fi
    done
    fail "none of docker, podman and buildah works here: install one; buildah needs no daemon"
}

fail() {
    echo "images: error: $*" >&2
    exit 1
}

main "$@"

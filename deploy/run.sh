#!/usr/bin/env bash
# The topology of compose.yaml from its image to its end, with docker or with podman.
#
#   deploy/run.sh            build, start, follow; at the end print what came of it, and remove all
#   deploy/run.sh --keep     leave the volumes (checkpoints, certificates) when the run is over
#   deploy/run.sh status     what the run is doing; further words go to `halos status`
#   deploy/run.sh down       stop a run in good order, and remove all that it left
#
# Ctrl-C stops everyone in good order: workers, servers, coordinator. What they saved stays in
# volumes, and the same command goes on from there. Exit code 0 if the run is over or was stopped
# so, 1 if something failed.
#
#   HALOS_ENGINE             docker or podman; by default the one that works
#   and every variable of .env
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=${COMPOSE_PROJECT_NAME:-$(sed -n 's/^COMPOSE_PROJECT_NAME=//p' "$here/.env")}
keep=false
follower=

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $*"
    exit 1
}

works() {
    case $1 in
        docker) docker info && docker compose version ;;
        podman) podman info && podman-compose --version ;;
        *) false ;;
    esac >/dev/null 2>&1
}

choose_engine() {
    for engine in ${HALOS_ENGINE:-docker podman}; do
        if works "$engine"; then return; fi
    done
    fail "no container engine works here: install docker with its compose plugin and start it," \
        "or podman with podman-compose"
}

# Debian's podman wants runc rather than crun where there is no systemd, and to build without
# namespaces where it is itself in a container; neither does harm elsewhere as root.
adapt_podman() {
    runtime=()
    if [ "$engine" = podman ] && [ "$(id -u)" = 0 ]; then
        export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
        if command -v runc >/dev/null; then runtime=(--podman-args "--runtime runc"); fi
    fi
}

compose() {
    if [ "$engine" = docker ]; then
        docker compose --file "$here/compose.yaml" "$@"
    else
        podman-compose "${runtime[@]}" --file "$here/compose.yaml" "$@"
    fi
}

container() { # SERVICE: its container's id
    "$engine" ps --all --quiet --filter "label=com.docker.compose.project=$project" \
        --filter "label=com.docker.compose.service=$1" | head -n 1
}

services() { # PATTERN
    compose config --services 2>/dev/null | grep -E "^$1" || true
}

# Who has told pip about package sources of his own has them used inside the image as well.
gather_wheels() {
    local configured wanted
    # Not a pipe: grep ends at the first match, and pip at a closed pipe.
    configured=$(python3 -m pip config list 2>/dev/null) || return 0
    grep -qE "(find-links|index-url)=" <<<"$configured" || return 0
    wanted=$(
        cd "$here/.." && python3 -c '
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
print("\n".join(project["project"]["dependencies"] + project["build-system"]["requires"]))'
    ) || return 0
    say "Collecting wheels from pip's own sources into deploy/wheels."
    python3 -m pip download --quiet --only-binary=:all: --python-version 3.11 --dest "$here/wheels" \
        --requirement /dev/stdin uv "$(setting HALOS_TORCH)" <<<"$wanted" ||
        fail "pip cannot collect what the image needs; its message is above"
}

setting() { # NAME: from the environment, else from .env
    printf '%s' "${!1:-$(sed -n "s/^$1=//p" "$here/.env")}"
}

build() {
    gather_wheels
    say "Building the image $(setting HALOS_IMAGE) with $engine."
    compose build prepare >&2 || fail "the image cannot be built; the engine's message is above"
}

start() {
    say "Starting: certificates first."
    compose up --detach --no-build prepare >&2 || fail "$engine cannot start the topology"
    local code
    code=$("$engine" wait "$(container prepare)")
    if [ "$code" != 0 ]; then
        "$engine" logs "$(container prepare)" >&2
        fail "certificates and specification could not be made; the reason is above"
    fi
    compose up --detach --no-build >&2 || fail "$engine cannot start the topology"
}

follow() {
    local plain=()
    if [ ! -t 1 ]; then plain=(--no-color); fi
    compose logs --follow "${plain[@]}" &
    follower=$!
}

unfollow() {
    if [ -n "$follower" ]; then
        kill "$follower" 2>/dev/null || true
        wait "$follower" 2>/dev/null || true
        follower=
    fi
}

# A coordinator that failed is started again by the engine: only what stays down has ended.
wait_for_end() {
    local id code
    id=$(container coordinator)
    while true; do
        "$engine" wait "$id" >"$answer" &
        wait $! || fail "$engine lost the coordinator's container"
        code=$(tail -n 1 "$answer")
        case $code in
            0) return ;;
            2) fail "the coordinator refuses to start; its message is above" ;;
        esac
        sleep 5
        if [ "$("$engine" inspect --format '{{.State.Running}}' "$id")" != true ]; then
            fail "the coordinator ended with exit code $code"
        fi
        say "The coordinator ended with exit code $code and was started again."
    done
}

stop_in_order() {
    local kind names
    for kind in evaluator worker- server- coordinator netem-; do
        mapfile -t names < <(services "$kind")
        if [ ${#names[@]} -gt 0 ]; then compose stop "${names[@]}" >/dev/null 2>&1 || true; fi
    done
}

remove() { # further options of `compose down`
    compose down "$@" >/dev/null 2>&1 || say "Not all could be removed: call deploy/run.sh down."
}

interrupted() {
    trap '' INT TERM
    say "Stopping: workers, servers, coordinator."
    stop_in_order
    unfollow
    remove
    say "Stopped. What was saved stays in volumes; the same command goes on from there."
    trap - EXIT
    rm -f "$answer"
    exit 0
}

ended() { # whatever ended this script: nothing goes on running
    local code=$?
    trap '' INT TERM
    unfollow
    rm -f "$answer"
    if [ "$code" != 0 ]; then
        stop_in_order
        remove
        say "Volumes are left as they are; deploy/run.sh down removes them."
    fi
    exit "$code"
}

operator() { # a command of halos that looks on
    local terminal=()
    if [ ! -t 0 ] || [ ! -t 1 ]; then terminal=(-T); fi
    compose --profile tools run --rm "${terminal[@]}" operator "$@"
}

# What the coordinator told at its end, and the links at theirs.
summary() {
    local told region
    told=$("$engine" logs "$(container coordinator)" 2>/dev/null | tail -n 1)
    told=${told%%, \"evaluations\"*}
    number() { sed -n "s/.*\"$1\": \([0-9]*\).*/\1/p" <<<"$told"; }
    echo
    echo "trained on   $(number reported_tokens) tokens in $(number local_steps) local steps"
    echo "credited     $(number credited) of $(number total) samples"
    echo "delivered    $(number delivered)"
    for region in $(services netem- | cut -d - -f 2); do
        echo "link of $region   $("$engine" logs "$(container "netem-$region")" 2>&1 | tail -n 1)"
    done
    operator eval /runs/compose --samples 1024
}

run() {
    answer=$(mktemp)
    trap ended EXIT
    trap interrupted INT TERM
    build
    start
    follow
    wait_for_end
    stop_in_order
    unfollow
    summary
    if [ "$keep" = true ]; then remove; else remove --volumes; fi
}

choose_engine
adapt_podman
case ${1:-} in
    "") run ;;
    --keep) keep=true && run ;;
    status) shift && operator status coordinator:7443 --certs /certs/operator "$@" ;;
    down) stop_in_order && remove --volumes ;;
    *) fail "$1: is neither --keep, status nor down" ;;
esac

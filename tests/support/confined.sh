#!/bin/sh
# Runs a command with what most people have, when started as root:
#
#     confined.sh user COMMAND ...        as an ordinary user, who owns what root owns
#     confined.sh container COMMAND ...   as root of a container: no capabilities, 64 MB of shared memory
#
# Where this machine does not allow it, it says so, and nothing is run.
kind=$1
shift

skip() {
    echo "skipped: $1"
    exit 0
}

test "$(id -u)" = 0 || skip "confined to a $kind, tests run only when started as root; this is an ordinary user"

case $kind in
user)
    enter() { unshare --map-user=65534 --map-group=65534 -- "$@"; }
    ;;
container)
    enter() {
        unshare --mount -- sh -c '
            mount -t tmpfs -o size=64m tmpfs /dev/shm &&
            exec setpriv --bounding-set=-all --inh-caps=-all -- "$@"' sh "$@"
    }
    ;;
*)
    echo "found $kind, expected user or container" >&2
    exit 2
    ;;
esac

reason=$(enter true 2>&1) || skip "cannot be confined to a $kind here: $reason"
# Of its own: what is made under another name would be in the way of a user who has it.
PYTEST_DEBUG_TEMPROOT=$(mktemp -d)
export PYTEST_DEBUG_TEMPROOT
trap 'rm -rf "$PYTEST_DEBUG_TEMPROOT"' EXIT
enter "$@"

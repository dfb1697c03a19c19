#!/bin/sh
# Stands in for the emulator in bad_input.rs: reads the options that matter and does what the file `behaviour`, beside the
# link by which it was called, says. `daemon COMMANDS` starts a process that has the telling option, runs COMMANDS, and
# stays. It deliberately knows no machine.
set -u

while [ $# -gt 0 ]; do
    case $1 in
    -pidfile) pidfile=$2 ;;
    -serial) console=${2#file:} ;;
    -netdev) net=$2 ;;
    esac
    shift
done

daemon() {
    sh -c 'echo $$ >"$2"; eval "$3"; while sleep 0.1; do :; done' daemon -pidfile "$pidfile" "$1" >/dev/null 2>&1 &
    while [ ! -s "$pidfile" ]; do sleep 0.01; done
}

. "$(dirname "$0")/behaviour"

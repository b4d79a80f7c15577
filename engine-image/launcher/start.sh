#!/bin/sh
# What the container starts with. The kernel throws away a signal for which the first process has no handler, and Python
# needs a moment until it has one: a pod that is deleted in that moment would go on until its grace ends. A shell has its
# handler at once, and to the launcher, which is not the first process, an early signal is simply its end.
launcher=
stopped=
trap 'stopped=1; [ -z "$launcher" ] || kill -TERM "$launcher"' TERM INT
python3 -P -m launcher "$@" &
launcher=$!
[ -z "$stopped" ] || kill -TERM "$launcher"
while :; do
    wait "$launcher"
    code=$?
    kill -0 "$launcher" 2> /dev/null || exit "$code" # else it was the signal that ended the wait
done

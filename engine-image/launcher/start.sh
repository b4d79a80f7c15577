#!/bin/sh
# What the container starts with. The kernel throws away a signal for which the first process has no handler, and Python
# needs a moment until it has one: a pod that is deleted in that moment would go on until its grace ends. A shell has its
# handler at once, and to the launcher, which is not the first process, an early signal is simply its end. For the
# millisecond in which the launcher is still a copy of this shell it has the shell's handler and loses what it is sent:
# so it is told again, which it takes for one.
launcher=
stopped=
stop() {
    stopped=1
    [ -n "$launcher" ] || return 0
    kill -TERM "$launcher"
    { sleep 1; kill -TERM "$launcher"; } 2> /dev/null &
}
trap stop TERM INT
python3 -P -m launcher "$@" &
launcher=$!
[ -z "$stopped" ] || stop
while :; do
    wait "$launcher"
    code=$?
    kill -0 "$launcher" 2> /dev/null || exit "$code" # else it was the signal that ended the wait
done

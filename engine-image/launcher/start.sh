#!/bin/sh
# What the container starts with. The kernel throws away a signal for which the first process has no handler, and Python
# needs a moment until it has one: a pod that is deleted in that moment would go on until its grace ends. A shell has its
# handler at once, and to the launcher, which is not the first process, an early signal is simply its end. But for about
# a millisecond the launcher is still a copy of this shell, and loses what it is sent: it is told once it has a name.
launcher=
stopped=
stop() {
    stopped=1
    [ -n "$launcher" ] || return 0
    read -r own < /proc/$$/comm
    while read -r name < "/proc/$launcher/comm" && [ "$name" = "$own" ]; do sleep 0.01; done 2> /dev/null
    kill -TERM "$launcher"
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

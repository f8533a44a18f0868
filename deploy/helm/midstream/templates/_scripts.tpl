{{/*
What containers run in a shell, and why. The folder is the pod's own, in memory; all containers are one user.

The end of a pod: the kubelet runs all preStop hooks at once, then ends the engines, and the native sidecars after them.
So it is the engines that have to wait while answers end, or they would be gone first. A hook also runs where an engine
alone is killed because its liveness probe fails; only the sidecar's own hook means that the sidecar is to end, too.
*/}}

{{/* The holder, in a container of its own: with the sidecar's everything in that is killed, and its pools must stay. */}}
{{- define "midstream.script.holder" -}}
cd {{ include "midstream.folder" . }} || exit 1
mkdir -p -m 0700 state || exit 1
trap 'kill "$running" 2> /dev/null; wait "$running"; exit 0' TERM INT
# Again where it ended, or where the sidecar has started one in its place, which holds the lock.
while true; do
  python -m midstream.sidecar.holder --socket {{ include "midstream.stateDir" . }}/holder.sock & running=$!
  wait "$running"
  sleep 5 & running=$!
  wait "$running"
done
{{- end -}}

{{- define "midstream.script.sidecar" -}}
cd {{ include "midstream.folder" . }} || exit 1
rm -f ending
echo "$$" > pid
exec midstream serve --config /etc/midstream/midstream.yaml
{{- end -}}

{{/* Engines that start before their place is offered would serve without it. */}}
{{- define "midstream.script.offered" -}}
{{- $folder := include "midstream.stateDir" . -}}
{{- range $index := until (int .Values.engine.count) -}}
test -s {{ $folder }}/workers/engine-{{ $index }}/ticket.json || exit 1
{{ end -}}
{{- end -}}

{{- define "midstream.script.sidecarEnds" -}}
cd {{ include "midstream.folder" . }} || exit 0
touch ending
# Balancers hear of the end as late as this; until then new requests are served.
sleep {{ int64 .Values.drain.delaySeconds }}
kill -TERM "$(cat pid)"
{{- end -}}

{{- define "midstream.script.engineEnds" -}}
cd {{ include "midstream.folder" . }} || exit 0
waited=0
while [ ! -e ending ]; do
  [ "$waited" -ge 3 ] && exit 0
  sleep 1
  waited=$((waited + 1))
done
# The sidecar takes its address away when no answer runs any more.
while [ -e state/url ] && kill -0 "$(cat pid)" 2> /dev/null; do
  [ "$waited" -ge {{ include "midstream.drainedSeconds" . }} ] && exit 0
  sleep 1
  waited=$((waited + 1))
done
{{- end -}}

{{/* Whether the front end answers, in whatever image: each engine has Python. */}}
{{- define "midstream.script.alive" -}}
import sys, urllib.request
sys.exit(urllib.request.urlopen("http://127.0.0.1:%s/health" % sys.argv[1], timeout=10).status != 200)
{{- end -}}
